"""A backend that computes an attempt's aggregate from updates: the interface, and threads of the daemon's process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from typing_extensions import override

from fedplat.aggregate import Accumulator, Contribution, PartialSummary, Rule, Shard, scalars_to_bytes, state_schema
from fedplat.model import ModelFile, Values, Vector
from fedplat_server import crash_points
from fedplat_server.storage.blobs import Blob, BlobStore, BlobWriter
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate

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

    async def fold(self, update: SpooledUpdate) -> None:
        """Add an update. Raises `ValueError` if the rule refuses it, and the errors of reading it."""

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
    async def fold(self, update: SpooledUpdate) -> None:
        await asyncio.to_thread(self._fold, update)

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

    def _fold(self, update: SpooledUpdate) -> None:
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
