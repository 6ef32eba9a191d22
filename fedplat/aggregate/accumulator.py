"""The aggregation state of one open attempt; its size does not depend on the number of updates.

With a rule that gathers, the accumulator does not hold the updates: it keeps readers of them until the attempt ends.

The columns of the model's vector may be divided over several accumulators, each of one `Shard`. Each folds its columns
of all updates, in the same order, and computes its part of the result with the same bits as a single accumulator.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.aggregate.algebra import Contribution, DeviceAccumulator, Partial, Rule, State
from fedplat.aggregate.state import StoredColumns, columns, columns_of, concatenate_columns
from fedplat.errors import ModelError, PluginError
from fedplat.model import (
    DTYPES,
    FLOATING,
    WINDOW,
    FlatModel,
    ModelFile,
    Parameters,
    Read,
    Schema,
    Segment,
    Values,
    Vector,
    all_finite,
    apply_step,
    blocks,
    read_base_values,
)
from fedplat.model.blocks import ShardReduce, single_shard


class ResultPart(NamedTuple):
    """A part of the result: the next entries of the model's flat buffer, and the next column of the state, if any.

    `start` is the byte offset of the entries in the flat buffer. Valid until the next part is drawn.
    """

    start: int
    model: npt.NDArray[Any]
    state: State | None = None


class Shard(NamedTuple):
    """The columns of an accumulator that has only some of them (see `fedplat.model.blocks`).

    Exactly one shard `owns_carried`, the entries that are not floating-point. The sum of the updates is kept in
    `memory`, a vector of zeros or a device accumulator; if it is None, or a device's though the rule gathers, the
    accumulator allocates its own.
    """

    columns: range
    reduce_shards: ShardReduce = single_shard
    owns_carried: bool = True
    memory: Vector | DeviceAccumulator | None = None


class PartialSummary(msgspec.Struct, frozen=True):
    """A summary, without their sum, of the updates that an accumulator has folded; used to merge accumulators.

    `carried` are the largest values of the carried runs, in the order of the schema.
    """

    weight: float
    num_updates: int
    sums: Mapping[str, float]
    carried: Sequence[bytes]


class Accumulator:
    """An accumulator folds updates of one schema as they arrive, and computes the next model version at the end.

    Floating-point entries go through the rule. Other entries are carried by the schema's rule: "keep" leaves the base
    version's value, "max" is the largest value of the folded updates, entry by entry (for booleans: true if one was
    true). Memory is one float32 vector, the carried entries and a few windows; it does not grow with the number of
    updates. If the rule gathers, the updates must stay readable until the result is computed.

    >>> base = Parameters.from_arrays({"weight": np.zeros(2, np.float32)})
    >>> rule = weighted_mean()
    >>> accumulator = Accumulator(base.schema, rule)
    >>> accumulator.fold(Parameters.from_arrays({"weight": np.array([1, 3], np.float32)}), Contribution(10))
    >>> model, state = accumulator.finish(base, rule.init(base.schema.num_floating))
    >>> model["weight"]
    array([1., 3.], dtype=float32)
    """

    def __init__(
        self,
        schema: Schema,
        rule: Rule,
        scalars: Mapping[str, float] | None = None,
        shard: Shard | None = None,
        memory: bytes = b"",
    ) -> None:
        """Start an attempt with the previous attempt's `scalars`, or without any, with the rule's initial ones.

        `memory` are the bytes that the previous attempt of a rule that `keeps_memory` returned; none at first. Without
        a `shard` the accumulator has all columns. With one, all its vectors have only the shard's columns.
        """
        self._schema = schema
        self._rule = rule
        self._shard = shard or Shard(range(schema.num_floating))
        partial = dataclasses.replace(rule.start(len(self._shard.columns)), schema=schema)
        self._partial = _place_in_memory(partial, self._shard, rule)
        if scalars:
            self._partial = dataclasses.replace(self._partial, scalars=scalars)
        if rule.keeps_memory:
            self._partial = dataclasses.replace(self._partial, memory=memory)
        self._carried: dict[Segment, npt.NDArray[Any]] = {}

    @property
    def num_updates(self) -> int:
        """The number of updates folded so far."""
        return self._partial.num_updates

    @property
    def total_weight(self) -> float:
        """The sum of the weights of the folded updates."""
        return self._partial.weight

    @property
    def keeps_updates(self) -> bool:
        """True if updates must stay readable until the result is computed."""
        return self._rule.gather is not None

    @property
    def total(self) -> Vector:
        """The sum of the updates folded so far."""
        return self._partial.total

    @property
    def scalars(self) -> Mapping[str, float]:
        """The scalars with which the next attempt starts."""
        return self._rule.remember(self._partial)

    @property
    def memory(self) -> bytes:
        """The bytes with which the next attempt starts, once the updates are reduced; b"" if the rule keeps none."""
        return self._partial.memory

    @property
    def published(self) -> Mapping[str, float] | None:
        """The attempt's published metrics; None if the means of the clients' metrics are published."""
        return None if self._rule.publish is None else self._rule.publish(self._partial)

    def fold(self, update: Values, contribution: Contribution) -> None:
        """Fold one update (a difference from the base version, see `Parameters.minus`), reading it in blocks.

        Raises `ModelError` if its schema differs and `ValueError` if the rule refuses it; the accumulator is then
        unchanged. After any other error, such as one from reading the update, the accumulator must be discarded.
        """
        self._check(update, "update", self._schema.uploaded)
        # A rule with tensors of the server's own is not sharded: it reads whole updates, which do not have them.
        columns = self._shard.columns if self._schema.uploaded is self._schema else None
        self._partial = self._rule.fold(self._partial, update.to_blocks(columns), contribution)
        if self._schema.carry == "max" and self._shard.owns_carried:
            self._carry_largest(update)

    def finish(self, base: Parameters, state: State) -> tuple[Parameters, State]:
        """Return the next model version and the rule's next state, in memory; otherwise as `parts`."""
        model = Parameters.zeros(base.schema)
        next_state: list[State] = []
        for part in self.parts(base, columns_of(state, base.schema.num_floating)):
            content = part.model.view(np.uint8)
            model.buffer[part.start : part.start + content.size] = content
            if part.state is not None:
                next_state.append({name: vector.copy() for name, vector in part.state.items()})
        return model, concatenate_columns(next_state)

    def reduce_updates(self, state: Iterable[State], base: FlatModel | None = None) -> Accumulator:
        """Return an accumulator in which the updates of a rule that gathers are reduced to one total of weight 1.

        A sum on a device is copied to memory; otherwise returns this accumulator. `state` are the columns of the last
        state, which are read more than once; `base` is the base version, for a rule that keeps a memory. Calls the
        shard's `reduce_shards`. Raises `ValueError` if the rule cannot reduce the updates; if there are too few of
        them, before any update is read.
        """
        rule, size = self._rule, len(self._shard.columns)
        if (device := self._partial.device) is not None:
            return self._with(rule, dataclasses.replace(self._partial, total=device.total(), device=None))
        if rule.gather is None:
            return self
        remembered = {name: StoredColumns(state, name, size) for name in rule.init(0)}
        with np.errstate(all="ignore"):
            partial = rule.gather(remembered, dataclasses.replace(self._partial, base=base))
        return self._with(dataclasses.replace(rule, gather=None), partial)

    def merge_shards(self, totals: Iterable[Vector]) -> Accumulator:
        """Return an accumulator of all columns from the totals of all shards, in order.

        Call `reduce_updates` on every shard first, and this only on the shard that `owns_carried`. It is for rules that
        are not blockwise: their result is computed in one place.
        """
        assert self._shard.owns_carried
        shard = Shard(range(self._schema.num_floating), memory=np.concatenate([*totals]))
        return self._with(self._rule, self._partial, shard)

    @property
    def summary(self) -> PartialSummary:
        """The summary of the folded updates, without their sum."""
        carried = [self._carried[run].tobytes() for run in self._schema.segments if run in self._carried]
        return PartialSummary(self._partial.weight, self._partial.num_updates, self._partial.sums, carried)

    @classmethod
    def merge_partials(
        cls, schema: Schema, rule: Rule, scalars: Mapping[str, float], summaries: Iterable[PartialSummary], shard: Shard
    ) -> Accumulator:
        """Merge accumulators by their summaries; `shard.memory` is the sum of their sums."""
        empty = np.empty(0, np.float32)
        result = cls(schema, rule, scalars, shard)
        partial = dataclasses.replace(result._partial, total=empty)
        for summary in summaries:
            other = Partial(empty, summary.weight, summary.num_updates, summary.sums)
            partial = rule.merge(partial, other)
            result._carry_all(summary.carried)
        result._partial = dataclasses.replace(partial, total=result.total)
        return result

    def _carry_all(self, carried: Sequence[bytes]) -> None:
        runs = [run for run in self._schema.segments if run.dtype not in FLOATING]
        for run, content in zip(runs, carried, strict=False):  # empty for an accumulator without updates
            values = np.frombuffer(content, DTYPES[run.dtype])
            largest = self._carried.get(run)
            self._carried[run] = values if largest is None else np.maximum(largest, values)

    def _with(self, rule: Rule, partial: Partial, shard: Shard | None = None) -> Accumulator:
        other = copy.copy(self)
        other._rule, other._partial = rule, partial
        if shard is not None:
            other._shard, other._partial = shard, _place_in_memory(partial, shard, rule)
        return other

    def parts(self, base: Parameters | ModelFile, state: Iterable[State]) -> Iterator[ResultPart]:
        """Yield the next model version and the rule's next state, part by part; changes nothing and can be repeated.

        `state` are the columns of the last state, which a rule that gathers reads more than once. Memory is a few
        windows if the rule is `blockwise`. Raises `ModelError` if the schema of `base` differs or if a part of the
        result is not finite: finite updates may add up to more than float32 can hold, and no job recovers from such a
        version. Raises `ValueError` if the rule has no result, for instance because no update was folded.
        """
        self._check(base, "base version", self._schema)
        drawn: list[State] = []
        steps = self._steps(state, base, drawn)
        for placed in apply_step(base, steps, self._carry, self._shard.columns):
            _check_finite(placed.values)
            yield ResultPart(*placed, drawn.pop() if drawn else None)
        for _ in steps:  # the one column of a model without floating-point entries
            yield ResultPart(0, np.empty(0, np.uint8), drawn.pop())

    def _steps(self, state: Iterable[State], base: FlatModel, drawn: list[State]) -> Iterator[Vector]:
        """Yield the rule's step, column by column, and append the column of the next state to `drawn`."""
        for step, remembered in self._apply_rule(state, base):
            _check_finite(*remembered.values())
            drawn.append(remembered)
            yield step

    def _apply_rule(self, state: Iterable[State], base: FlatModel) -> Iterator[tuple[Vector, State]]:
        rule, size = self._rule, len(self._shard.columns)
        statistics = tuple(each.columns for each in self._schema.statistics)
        partial = self.reduce_updates(state, base)._partial
        partial = dataclasses.replace(partial, statistics=statistics, whole=partial.total, base=base)
        if not rule.blockwise:
            assert size == self._schema.num_floating, "merge the shards of a rule that is not blockwise first"
            with np.errstate(all="ignore"):
                step, whole = rule.apply(concatenate_columns(state), partial)
            _check_shape(size, step, *whole.values())
            for column, remembered in zip(columns(size), columns_of(whole, size), strict=True):
                yield step[column], remembered
            return
        for column, remembered in zip(columns(size), state, strict=True):
            part = dataclasses.replace(partial, total=partial.total[column], first=partial.first + column.start)
            with np.errstate(all="ignore"):  # the result is checked for values that are not finite
                step, after = rule.apply(remembered, part)
            _check_shape(part.total.size, step, *after.values())
            yield step, after

    def _carry(self, read: Read, run: Segment) -> Iterator[npt.NDArray[Any]]:
        if not self._shard.owns_carried:
            return iter(())
        largest = self._carried.get(run)
        return (
            read_base_values(read, run) if largest is None else (largest[block] for block in blocks(run.count, WINDOW))
        )

    def _carry_largest(self, update: Values) -> None:
        for run in self._schema.segments:
            if run.dtype in FLOATING:
                continue
            largest = self._carried.get(run)
            if largest is None:
                largest = self._carried[run] = np.empty(run.count, DTYPES[run.dtype])
                for block, values in zip(blocks(run.count), update.read_carried(run), strict=True):
                    largest[block] = values
            else:
                for block, values in zip(blocks(run.count), update.read_carried(run), strict=True):
                    np.maximum(largest[block], values, out=largest[block])

    def _check(self, values: Values, what: str, expected: Schema) -> None:
        if difference := values.schema.difference_from(expected):
            raise ModelError(f"the {what} does not fit the attempt: {difference}")


def _place_in_memory(partial: Partial, shard: Shard, rule: Rule) -> Partial:
    """Return the partial result with the shard's columns and memory."""
    partial = dataclasses.replace(partial, first=shard.columns.start, reduce_shards=shard.reduce_shards)
    if isinstance(shard.memory, np.ndarray):
        return dataclasses.replace(partial, total=shard.memory)
    if shard.memory is None or rule.gather is not None:  # updates that are read twice are summed in memory
        return partial
    return dataclasses.replace(partial, device=shard.memory)


def _check_shape(size: int, *vectors: npt.NDArray[Any]) -> None:
    """Raise `PluginError` unless a rule returned vectors of this size."""
    for vector in vectors:
        if vector.dtype != np.float32 or vector.shape != (size,):
            found = f"{vector.dtype}{list(vector.shape)}"
            raise PluginError(f"the aggregation rule returned {found} for a step or a state; expected float32[{size}]")


def _check_finite(*arrays: npt.NDArray[Any]) -> None:
    if not all(all_finite(values) for values in arrays):
        raise ModelError("the aggregate of the updates is not finite: some of them are far too large")
