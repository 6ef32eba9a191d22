"""Which parts of a job go together: each part names those that it may be combined with, and all others are refused.

So a new mode or a new table is refused with everything until it has a row here. The checks of single parts have the
reasons for refusals, where there is more to tell than the two names, and compare values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import NODEFAULT, Struct, structs

from fedplat.aggregate.drift import EASGD as _EASGD
from fedplat.config.plugins import name_of
from fedplat.job.tables import JobTables

SYNC: Final = 'mode.kind = "sync"'
BUFFERED: Final = 'mode.kind = "buffered"'
STALE_SYNCHRONOUS: Final = 'mode.kind = "ssp"'
CYCLIC: Final = 'mode.kind = "cyclic"'
GOSSIP: Final = 'mode.kind = "gossip"'
ELASTIC: Final = f'aggregation.rule = "{_EASGD}"'
DISTILL: Final = 'server_step.method = "distill"'
UPLINK: Final = "compression.uplink"
DOWNLINK: Final = "compression.downlink"
OF_CLIENTS: Final = "evaluation.clients"

_BASIC: Final = frozenset({"updates", "retention", "evaluation.every", "evaluation.server", "warm_start"})
"""Parts that go with each other, and with most of the others."""
_SERVER_RULE: Final = frozenset({DOWNLINK, "aggregation", "durability", "server_step"})
_OPEN: Final = _SERVER_RULE | {UPLINK, OF_CLIENTS, "pool"}
"""Parts of a job whose server sees the updates of single clients."""
COMBINES: Final[Mapping[str, frozenset[str]]] = {
    SYNC: _BASIC | _OPEN | {ELASTIC, DISTILL, "robust", "privacy", "secure_aggregation", "flower"},
    BUFFERED: _BASIC | _OPEN | {ELASTIC, "robust"},
    STALE_SYNCHRONOUS: _BASIC | _OPEN | {ELASTIC},
    CYCLIC: _BASIC | {UPLINK, DOWNLINK, OF_CLIENTS, "durability"},
    GOSSIP: frozenset({"updates", "evaluation.every", UPLINK}),
    "flower": frozenset({"retention"}),
    "secure_aggregation": _BASIC | _SERVER_RULE | {"privacy"},
    "privacy": _BASIC | _SERVER_RULE | {UPLINK, "pool"},
    "robust": _BASIC | _OPEN,
    DISTILL: _BASIC | {UPLINK, OF_CLIENTS, "aggregation", ELASTIC, "pool", "server_step"},
    "server_step": _BASIC | {UPLINK, OF_CLIENTS, "aggregation", ELASTIC, "pool", "durability"},
    "pool": _BASIC | {UPLINK, DOWNLINK, OF_CLIENTS, "aggregation", ELASTIC},
    "durability": _BASIC | {UPLINK, DOWNLINK, OF_CLIENTS, "aggregation", ELASTIC},
    OF_CLIENTS: _BASIC | {UPLINK, DOWNLINK, "aggregation", ELASTIC},
    ELASTIC: _BASIC | {UPLINK, "aggregation"},
    "aggregation": _BASIC | {UPLINK, DOWNLINK},
    DOWNLINK: _BASIC | {UPLINK},
    UPLINK: _BASIC,
    **dict.fromkeys(sorted(_BASIC), _BASIC),
}
"""What each part may be combined with. It is enough that one of the two names the other."""
_OF_ALL: Final = frozenset({"approval", "config", "deadlines", "retry"})
"""Keys that every job may have."""


def may_combine(one: str, other: str) -> bool:
    """Return whether a job may have both parts."""
    return other in COMBINES.get(one, ()) or one in COMBINES.get(other, ())


def is_mode(part: str) -> bool:
    """Return whether a part is a mode, of which a job has exactly one."""
    return part.startswith("mode.kind")


def list_parts(spec: JobTables) -> list[str]:
    """Return the parts of a job: its mode, and every other key that does not have its default."""
    return [f'mode.kind = "{name_of(spec.mode)}"', *_list_changed(spec)]


def find_contrary(spec: JobTables, part: str) -> list[str]:
    """Return the parts of a job that must not be combined with one of them."""
    return [other for other in list_parts(spec) if other != part and not may_combine(part, other)]


def explain(spec: JobTables, part: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield a mistake for each part of a job that must not be combined with one of them, and has a reason here."""
    for other in find_contrary(spec, part):
        if other in reasons:
            yield f"{other}: {reasons[other]}"


def check(spec: JobTables) -> None:
    """Raise `ValueError` with a line for each part that does not go together with one before it."""
    mistakes: dict[str, str] = {}
    for part, other in itertools.combinations(list_parts(spec), 2):
        if not may_combine(part, other):
            mistakes.setdefault(other, f"{other}: it cannot be used with {part}; expected one of them only")
    if mistakes:
        raise ValueError("\n".join(mistakes.values()))


def _list_changed(spec: JobTables) -> Iterator[str]:
    for name in _find_changed(spec):
        match name:
            case "mode":
                pass  # it is a part in any case
            case "compression" | "evaluation":
                table = getattr(spec, name)
                yield from (f"{name}.{key}" for key in _find_changed(table))
            case "aggregation":
                yield name
                if name_of(spec.aggregation) == _EASGD:
                    yield ELASTIC
            case "server_step":
                yield name
                if spec.server_step is not None and spec.server_step.method == "distill":
                    yield DISTILL
            case _:
                yield name


def _find_changed(table: Struct) -> Iterator[str]:
    """Yield the keys of a table that have a default, and another value."""
    for name, default in _list_defaults(type(table)):
        value = getattr(table, name)
        if value is not default and (default is None or value != default):
            yield name


@functools.cache  # each change of a job is checked anew
def _list_defaults(table: type[Struct]) -> list[tuple[str, object]]:
    return [
        (field.name, field.default if field.default_factory is NODEFAULT else field.default_factory())
        for field in structs.fields(table)
        if not field.required and field.name not in _OF_ALL
    ]
