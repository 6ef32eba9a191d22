"""The task `aggregate`: ranks fold the updates of an attempt and write the next version's files, each its own part.

By columns (`[pool] split = "columns"`), a rank reads its columns of every update and adds them in the order in which
the updates were accepted, and so has the bits of a single process. By reports, it folds whole updates, one in so many,
and the sums are added at the close, in the order of the logical ranks. Then each rank has its columns, and applies the
rule to them: to its part of the server optimizer's state, with noise drawn once for each entry.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import msgspec
import numpy as np
import torch

from fedplat.aggregate import (
    Accumulator,
    Contribution,
    DeviceAccumulator,
    PartialSummary,
    ResultPart,
    Shard,
    column_start,
    scalars_to_bytes,
    state_schema,
)
from fedplat.errors import FedplatError
from fedplat.model import ModelFile, Values, Vector
from fedplat.model.shards import ShardReduce, Terms, shards, single_shard
from fedplat.pytorch.distributed import Ranks, VectorLayout, Vectors, make_vectors
from fedplat.pytorch.distributed.device import DeviceSum, device_sum
from fedplat_server.workers.attempt_inputs import AddUpdate, AttemptAggregate, AttemptInputs, CloseAttempt

Note = Callable[[bytes], None]
_decoder: msgspec.msgpack.Decoder[AddUpdate | CloseAttempt] = msgspec.msgpack.Decoder(AddUpdate | CloseAttempt)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def aggregate(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Fold the updates of the messages, and fill the files of the last one; see `CloseAttempt`."""
    inputs = msgspec.msgpack.decode(request, type=AttemptInputs)
    assert inputs.spec.pool is not None
    mine = ranks.subgroup(inputs.spec.pool.ranks)
    if mine is None:  # this rank is one more than the job has
        for _ in messages:
            pass
        return b""
    with contextlib.ExitStack() as held:
        attempt = _Attempt(mine, inputs, held)
        closing: CloseAttempt | None = None
        for message in messages:
            received: AddUpdate | CloseAttempt = _decoder.decode(message)
            if isinstance(received, CloseAttempt):
                closing = received
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # `close` checks the sum
                attempt.sums.fold(inputs.open_update(received.update, attempt.base), received.update.contribution)
        return msgspec.msgpack.encode(attempt.close(closing)) if closing else b""


class _Sums(Protocol):
    """The sums of one rank, by columns or by reports."""

    def fold(self, values: Values, contribution: Contribution) -> None:
        """Add this rank's part of an update."""
        ...

    def close(self) -> Accumulator:
        """Return the sum of all updates, of this rank's columns."""
        ...


class _Attempt:
    """One attempt on one rank."""

    def __init__(self, ranks: Ranks, inputs: AttemptInputs, held: contextlib.ExitStack) -> None:
        self._payloads: list[bytes] = []
        self._ranks = ranks
        self._inputs = inputs
        self._rule = rule = inputs.build_rule(self._payloads.append)
        self.base = base = ModelFile.open(inputs.base_path)
        size = base.schema.num_floating
        columns = shards(size, ranks.size)
        self._columns = columns[ranks.rank]
        make = functools.partial(Accumulator, base.schema, rule, inputs.read_scalars(rule, base))
        shard = Shard(self._columns, _sum_over_ranks(ranks), ranks.is_first)
        if (number := inputs.num_sums(rule, base)) == 1:
            memory = None if rule.gather else device_sum(len(self._columns), ranks.device)
            self.sums: _Sums = _ColumnSums(make(shard._replace(memory=memory)))
        else:
            layout = VectorLayout(number, (0, *(each.stop for each in columns)))
            terms = held.enter_context(make_vectors(ranks, layout))
            whole = {logical: make(Shard(range(size), memory=_memory(own))) for logical, own in terms.own.items()}
            merge = functools.partial(Accumulator.merge_partials, base.schema, rule, inputs.read_scalars(rule, base))
            self.sums = _ReportSums(ranks, terms, whole, lambda tallies, total: merge(tallies, _with(shard, total)))

    def close(self, files: CloseAttempt) -> AttemptAggregate:
        """Apply the rule and write the new version; all ranks return the same, also if only one of them fails."""
        rule, base = self._rule, self.base
        accumulator = self.sums.close()
        columns, state = self._columns, self._inputs.read_columns(rule, base, self._columns)
        try:
            result = accumulator.reduce_updates(state)
        except ValueError as exc:  # such as too few updates; on all ranks alike, since none is read before
            return AttemptAggregate("refused", str(exc))
        if not rule.blockwise:  # the rule needs the whole step, which only one rank can have
            totals = self._ranks.gather_arrays(result.total)
            columns = range(base.schema.num_floating if totals else 0)
            result = result.merge_shards(totals) if totals else None
            state = self._inputs.read_columns(rule, base, columns)
        reply = AttemptAggregate(
            num_updates=accumulator.num_updates,
            total_weight=accumulator.total_weight,
            published=accumulator.published,
        )
        problem = None
        try:
            if result is not None:
                self._write(files, result.parts(base, state), accumulator.scalars, columns)
        except OSError as exc:
            problem = AttemptAggregate("full" if exc.errno in _FULL else "failed", f"writing a version failed: {exc}")
        except (FedplatError, ValueError) as exc:
            problem = AttemptAggregate("refused", str(exc))
        for content in self._ranks.all_gather(msgspec.msgpack.encode(problem or reply)):
            if (each := msgspec.msgpack.decode(content, type=AttemptAggregate)).kind != "done":
                return each
        return reply

    def _write(
        self, files: CloseAttempt, parts: Iterable[ResultPart], scalars: Mapping[str, float], columns: range
    ) -> None:
        schema, names = self.base.schema, self._rule.init(0)
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(_SharedFile(files.model, len(schema.header)))
            state = None
            if files.state:
                header = state_schema(names, schema.num_floating, scalars).header
                state = stack.enter_context(_SharedFile(files.state, len(header)))
                if self._ranks.is_first:
                    state.write(-len(header), header)
                    state.write(0, scalars_to_bytes(scalars))
            if self._ranks.is_first:
                model.write(-len(schema.header), schema.header)
            end = column_start(self._rule, columns.start)
            for part in parts:
                model.write(part.start, part.model.view(np.uint8).data)
                if state and part.state:
                    for vector in part.state.values():
                        end = state.write(end, vector.data)
        if self._payloads:
            with _SharedFile(files.payload, 0) as payload:
                payload.write(0, self._payloads[-1])


class _ColumnSums:
    """Sums by columns: this rank's part of every update."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator

    def fold(self, values: Values, contribution: Contribution) -> None:
        self._accumulator.fold(values, contribution)

    def close(self) -> Accumulator:
        return self._accumulator


class _ReportSums:
    """Sums by reports: update k goes as a whole to logical rank k modulo their number, each with a sum of its own."""

    def __init__(
        self,
        ranks: Ranks,
        terms: Vectors,
        own: Mapping[int, Accumulator],
        merge: Callable[[Sequence[PartialSummary], Vector], Accumulator],
    ) -> None:
        self._ranks, self._terms, self._own, self._merge = ranks, terms, own, merge
        self._turn = 0

    def fold(self, values: Values, contribution: Contribution) -> None:
        if self._turn in self._own:
            self._own[self._turn].fold(values, contribution)
        self._turn = (self._turn + 1) % self._terms.layout.logical

    def close(self) -> Accumulator:
        mine = {logical: accumulator.tally for logical, accumulator in self._own.items()}
        tallies: dict[int, PartialSummary] = {}
        for content in self._ranks.all_gather(msgspec.msgpack.encode(mine)):
            tallies |= msgspec.msgpack.decode(content, type=dict[int, PartialSummary])
        total = self._terms.reduce_scatter().cpu().numpy()
        return self._merge([tallies[logical] for logical in sorted(tallies)], total)


class _SharedFile:
    """A file that several ranks fill, each its part; synced when it is closed."""

    def __init__(self, path: str, begin: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._begin = begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # a sync by another host would not report this error
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, start: int, content: bytes | memoryview) -> int:
        """Write bytes at `start` behind the header, and return where they end."""
        rest = memoryview(content).cast("B")
        while rest:
            count = os.pwrite(self._descriptor, rest, self._begin + start)
            rest, start = rest[count:], start + count
        return start


def _sum_over_ranks(ranks: Ranks) -> ShardReduce:
    """Return the function that adds up terms of all ranks."""

    def add(zero: Terms, terms: Iterable[Terms]) -> Terms:
        mine = b"".join(term.tobytes() for term in terms)
        others = (np.frombuffer(each, np.float64).reshape(-1, *zero.shape) for each in ranks.all_gather(mine))
        return single_shard(zero, itertools.chain.from_iterable(others))

    return add if ranks.size > 1 else single_shard


def _memory(vector: torch.Tensor) -> Vector | DeviceAccumulator:
    return DeviceSum(vector) if vector.device.type == "cuda" else vector.numpy()


def _with(shard: Shard, total: Vector) -> Shard:
    return shard._replace(memory=total)
