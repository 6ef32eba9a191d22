"""What the server holds for one open attempt; its size does not depend on the number of updates.

Updates of a rule that gathers are not held: the accumulator remembers where they can be read, until the attempt ends.

The columns of the model's vector may be shared out over several accumulators, each of one `Shard`: every one of them
folds its columns of all updates, in the same order, and has its part of the result, bit for bit as one alone has it.
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
from fedplat.errors import ModelError
from fedplat.model import (
    DTYPES,
    FLOATING,
    WINDOW,
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
from fedplat.model.shards import ShardReduce, single_shard


class ResultPart(NamedTuple):
    """A part of the result: the next entries of the model's flat buffer, and the next column of the state, if any.

    `start` is the byte of the flat buffer that the entries begin with. Valid until the next part is drawn.
    """

    start: int
    model: npt.NDArray[Any]
    state: State | None = None


class Shard(NamedTuple):
    """The columns of an accumulator that has some of them (see `fedplat.model.shards`).

    One shard `carries`: it has the entries that are no floating-point numbers, too. The sum of the updates is kept in
    `memory`, a vector of zeros, or elsewhere; in memory of its own if there is none, or if the rule gathers.
    """

    columns: range
    across: ShardReduce = single_shard
    carries: bool = True
    memory: Vector | DeviceAccumulator | None = None


class PartialSummary(msgspec.Struct, frozen=True):
    """What is known of the updates that an accumulator has folded, beside their sum: for those it is merged with.

    `carried` are the largest values of the runs that are carried, in the order of the schema.
    """

    weight: float
    num_updates: int
    sums: Mapping[str, float]
    carried: Sequence[bytes]


class Accumulator:
    """Folds updates of one schema as they arrive and ends the attempt with the next model version.

    Floating-point entries go through the rule. Other entries are carried as the schema says: "keep" leaves
    the base version's value, "max" takes the largest value of the folded updates, entry by entry (for
    booleans: true if one was true). Memory is one float32 vector, the carried entries and a few windows; it does
    not grow with the updates. Those of a rule that gathers must stay readable until the result is made.

    >>> base = Parameters.from_arrays({"weight": np.zeros(2, np.float32)})
    >>> rule = weighted_mean()
    >>> accumulator = Accumulator(base.schema, rule)
    >>> accumulator.fold(Parameters.from_arrays({"weight": np.array([1, 3], np.float32)}), Contribution(10))
    >>> model, state = accumulator.finish(base, rule.init(base.schema.num_floating))
    >>> model["weight"]
    array([1., 3.], dtype=float32)
    """

    def __init__(
        self, schema: Schema, rule: Rule, scalars: Mapping[str, float] | None = None, shard: Shard | None = None
    ) -> None:
        """`scalars` are those that the attempt before remembered; none are the rule's first ones.

        Without a `shard` it has all columns. With one, all that is said of vectors holds for its columns.
        """
        self._schema = schema
        self._rule = rule
        self._shard = shard or Shard(range(schema.num_floating))
        self._partial = _place_in_memory(rule.start(len(self._shard.columns)), self._shard, rule)
        if scalars:
            self._partial = dataclasses.replace(self._partial, scalars=scalars)
        self._carried: dict[Segment, npt.NDArray[Any]] = {}

    @property
    def num_updates(self) -> int:
        """Number of updates folded so far."""
        return self._partial.num_updates

    @property
    def total_weight(self) -> float:
        """Sum of their weights."""
        return self._partial.weight

    @property
    def keeps_updates(self) -> bool:
        """Whether updates must stay readable until the result is made."""
        return self._rule.gather is not None

    @property
    def total(self) -> Vector:
        """The sum of the updates folded so far."""
        return self._partial.total

    @property
    def scalars(self) -> Mapping[str, float]:
        """The numbers that the next attempt begins with."""
        return self._rule.remember(self._partial)

    @property
    def published(self) -> Mapping[str, float] | None:
        """The metrics that are shown of the attempt; None if they are the means of the clients' own."""
        return None if self._rule.publish is None else self._rule.publish(self._partial)

    def fold(self, update: Values, contribution: Contribution) -> None:
        """Adds one update (a difference from the base version, see `Parameters.minus`), reading it in blocks.

        Raises `ModelError` when its schema is another, `ValueError` when the rule refuses it; nothing is
        added then. After any other error, from reading the update say, the accumulator is of no use any more.
        """
        self._check(update, "update")
        self._partial = self._rule.fold(self._partial, update.to_blocks(self._shard.columns), contribution)
        if self._schema.carry == "max" and self._shard.carries:
            self._carry_largest(update)

    def finish(self, base: Parameters, state: State) -> tuple[Parameters, State]:
        """The next model version and the rule's next state, in memory; what is said of `parts` holds for it."""
        model = Parameters.zeros(base.schema)
        next_state: list[State] = []
        for part in self.parts(base, columns_of(state, base.schema.num_floating)):
            content = part.model.view(np.uint8)
            model.buffer[part.start : part.start + content.size] = content
            if part.state is not None:
                next_state.append({name: vector.copy() for name, vector in part.state.items()})
        return model, concatenate_columns(next_state)

    def reduce_gathered(self, state: Iterable[State]) -> Accumulator:
        """This one, with the updates of a rule that gathers reduced to one total, which weighs 1; else as it is.

        `state` are the columns of the last state, which are drawn more than once. `across` of a shard is called.
        Raises `ValueError` when there are too few updates for the rule, say, and then before any update is read.
        """
        rule, size = self._rule, len(self._shard.columns)
        if (elsewhere := self._partial.device) is not None:
            return self._with(rule, dataclasses.replace(self._partial, total=elsewhere.total(), device=None))
        if rule.gather is None:
            return self
        remembered = {name: StoredColumns(state, name, size) for name in rule.init(0)}
        with np.errstate(all="ignore"):
            partial = rule.gather(remembered, self._partial)
        return self._with(dataclasses.replace(rule, gather=None), partial)

    def merge_shards(self, totals: Iterable[Vector]) -> Accumulator:
        """One of all columns, of the totals of all shards, in order, which must have been `reduce_gathered`.

        Only the one that carries can be. It is for rules that are not blockwise: their end is computed in one place.
        """
        assert self._shard.carries
        shard = Shard(range(self._schema.num_floating), memory=np.concatenate([*totals]))
        return self._with(self._rule, self._partial, shard)

    @property
    def tally(self) -> PartialSummary:
        """What is known beside the sum."""
        carried = [self._carried[run].tobytes() for run in self._schema.segments if run in self._carried]
        return PartialSummary(self._partial.weight, self._partial.num_updates, self._partial.sums, carried)

    @classmethod
    def merge_partials(
        cls, schema: Schema, rule: Rule, scalars: Mapping[str, float], tallies: Iterable[PartialSummary], shard: Shard
    ) -> Accumulator:
        """One of all updates that several have folded, whose sums `shard.memory` is the sum of."""
        nothing = np.empty(0, np.float32)
        result = cls(schema, rule, scalars, shard)
        partial = dataclasses.replace(result._partial, total=nothing)
        for tally in tallies:
            other = Partial(nothing, tally.weight, tally.num_updates, tally.sums)
            partial = rule.merge(partial, other)
            result._carry_all(tally.carried)
        result._partial = dataclasses.replace(partial, total=result.total)
        return result

    def _carry_all(self, carried: Sequence[bytes]) -> None:
        runs = [run for run in self._schema.segments if run.dtype not in FLOATING]
        for run, content in zip(runs, carried, strict=False):  # none of an accumulator without updates
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
        """The next model version and the rule's next state, part by part; changes nothing, and may be repeated.

        `state` are the columns of the last state, which a rule that gathers draws more than once. Memory is a few
        windows, unless the rule is not `blockwise`. Raises `ModelError` when the schema of `base` is another or,
        wherever it shows, when the result is not finite: finite updates may add up to more than float32 holds, and no
        job recovers from such a version. Raises `ValueError` when the rule has no result, since no update was folded,
        say.
        """
        self._check(base, "base version")
        drawn: list[State] = []
        steps = self._steps(state, drawn)
        for placed in apply_step(base, steps, self._carry, self._shard.columns):
            _check_finite(placed.values)
            yield ResultPart(*placed, drawn.pop() if drawn else None)
        for _ in steps:  # the one column of a model without floating-point entries
            yield ResultPart(0, np.empty(0, np.uint8), drawn.pop())

    def _steps(self, state: Iterable[State], drawn: list[State]) -> Iterator[Vector]:
        """The rule's step, column by column; the next state's column is put into `drawn`."""
        for step, remembered in self._apply_rule(state):
            _check_finite(*remembered.values())
            drawn.append(remembered)
            yield step

    def _apply_rule(self, state: Iterable[State]) -> Iterator[tuple[Vector, State]]:
        rule, size = self._rule, len(self._shard.columns)
        partial = self.reduce_gathered(state)._partial
        if not rule.blockwise:
            assert size == self._schema.num_floating, "shards of such a rule have to be joined"
            with np.errstate(all="ignore"):
                step, whole = rule.apply(concatenate_columns(state), partial)
            for column, remembered in zip(columns(size), columns_of(whole, size), strict=True):
                yield step[column], remembered
            return
        for column, remembered in zip(columns(size), state, strict=True):
            part = dataclasses.replace(partial, total=partial.total[column], first=partial.first + column.start)
            with np.errstate(all="ignore"):  # what is not finite is found in the result
                result = rule.apply(remembered, part)
            yield result

    def _carry(self, read: Read, run: Segment) -> Iterator[npt.NDArray[Any]]:
        if not self._shard.carries:
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

    def _check(self, values: Values, what: str) -> None:
        if difference := values.schema.difference_from(self._schema):
            raise ModelError(f"the {what} does not fit the attempt: {difference}")


def _place_in_memory(partial: Partial, shard: Shard, rule: Rule) -> Partial:
    """A partial result of a shard's columns, in its memory."""
    partial = dataclasses.replace(partial, first=shard.columns.start, reduce_shards=shard.across)
    if shard.memory is None or rule.gather is not None:
        return partial
    if isinstance(shard.memory, np.ndarray):
        return dataclasses.replace(partial, total=shard.memory)
    return dataclasses.replace(partial, device=shard.memory)


def _check_finite(*arrays: npt.NDArray[Any]) -> None:
    if not all(all_finite(values) for values in arrays):
        raise ModelError("the aggregate of the updates is not finite: some of them are far too large")
