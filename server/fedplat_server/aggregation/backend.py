"""A backend that computes an attempt's aggregate: the interface, threads of the daemon, and ranks of the pool.

The ranks read the updates from the spool and write the files of the next version; the daemon hashes, syncs and adopts
them. A failure of the ranks only costs time: the updates stay in the spool until the version is stored, so the
aggregation is repeated with the same result, bit for bit (F35).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from typing_extensions import override

from fedplat import durable, errors
from fedplat.aggregate import Accumulator, Contribution, PartialSummary, Rule, Shard, scalars_to_bytes, state_schema
from fedplat.model import ModelFile, Values, Vector
from fedplat_server import crash_points, instruments, logs
from fedplat_server.errors import BlobFullError, PoolError, PoolUnavailableError, PoolWorkError
from fedplat_server.storage import files
from fedplat_server.storage.blobs import Blob, BlobStore, BlobWriter
from fedplat_server.workers.client import RunningTask, WorkerPool
from fedplat_server.workers.task_inputs import AddUpdate, AttemptAggregate, AttemptInputs, CloseAttempt, SpooledUpdate

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """The result of an attempt: the files of the next version and of the rule's state, which are durable.

    `published` is the attempt's published metrics, None for the means of the clients' metrics. `payload` is the
    encoded step of a job with a downlink. The `model` of a draft has no digest yet. `cohort` are the clients that a
    Flower app has drawn for the next round, and `refused` those whose updates it could not use, and why.
    """

    model: Blob
    state: Blob | None
    num_updates: int
    total_weight: float
    published: Mapping[str, float] | None
    payload: bytes = b""
    cohort: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class AggregationBackend(Protocol):
    """A backend for one attempt. Its owner calls `close` in the end, also after a call was cancelled."""

    @property
    def keeps_updates(self) -> bool:
        """True if updates must stay readable until the aggregate is computed."""
        ...

    async def fold(self, updates: Sequence[SpooledUpdate]) -> None:
        """Add updates in their order. Raises `ValueError` if the rule refuses one, and the errors of reading it."""

    async def commit(self, draft: Path | None = None) -> Aggregate:
        """Compute the aggregate and store its files; with a `draft`, write the model there to be trained further.

        Raises `BlobFullError` or `BlobError` if its files cannot be written, `ModelError` if the result is not finite,
        and `ValueError` if the rule has no result.
        """
        ...

    async def close(self) -> None:
        """Release files, memory and ranks."""


async def run_to_the_end(function: Callable[..., _T], *arguments: object) -> _T:
    """Run a function in a thread. If cancelled, wait for its end first, so that all files that it makes are known."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # cancelled again
                await asyncio.wait([task])
        raise


@contextlib.contextmanager
def store_model() -> Generator[None]:
    """Surround the storing of a version's file with its crash points, which all backends share."""
    with crash_points.step("commit.model"):
        yield


@contextlib.contextmanager
def store_state() -> Generator[None]:
    """Surround the storing of the rule's state with its crash points."""
    with crash_points.step("commit.state"):
        yield


class LocalAggregation(AggregationBackend):
    """A backend that folds updates as they arrive, in this process."""

    def __init__(self, inputs: AttemptInputs, blobs: BlobStore) -> None:
        self._inputs = inputs
        self._blobs = blobs
        self._payloads: list[bytes] = []
        self._rule = inputs.build_rule(self._payloads.append)
        self._sums: _PartialSums | None = None

    @property
    @override
    def keeps_updates(self) -> bool:
        return self._rule.gather is not None

    @override
    async def fold(self, updates: Sequence[SpooledUpdate]) -> None:
        # One call for all: for small updates, switching threads costs more than the work.
        await asyncio.to_thread(self._fold, updates)

    @override
    async def commit(self, draft: Path | None = None) -> Aggregate:
        return await run_to_the_end(self._commit, draft)

    @override
    async def close(self) -> None:
        pass

    def _open_sums(self) -> _PartialSums:
        if self._sums is None:
            self._sums = _PartialSums(self._inputs, self._rule, ModelFile.open(self._inputs.base_path))
        return self._sums

    def fold_values(self, values: Values, contribution: Contribution) -> None:
        """Add an update that is not in a file. Blocks."""
        with np.errstate(over="ignore", invalid="ignore"):  # `commit` checks the sum
            self._open_sums().fold(values, contribution)

    def _fold(self, updates: Sequence[SpooledUpdate]) -> None:
        for update in updates:
            self.fold_values(self._inputs.open_update(update, self._open_sums().base), update.contribution)

    def _commit(self, draft: Path | None) -> Aggregate:
        sums = self._open_sums()
        base, rule, accumulator = sums.base, self._rule, sums.merge()
        size = base.schema.num_floating
        state = self._inputs.read_columns(rule, base, range(size))
        # The length of the memory must be known before the header of the state file is written.
        reduced = accumulator.reduce_updates(state, base) if rule.keeps_memory else accumulator
        with contextlib.ExitStack() as stack:
            stack.enter_context(store_model())
            model = stack.enter_context(self._blobs.writer() if draft is None else self._blobs.draft(draft))
            model.write(base.schema.header)
            state_writer: BlobWriter | None = None
            names, scalars, memory = rule.init(0), accumulator.scalars, reduced.memory
            if names or scalars or memory:
                stack.enter_context(store_state())
                state_writer = stack.enter_context(self._blobs.writer())
                state_writer.write(state_schema(names, size, scalars, len(memory)).header)
                state_writer.write(scalars_to_bytes(scalars))
            for part in reduced.parts(base, state):
                model.write(part.model.view(np.uint8).data)
                if state_writer and part.state:
                    for vector in part.state.values():
                        state_writer.write(vector.data)
            if state_writer:
                state_writer.write(memory)
        return Aggregate(
            model=model.blob if draft is None else dataclasses.replace(model.blob, digest=""),
            state=state_writer.blob if state_writer else None,
            num_updates=accumulator.num_updates,
            total_weight=accumulator.total_weight,
            published=accumulator.published,
            payload=self._payloads[-1] if self._payloads else b"",
        )


class _PartialSums:
    """The sums of the updates: one, or one for each rank, if whole updates are distributed round-robin."""

    def __init__(self, inputs: AttemptInputs, rule: Rule, base: ModelFile) -> None:
        self.base = base
        self._rule = rule
        self._scalars: Mapping[str, float] = inputs.read_scalars(rule, base)
        num_sums = inputs.num_sums(rule, base)
        memory = inputs.read_memory(rule, base)
        self._accumulators = [Accumulator(base.schema, rule, self._scalars, memory=memory) for _ in range(num_sums)]
        self._next = 0

    def fold(self, values: Values, contribution: Contribution) -> None:
        self._accumulators[self._next].fold(values, contribution)
        self._next = (self._next + 1) % len(self._accumulators)

    def merge(self) -> Accumulator:
        """Return one accumulator of all updates; several sums are added in their order, as the worker pool does."""
        if len(self._accumulators) == 1:
            return self._accumulators[0]
        total: Vector = self._accumulators[0].total.copy()
        for accumulator in self._accumulators[1:]:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(total, accumulator.total, out=total)
        summaries: Sequence[PartialSummary] = [accumulator.summary for accumulator in self._accumulators]
        shard = Shard(range(total.size), memory=total)
        return Accumulator.merge_partials(self.base.schema, self._rule, self._scalars, summaries, shard)


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
    async def fold(self, updates: Sequence[SpooledUpdate]) -> None:
        assert self._task is not None
        for update in updates:
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
            aggregate = await run_to_the_end(self._store, drafts, result, draft)
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
            with store_model():
                model = self._blobs.adopt_file(path)
        else:
            model = Blob("", path.stat().st_size)
            os.replace(path, draft)
        state = None
        if drafts.state:
            with store_state():
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
    async def fold(self, updates: Sequence[SpooledUpdate]) -> None:
        self._updates.extend(updates)
        await self._fold_all(updates)

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

    async def _fold_all(self, more: Sequence[SpooledUpdate]) -> AggregationBackend:
        """Return a backend that has folded all updates up to these."""
        while True:
            if self._inner is None:
                self._inner, more = await self._begin(), self._updates
            try:
                await self._inner.fold(more)
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
