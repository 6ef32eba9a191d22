"""Computes the aggregate of an attempt on the ranks of the pool, or in this process where they cannot.

The ranks read the updates from the spool and write the files of the next version; the daemon hashes, syncs and adopts
them. Whatever befalls the ranks costs time only: the updates stay in the spool until the version is stored, so all is
done again, and the same bits come out (F35).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import AsyncExitStack
from pathlib import Path

from fedplat import durable
from fedplat.aggregate import state_schema
from fedplat.errors import ModelError
from fedplat.model import ModelFile
from fedplat_server import logs
from fedplat_server.aggregation import backend
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend
from fedplat_server.aggregation.local import LocalAggregation
from fedplat_server.errors import BlobFullError, PoolError, PoolWorkError
from fedplat_server.storage import files
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.workers.attempt_inputs import (
    AddUpdate,
    AttemptAggregate,
    AttemptInputs,
    CloseAttempt,
    SpooledUpdate,
)
from fedplat_server.workers.client import RunningTask, WorkerPool

PATIENCE_S = 10.0
"""How long a pool whose ranks died has to be back, before the daemon does their work."""


class PoolAggregation:
    """Ranks fold updates as they come. Each method raises `PoolError` if they cannot; then nothing is left of it."""

    keeps_updates = True

    def __init__(self, inputs: AttemptInputs, blobs: BlobStore, link: WorkerPool) -> None:
        self._inputs = inputs
        self._blobs = blobs
        self._link = link
        self._held = AsyncExitStack()
        self._session: RunningTask | None = None

    async def begin(self) -> None:
        """Begin the work on the ranks. Raises `PoolUnavailableError` when there are none."""
        self._session = await self._held.enter_async_context(self._link.start_task("aggregate", self._inputs))

    async def fold(self, update: SpooledUpdate) -> None:
        """Send the path of an update to the ranks."""
        assert self._session is not None
        await self._session.send(AddUpdate(update))

    async def commit(self, draft: Path | None = None) -> Aggregate:
        """Have the ranks fill the files of the next version, and store these."""
        assert self._session is not None
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(self._blobs.temporary())
            drafts = await asyncio.to_thread(self._make_drafts, stack, model)
            await self._session.send(drafts)
            said = await self._session.result(AttemptAggregate)
            _raise_problem(said)
            aggregate = await backend.run_to_the_end(self._store, drafts, said, draft)
        return aggregate

    async def close(self) -> None:
        """End the work on the ranks, if it goes on."""
        await self._held.aclose()

    def _make_drafts(self, stack: contextlib.ExitStack, path: Path) -> CloseAttempt:
        """Make files of the right sizes: a full disk shows now, and not when the ranks have computed it all."""
        rule, base = self._inputs.build_rule(), ModelFile.open(self._inputs.base_path)
        names, scalars = rule.init(0), rule.start(0).scalars
        state = state_schema(names, base.schema.num_floating, scalars).file_size_bytes if names or scalars else 0
        has_payload = self._inputs.spec.compression.downlink is not None
        with files.translate_os_errors("making room for a version"):
            return CloseAttempt(
                model=_make_file(path, base.schema.file_size_bytes),
                state=_make_file(stack.enter_context(self._blobs.temporary()), state) if state else "",
                payload=_make_file(stack.enter_context(self._blobs.temporary()), 0) if has_payload else "",
            )

    def _store(self, drafts: CloseAttempt, said: AttemptAggregate, draft: Path | None) -> Aggregate:
        path = Path(drafts.model)
        if draft is None:
            with backend.store_model():
                model = self._blobs.take(path)
        else:
            model = Blob("", path.stat().st_size)
            os.replace(path, draft)
        state = None
        if drafts.state:
            with backend.store_state():
                state = self._blobs.take(Path(drafts.state))
        return Aggregate(
            model=model,
            state=state,
            num_updates=said.num_updates,
            total_weight=said.total_weight,
            published=said.published,
            payload=Path(drafts.payload).read_bytes() if drafts.payload else b"",
        )


class WithFallback:
    """Has the pool aggregate if it is there, and once more when it breaks; then this process does it."""

    keeps_updates = True

    def __init__(
        self, inputs: AttemptInputs, blobs: BlobStore, link: WorkerPool, patience_s: float | None = None
    ) -> None:
        self._inputs = inputs
        self._blobs = blobs
        self._link = link
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._updates: list[SpooledUpdate] = []
        self._inner: AggregationBackend | None = None
        self._tries_left = 2

    async def fold(self, update: SpooledUpdate) -> None:
        """Add an update."""
        self._updates.append(update)
        await self._fold_all(self._updates[-1:])

    async def commit(self, draft: Path | None = None) -> Aggregate:
        """Compute the aggregate and store its files."""
        while True:
            inner = await self._fold_all([])
            try:
                return await inner.commit(draft)
            except PoolError as exc:
                await self._give_up(exc)

    async def close(self) -> None:
        """Release the ranks."""
        if self._inner is not None:
            await self._inner.close()

    async def _fold_all(self, more: list[SpooledUpdate]) -> AggregationBackend:
        """Return a backend that has folded these updates, and all before them."""
        while True:
            if self._inner is None:
                self._inner, more = await self._begin(), self._updates
            try:
                for update in more:
                    await self._inner.fold(update)
            except PoolError as exc:
                await self._give_up(exc)
            else:
                return self._inner

    async def _begin(self) -> AggregationBackend:
        is_again, self._tries_left = self._tries_left == 1, self._tries_left - 1
        if self._tries_left < 0 or (is_again and not await self._link.is_ready(self._patience_s)):
            return LocalAggregation(self._inputs, self._blobs)
        pooled = PoolAggregation(self._inputs, self._blobs, self._link)
        try:
            await pooled.begin()
        except PoolError as exc:
            await pooled.close()
            logs.get().info("the daemon aggregates in its own process", job=self._inputs.job_id, reason=str(exc))
            return LocalAggregation(self._inputs, self._blobs)
        return pooled

    async def _give_up(self, error: PoolError) -> None:
        assert self._inner is not None
        inner, self._inner = self._inner, None
        await inner.close()
        logs.get().warning(
            "the pool has not aggregated an attempt, which is done again",
            job=self._inputs.job_id,
            version=self._inputs.version,
            error=str(error),
        )


def _raise_problem(said: AttemptAggregate) -> None:
    match said.kind:
        case "refused":
            raise ModelError(said.problem)
        case "full":
            files.note_full()
            raise BlobFullError(said.problem)
        case "failed":
            raise PoolWorkError(said.problem)
        case "done":
            return


def _make_file(path: Path, size_bytes: int) -> str:
    descriptor = durable.create(path)
    try:
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)
    return os.path.abspath(path)
