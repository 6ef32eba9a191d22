"""Aggregation on the ranks of the worker pool, with this process as the fallback.

The ranks read the updates from the spool and write the files of the next version; the daemon hashes, syncs and adopts
them. A failure of the ranks only costs time: the updates stay in the spool until the version is stored, so the
aggregation is repeated with the same result, bit for bit (F35).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import AsyncExitStack
from pathlib import Path

from typing_extensions import override

from fedplat import durable, errors
from fedplat.aggregate import state_schema
from fedplat.model import ModelFile
from fedplat_server import instruments, logs
from fedplat_server.aggregation import backend
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend, LocalAggregation
from fedplat_server.errors import BlobFullError, PoolError, PoolUnavailableError, PoolWorkError
from fedplat_server.storage import files
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.workers.client import RunningTask, WorkerPool
from fedplat_server.workers.task_inputs import AddUpdate, AttemptAggregate, AttemptInputs, CloseAttempt, SpooledUpdate

PATIENCE_S = 10.0
"""The time for a pool to come back after its ranks died, before the daemon aggregates in its own process."""
_RETRY_S = 0.1


class PoolAggregation(AggregationBackend):
    """A backend in which ranks fold updates as they arrive.

    Its methods raise `PoolError` if the ranks fail; then no file of the attempt remains.
    """

    def __init__(self, inputs: AttemptInputs, blobs: BlobStore, pool: WorkerPool) -> None:
        self._inputs = inputs
        self._blobs = blobs
        self._pool = pool
        self._stack = AsyncExitStack()
        self._task: RunningTask | None = None

    @property
    @override
    def keeps_updates(self) -> bool:
        return True

    async def begin(self) -> None:
        """Start the task on the ranks. Raises `PoolUnavailableError` if there is no pool."""
        self._task = await self._stack.enter_async_context(self._pool.start_task("aggregate", self._inputs))

    @override
    async def fold(self, update: SpooledUpdate) -> None:
        assert self._task is not None
        await self._task.send(AddUpdate(update))

    @override
    async def commit(self, draft: Path | None = None) -> Aggregate:
        assert self._task is not None
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(self._blobs.temporary())
            drafts = await asyncio.to_thread(self._make_drafts, stack, model)
            await self._task.send(drafts)
            result = await self._task.result(AttemptAggregate)
            _raise_problem(result)
            aggregate = await backend.run_to_the_end(self._store, drafts, result, draft)
        return aggregate

    @override
    async def close(self) -> None:
        await self._stack.aclose()

    def _make_drafts(self, stack: contextlib.ExitStack, path: Path) -> CloseAttempt:
        """Make files of the final sizes, so that a full disk fails before the ranks compute."""
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

    def _store(self, drafts: CloseAttempt, result: AttemptAggregate, draft: Path | None) -> Aggregate:
        path = Path(drafts.model)
        if draft is None:
            with backend.store_model():
                model = self._blobs.adopt_file(path)
        else:
            model = Blob("", path.stat().st_size)
            os.replace(path, draft)
        state = None
        if drafts.state:
            with backend.store_state():
                state = self._blobs.adopt_file(Path(drafts.state))
        return Aggregate(
            model=model,
            state=state,
            num_updates=result.num_updates,
            total_weight=result.total_weight,
            published=result.published,
            payload=Path(drafts.payload).read_bytes() if drafts.payload else b"",
        )


class WithFallback(AggregationBackend):
    """A backend that uses the worker pool, retries once if the pool fails, and then aggregates in this process."""

    def __init__(
        self, inputs: AttemptInputs, blobs: BlobStore, pool: WorkerPool, patience_s: float | None = None
    ) -> None:
        self._inputs = inputs
        self._blobs = blobs
        self._pool = pool
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._updates: list[SpooledUpdate] = []
        self._inner: AggregationBackend | None = None
        self._tries_left = 2

    @property
    @override
    def keeps_updates(self) -> bool:
        return True

    @override
    async def fold(self, update: SpooledUpdate) -> None:
        self._updates.append(update)
        await self._fold_all(self._updates[-1:])

    @override
    async def commit(self, draft: Path | None = None) -> Aggregate:
        while True:
            inner = await self._fold_all([])
            try:
                return await inner.commit(draft)
            except PoolError as exc:
                await self._give_up(exc)

    @override
    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()

    async def _fold_all(self, more: list[SpooledUpdate]) -> AggregationBackend:
        """Return a backend that has folded all updates up to these."""
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
        is_retry, self._tries_left = self._tries_left == 1, self._tries_left - 1
        if self._tries_left < 0:
            return LocalAggregation(self._inputs, self._blobs)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        while not is_retry or await self._pool.is_ready(deadline - clock()):
            pooled = PoolAggregation(self._inputs, self._blobs, self._pool)
            try:
                await pooled.begin()
            except PoolError as exc:
                await pooled.close()
                # Ranks that will be restarted, because one of them has failed, may still have described the pool.
                if not is_retry or not isinstance(exc, PoolUnavailableError) or clock() >= deadline:
                    logs.get().info(
                        "the daemon aggregates in its own process", job=self._inputs.job_id, reason=str(exc)
                    )
                    break
                await asyncio.sleep(_RETRY_S)
            else:
                return pooled
        return LocalAggregation(self._inputs, self._blobs)

    async def _give_up(self, error: PoolError) -> None:
        assert self._inner is not None
        inner, self._inner = self._inner, None
        await inner.close()
        logs.get().warning(
            "the worker pool failed to aggregate an attempt; retrying",
            job=self._inputs.job_id,
            version=self._inputs.version,
            error=str(error),
        )


def _raise_problem(result: AttemptAggregate) -> None:
    match result.kind:
        case "refused":
            raise errors.ModelError(result.problem)
        case "full":
            instruments.note_full("models")
            raise BlobFullError(result.problem)
        case "failed":
            raise PoolWorkError(result.problem)
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
