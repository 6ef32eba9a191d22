"""Each kind of job has a protocol, each event a handler, and a wrapper changes only what it names."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import pytest

from fedplat.job.tables import JobTables
from fedplat.rounds import dispatch
from fedplat.rounds.events import JobEvent
from fedplat.rounds.protocols import base, registry
from fedplat.rounds.protocols.base import RoundProtocol
from fedplat.rounds.protocols.private import wrap
from fedplat.rounds.states import HAVE_CLIENTS, HAVE_UPDATES, AttemptKind

MODES = {mode.__struct_config__.tag for mode in get_args(get_type_hints(JobTables)["mode"])}
FUNCTIONS = [field.name for field in dataclasses.fields(RoundProtocol)]


def test_each_mode_has_a_protocol() -> None:
    assert MODES | {"secure", "flower_app", "evaluation", "warm_start"} <= set(base.list_registered())


def test_each_event_has_one_handler() -> None:
    own = {pair for protocol in registry.ALL for pair in protocol.handlers.items()}  # those of a wrapper are the same
    assert sorted(event.__name__ for event in (*dispatch.COMMON, *(event for event, _ in own))) == sorted(
        e.__name__ for e in get_args(JobEvent)
    )


@pytest.mark.parametrize("inner", [registry.AVERAGING, registry.SECURE], ids=lambda inner: inner.name)
def test_privacy_changes_only_what_makes_a_release(inner: RoundProtocol) -> None:
    wrapped = wrap(inner)
    changed = {name for name in FUNCTIONS if getattr(wrapped, name) is not getattr(inner, name)}
    functions = {"name", "begin", "sizes", "count_candidates", "closes_at", "judge_end"}
    assert changed == (functions if inner.has_masks else functions | {"may_be_empty"})


@pytest.mark.parametrize("protocol", registry.ALL, ids=lambda protocol: protocol.name)
def test_the_tables_of_attempts_say_what_their_protocols_do(protocol: RoundProtocol) -> None:
    others = {"evaluation": AttemptKind.EVALUATE, "warm_start": AttemptKind.WARM_START}
    kind = others.get(protocol.name, AttemptKind.TRAIN)
    assert (kind in HAVE_UPDATES) == protocol.folds
    assert (kind in HAVE_CLIENTS) == (protocol.name != "warm_start")
