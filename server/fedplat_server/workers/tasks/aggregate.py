"""The task `aggregate`: ranks fold the updates of an attempt and write the next version's files, each its own part.

Split by columns (`[pool] split = "columns"`), a rank reads its columns of every update and adds them in the order in
which the updates were accepted, so the bits are those of a single process. Split by reports, logical rank k of n folds
every n-th update as a whole, and the close adds the sums in the order of the logical ranks. Then each rank applies the
rule to its columns: to its part of the server optimizer's state, with noise drawn once for each entry.
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
from fedplat.config.decoding import prepare_type
from fedplat.config.loaded_plugins import decode_with_plugins
from fedplat.errors import FedplatError
from fedplat.model import ModelFile, Values, Vector
from fedplat.model.blocks import ShardReduce, Terms, shards, single_shard
from fedplat.pytorch.distributed import Ranks, VectorLayout, Vectors, make_vectors
from fedplat.pytorch.distributed.vectors import DeviceSum, device_sum
from fedplat_server.workers.task_inputs import AddUpdate, AttemptAggregate, AttemptInputs, CloseAttempt

Note = Callable[[bytes], None]
_decoder: msgspec.msgpack.Decoder[AddUpdate | CloseAttempt] = msgspec.msgpack.Decoder(AddUpdate | CloseAttempt)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def aggregate(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Fold the update of each `AddUpdate`; on `CloseAttempt`, fill its files and return an `AttemptAggregate`."""
    inputs = decode_with_plugins(request, AttemptInputs)
    assert inputs.spec.pool is not None
    group = ranks.subgroup(inputs.spec.pool.ranks)
    if group is None:  # the job needs fewer ranks, and not this one
        for _ in messages:
            pass
        return b""
    with contextlib.ExitStack() as stack:
        attempt = _Attempt(group, inputs, stack)
        files: CloseAttempt | None = None
        for message in messages:
            received: AddUpdate | CloseAttempt = _decoder.decode(message)
            if isinstance(received, CloseAttempt):
                files = received
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # `close` checks the sum
                attempt.sums.fold(inputs.open_update(received.update, attempt.base), received.update.contribution)
        return msgspec.msgpack.encode(attempt.close(files)) if files else b""


class _Sums(Protocol):
    """The sums of one rank, by columns or by reports."""

    def fold(self, values: Values, contribution: Contribution) -> None:
        """Add this rank's part of an update."""

    def close(self) -> Accumulator:
        """Return the sum of all updates over this rank's columns."""
        ...


class _Attempt:
    """One attempt on one rank."""

    def __init__(self, ranks: Ranks, inputs: AttemptInputs, stack: contextlib.ExitStack) -> None:
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
        if (num_sums := inputs.num_sums(rule, base)) == 1:
            memory = None if rule.gather else device_sum(len(self._columns), ranks.device)
            self.sums: _Sums = _ColumnSums(make(shard._replace(memory=memory)))
        else:
            layout = VectorLayout(num_sums, (0, *(part.stop for part in columns)))
            terms = stack.enter_context(make_vectors(ranks, layout))
            own = {logical: make(Shard(range(size), memory=_memory(vector))) for logical, vector in terms.own.items()}
            merge = functools.partial(Accumulator.merge_partials, base.schema, rule, inputs.read_scalars(rule, base))
            self.sums = _ReportSums(ranks, terms, own, lambda parts, total: merge(parts, _with_memory(shard, total)))

    def close(self, files: CloseAttempt) -> AttemptAggregate:
        """Apply the rule and write the new version; all ranks return the same record, even if only one fails."""
        rule, base = self._rule, self.base
        accumulator = self.sums.close()
        columns, state = self._columns, self._inputs.read_columns(rule, base, self._columns)
        try:
            result = accumulator.reduce_updates(state)
        except ValueError as exc:  # such as too few updates: raised on all ranks, before any update is read
            return AttemptAggregate("refused", str(exc))
        if not rule.blockwise:  # the rule needs the whole step: gather it on one rank
            totals = self._ranks.gather_arrays(result.total)
            columns = range(base.schema.num_floating if totals else 0)
            result = result.merge_shards(totals) if totals else None
            state = self._inputs.read_columns(rule, base, columns)
        reply = AttemptAggregate(
            num_updates=accumulator.num_updates, total_weight=accumulator.total_weight, published=accumulator.published
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
            if (outcome := msgspec.msgpack.decode(content, type=prepare_type(AttemptAggregate))).kind != "done":
                return outcome
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
    """The sum by columns: this rank's columns of every update."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator

    def fold(self, values: Values, contribution: Contribution) -> None:
        self._accumulator.fold(values, contribution)

    def close(self) -> Accumulator:
        return self._accumulator


class _ReportSums:
    """The sums by reports: logical rank k modulo their number folds the whole update k into its own sum."""

    def __init__(
        self,
        ranks: Ranks,
        terms: Vectors,
        own: Mapping[int, Accumulator],
        merge: Callable[[Sequence[PartialSummary], Vector], Accumulator],
    ) -> None:
        self._ranks, self._terms, self._own, self._merge = ranks, terms, own, merge
        self._next = 0

    def fold(self, values: Values, contribution: Contribution) -> None:
        if self._next in self._own:
            self._own[self._next].fold(values, contribution)
        self._next = (self._next + 1) % self._terms.layout.logical

    def close(self) -> Accumulator:
        own = {logical: accumulator.summary for logical, accumulator in self._own.items()}
        summaries: dict[int, PartialSummary] = {}
        for content in self._ranks.all_gather(msgspec.msgpack.encode(own)):
            summaries |= msgspec.msgpack.decode(content, type=prepare_type(dict[int, PartialSummary]))
        total = self._terms.reduce_scatter().cpu().numpy()
        return self._merge([summaries[logical] for logical in sorted(summaries)], total)


class _SharedFile:
    """A file of which each rank writes its own part; synced when it is closed."""

    def __init__(self, path: str, header_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._header_bytes = header_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # every rank syncs: a sync by another host would not report this host's errors
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, start: int, content: bytes | memoryview) -> int:
        """Write bytes at the offset `start` after the header; return the offset of their end."""
        rest = memoryview(content).cast("B")
        while rest:
            count = os.pwrite(self._descriptor, rest, self._header_bytes + start)
            rest, start = rest[count:], start + count
        return start


def _sum_over_ranks(ranks: Ranks) -> ShardReduce:
    """Return the function that sums terms over all ranks."""

    def add(zero: Terms, terms: Iterable[Terms]) -> Terms:
        own = b"".join(term.tobytes() for term in terms)
        parts = (np.frombuffer(part, np.float64).reshape(-1, *zero.shape) for part in ranks.all_gather(own))
        return single_shard(zero, itertools.chain.from_iterable(parts))

    return add if ranks.size > 1 else single_shard


def _memory(vector: torch.Tensor) -> Vector | DeviceAccumulator:
    return DeviceSum(vector) if vector.device.type == "cuda" else vector.numpy()


def _with_memory(shard: Shard, total: Vector) -> Shard:
    return shard._replace(memory=total)
