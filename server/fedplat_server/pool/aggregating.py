"""The work `aggregate`: ranks fold the updates of an attempt and write the next version's files, each its own part.

By columns (`[pool] split = "columns"`), a rank reads its columns of every update and adds them up in the order in which
the updates were accepted, and so has the bits that one process has. By reports, it folds whole updates, of so many
one, and the sums are added up at the close, in the order of the logical ranks. Then each rank has its columns, and
applies the rule to them: its part of the server optimizer's state, noise drawn once for each entry.
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
    Elsewhere,
    Part,
    Shard,
    Tally,
    column_start,
    scalars_to_bytes,
    state_schema,
)
from fedplat.backends.ranks import Layout, Ranks, Vectors, vectors
from fedplat.backends.ranks.device import DeviceSum, device_sum
from fedplat.errors import FedplatError
from fedplat.model import ModelFile, Values, Vector
from fedplat.model.shards import Across, Terms, alone, shards
from fedplat_server.attempts.inputs import AttemptInputs
from fedplat_server.attempts.pooled import AddUpdate, Aggregated, Close

Note = Callable[[bytes], None]
_messages: msgspec.msgpack.Decoder[AddUpdate | Close] = msgspec.msgpack.Decoder(AddUpdate | Close)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def aggregate(ranks: Ranks, request: bytes, inbox: Iterator[bytes], note: Note) -> bytes:
    """Folds what comes, and at the end fills the files that are named; see `Close`."""
    inputs = msgspec.msgpack.decode(request, type=AttemptInputs)
    assert inputs.spec.pool is not None
    mine = ranks.first(inputs.spec.pool.ranks)
    if mine is None:  # a rank more than the job has
        for _ in inbox:
            pass
        return b""
    with contextlib.ExitStack() as held:
        attempt = _Attempt(mine, inputs, held)
        closing: Close | None = None
        for message in inbox:
            told: AddUpdate | Close = _messages.decode(message)
            if isinstance(told, Close):
                closing = told
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # the end looks at the sum
                attempt.sums.fold(inputs.open_update(told.update, attempt.base), told.update.contribution)
        return msgspec.msgpack.encode(attempt.close(closing)) if closing else b""


class _Sums(Protocol):
    """How the updates are spread over the ranks."""

    def fold(self, values: Values, contribution: Contribution) -> None:
        """Adds this rank's part of an update."""
        ...

    def closed(self) -> Accumulator:
        """All updates, of this rank's columns."""
        ...


class _Attempt:
    """One attempt, as one rank sees it."""

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
        shard = Shard(self._columns, _across(ranks), ranks.is_first)
        if (number := inputs.num_sums(rule, base)) == 1:
            memory = None if rule.gather else device_sum(len(self._columns), ranks.device)
            self.sums: _Sums = _Columns(make(shard._replace(memory=memory)))
        else:
            layout = Layout(number, (0, *(each.stop for each in columns)))
            terms = held.enter_context(vectors(ranks, layout))
            whole = {logical: make(Shard(range(size), memory=_memory(own))) for logical, own in terms.own.items()}
            merge = functools.partial(Accumulator.merged, base.schema, rule, inputs.read_scalars(rule, base))
            self.sums = _Reports(ranks, terms, whole, lambda tallies, total: merge(tallies, _with(shard, total)))

    def close(self, files: Close) -> Aggregated:
        """Applies the rule and writes what came of it. What any rank fails in, all of them say."""
        rule, base = self._rule, self.base
        accumulator = self.sums.closed()
        columns, state = self._columns, self._inputs.read_columns(rule, base, self._columns)
        try:
            result = accumulator.gathered(state)
        except ValueError as exc:  # too few updates, say: before any is read, and so on all ranks alike
            return Aggregated("refused", str(exc))
        if not rule.blockwise:  # the whole step is looked at, which only one rank has
            totals = self._ranks.bring(result.total)
            columns = range(base.schema.num_floating if totals else 0)
            result = result.joined(totals) if totals else None
            state = self._inputs.read_columns(rule, base, columns)
        said = Aggregated(
            num_updates=accumulator.num_updates,
            total_weight=accumulator.total_weight,
            published=accumulator.published,
        )
        problem = None
        try:
            if result is not None:
                self._write(files, result.parts(base, state), accumulator.scalars, columns)
        except OSError as exc:
            problem = Aggregated("full" if exc.errno in _FULL else "failed", f"writing a version failed: {exc}")
        except (FedplatError, ValueError) as exc:
            problem = Aggregated("refused", str(exc))
        for content in self._ranks.gather(msgspec.msgpack.encode(problem or said)):
            if (each := msgspec.msgpack.decode(content, type=Aggregated)).kind != "done":
                return each
        return said

    def _write(self, files: Close, parts: Iterable[Part], scalars: Mapping[str, float], columns: range) -> None:
        schema, names = self.base.schema, self._rule.init(0)
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(_File(files.model, len(schema.header)))
            state = None
            if files.state:
                header = state_schema(names, schema.num_floating, scalars).header
                state = stack.enter_context(_File(files.state, len(header)))
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
            with _File(files.payload, 0) as payload:
                payload.write(0, self._payloads[-1])


class _Columns:
    """This rank's columns of every update."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator

    def fold(self, values: Values, contribution: Contribution) -> None:
        self._accumulator.fold(values, contribution)

    def closed(self) -> Accumulator:
        return self._accumulator


class _Reports:
    """Whole updates: the k-th one is logical rank k's, modulo their number. Each of these has a sum of its own."""

    def __init__(
        self,
        ranks: Ranks,
        terms: Vectors,
        own: Mapping[int, Accumulator],
        merged: Callable[[Sequence[Tally], Vector], Accumulator],
    ) -> None:
        self._ranks, self._terms, self._own, self._merged = ranks, terms, own, merged
        self._turn = 0

    def fold(self, values: Values, contribution: Contribution) -> None:
        if self._turn in self._own:
            self._own[self._turn].fold(values, contribution)
        self._turn = (self._turn + 1) % self._terms.layout.logical

    def closed(self) -> Accumulator:
        mine = {logical: accumulator.tally for logical, accumulator in self._own.items()}
        tallies: dict[int, Tally] = {}
        for content in self._ranks.gather(msgspec.msgpack.encode(mine)):
            tallies |= msgspec.msgpack.decode(content, type=dict[int, Tally])
        total = self._terms.reduce_scatter().cpu().numpy()
        return self._merged([tallies[logical] for logical in sorted(tallies)], total)


class _File:
    """A file that several ranks fill, each its part; synced when it is closed."""

    def __init__(self, path: str, begin: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._begin = begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # an error that shows now is not found by a sync of another host
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, start: int, content: bytes | memoryview) -> int:
        """Writes bytes at a place behind the header; returns where they end."""
        rest = memoryview(content).cast("B")
        while rest:
            count = os.pwrite(self._descriptor, rest, self._begin + start)
            rest, start = rest[count:], start + count
        return start


def _across(ranks: Ranks) -> Across:
    """Adds up over ranks."""

    def added(zero: Terms, terms: Iterable[Terms]) -> Terms:
        mine = b"".join(term.tobytes() for term in terms)
        others = (np.frombuffer(each, np.float64).reshape(-1, *zero.shape) for each in ranks.gather(mine))
        return alone(zero, itertools.chain.from_iterable(others))

    return added if ranks.size > 1 else alone


def _memory(vector: torch.Tensor) -> Vector | Elsewhere:
    return DeviceSum(vector) if vector.device.type == "cuda" else vector.numpy()


def _with(shard: Shard, total: Vector) -> Shard:
    return shard._replace(memory=total)
