"""The parts of a leader: what is made is closed, in reverse order, also if the next part cannot be made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedplat_server.config import ServerConfig
from fedplat_server.coordination.job_checks import Accountant
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.store import open_store
from fedplat_server.leader import parts
from fedplat_server.leader.parts import LeaderParts, Mandate, make_parts
from fedplat_server.metrics.service import MetricsService
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.records.lease import Lease
from fedplat_server.rpc.serving import Endpoint
from fedplat_server.storage.spool_file import RelayStore
from support import databases

OTHERS = {RelayStore}
"""Its half closes it."""


class Witness:
    """Notes which parts are made and closed; the part that `failing` names cannot be made."""

    def __init__(self, patch: pytest.MonkeyPatch, *closable: Any) -> None:
        self.made: list[str] = []
        self.closed: list[str] = []
        self.failing = ""
        for each in closable:
            self._watch(patch, each)

    def _watch(self, patch: pytest.MonkeyPatch, part: Any) -> None:
        make: Callable[..., None] = part.__init__
        close: Callable[..., Any] = part.close
        name = part.__name__

        def note_made(made: object, *arguments: Any, **more: Any) -> None:
            if name == self.failing:
                raise OSError(name)
            make(made, *arguments, **more)
            self.made.append(name)

        def note_closed(made: object) -> Any:
            self.closed.append(name)
            return close(made)

        patch.setattr(part, "__init__", note_made)
        patch.setattr(part, "close", note_closed)


@pytest.fixture
async def mandate(tmp_path: Path) -> Any:
    database = databases.create_sqlite(tmp_path / "server.db")
    config = ServerConfig(listen="127.0.0.1:0", data_dir=tmp_path, database=database)
    store = await open_store(database)
    yield Mandate(
        config=config,
        lease=Lease("d-1", "127.0.0.1:1", 0, "secret", 0.0, 6.0),
        store=store,
        endpoint=cast(Endpoint, SimpleNamespace(tracing=None, certificates=None)),
        metrics=MetricsService(config, lambda: 0),
        store_retry_s=0.1,
        started_unix_s=time.time(),
    )
    await store.close()


def find_closable(made: LeaderParts) -> set[Any]:
    groups = (made.coordination, made.files, made.production, made.records)
    found = {type(part) for group in groups for part in vars(group).values()}
    return {each for each in found if hasattr(each, "close")} - OTHERS


async def test_parts_are_closed_in_reverse_order_and_after_a_failure_only_those_that_were_made(
    mandate: Mandate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        closable = find_closable(await make_parts(stack, mandate))
    assert ServerHalves in closable

    witness = Witness(monkeypatch, Accountant, *closable)
    async with contextlib.AsyncExitStack() as stack:
        await make_parts(stack, mandate)
    order = witness.made.copy()
    assert {*order} == {"Accountant", *(each.__name__ for each in closable)}
    assert witness.closed == order[::-1]
    # What is left of an attempt that is cut off may be what the next leader is about to name in a version.
    assert witness.closed.index("RetentionTask") < witness.closed.index("Aggregation")

    for number, witness.failing in enumerate(order):
        witness.made.clear()
        witness.closed.clear()
        with pytest.raises(OSError, match=witness.failing):
            async with contextlib.AsyncExitStack() as stack:
                await make_parts(stack, mandate)
        assert witness.closed == order[:number][::-1]


async def test_nothing_is_closed_if_the_jobs_cannot_be_read(mandate: Mandate, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> Runner:
        raise OSError("no runner")

    monkeypatch.setattr(parts, "Runner", fail)
    witness = Witness(monkeypatch, Accountant, ServerHalves)
    with pytest.raises(OSError, match="no runner"):
        async with contextlib.AsyncExitStack() as stack:
            await make_parts(stack, mandate)
    assert witness.made == witness.closed == []
