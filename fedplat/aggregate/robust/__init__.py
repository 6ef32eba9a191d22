"""Robust aggregation: the result stays useful even if a bounded number of updates is arbitrary.

Each rule wraps any rule that ends with a mean of updates, so every server optimizer can be used with it;
pre-aggregators (`inputs.py`) mix the updates first. `docs/contributing.md` has the steps to add one.

>>> from fedplat.aggregate import Contribution, weighted_mean
>>> robust = Robust(rule=Median(), byzantine=1)
>>> rule = robust.build(seed=1)(weighted_mean())
>>> partial = rule.start(1)
>>> for value in (1.0, 2.0, 1e30):
...     partial = rule.fold(partial, VectorBlocks(np.array([value], np.float32)), Contribution(1.0))
>>> rule.apply({}, rule.gather({}, partial))[0]
array([2.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Bucketing, Mix, NearestNeighbours, Rows
from fedplat.aggregate.robust.krum import Bulyan, Krum, MultiKrum
from fedplat.aggregate.robust.medians import GeometricMedian, Median, TrimmedMean
from fedplat.aggregate.robust.reference import CenteredClipping, FLTrust
from fedplat.config.plugins import Kind, by_name, define, name_of


@runtime_checkable
class RobustRule(Protocol):
    """The key `robust.rule` of a job file: the options of a robust rule, selected by the key `name`."""

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        ...

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return a wrapper that replaces the mean of a rule, with pre-aggregation by `before`."""
        ...


@runtime_checkable
class PreAggregator(Protocol):
    """One of the tables of the key `robust.before`: the options of a pre-aggregator, selected by the key `name`."""

    def rows_of(self, num_updates: int) -> int:
        """Return the number of rows that result from `num_updates`."""
        ...

    def build(self, byzantine: int, seed: int) -> Mix:
        """Return the pre-aggregator; its random choices follow from `seed`."""
        ...


ROBUST_RULES: Mapping[str, type[RobustRule]] = by_name(
    Median, TrimmedMean, Krum, MultiKrum, Bulyan, GeometricMedian, CenteredClipping, FLTrust
)
"""The options record of each built-in robust rule, by its name in a job file."""

PRE_AGGREGATORS: Mapping[str, type[PreAggregator]] = by_name(Bucketing, NearestNeighbours)
"""The options record of each built-in pre-aggregator, by its name in a job file."""

define(Kind("robust-rules", "name", "a robust rule", RobustRule, ("fewest", "build"), ROBUST_RULES))
define(Kind("pre-aggregators", "name", "a pre-aggregator", PreAggregator, ("rows_of", "build"), PRE_AGGREGATORS))

MAX_ROBUST_UPDATES = 1000
"""Maximum number of updates of a robust rule: their files are all open at once, and the work grows quadratically."""


class Robust(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Robust aggregation: a rule that replaces the mean of the updates."""

    rule: RobustRule
    """Rule and its options, such as `rule = { name = "median" }`."""
    byzantine: Annotated[int, Meta(ge=0, le=MAX_ROBUST_UPDATES)]
    """f, the number of updates of an attempt that may be arbitrary."""
    before: Annotated[tuple[PreAggregator, ...], Meta(max_length=10)] = ()
    """Pre-aggregators that mix the updates first, in this order, such as `before = [{ name = "nearest" }]`."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)
        if self.before and isinstance(self.rule, FLTrust):
            raise ValueError(
                "before = [...]: expected none with fltrust, which must identify the client of each update"
            )

    def check(self, num_updates: int) -> None:
        """Raise `ValueError` if there are too few updates to tolerate the byzantine ones, or too many."""
        if num_updates > MAX_ROBUST_UPDATES:
            raise ValueError(f"a robust rule got {num_updates} updates; expected at most {MAX_ROBUST_UPDATES}")
        rows, text = num_updates, f"{num_updates} updates"
        for mixing in self.before:
            rows = mixing.rows_of(rows)
        if rows != num_updates:
            text += f", of which pre-aggregation makes {rows}"
        fewest = self.rule.fewest(self.byzantine)
        if rows < fewest:
            raise ValueError(
                f"{name_of(self.rule)} with byzantine = {self.byzantine} needs at least {fewest}, not {text}"
            )

    def build(self, seed: int) -> Wrapper:
        """Return a wrapper that makes a rule with a mean robust; random choices follow from `seed`.

        `gather` of the resulting rule raises `ValueError` if there are too few updates, or too many.
        """
        mixings = [mixing.build(self.byzantine, seed) for mixing in self.before]

        def before(rows: Rows) -> Rows:
            self.check(len(rows))
            for mix in mixings:
                rows = mix(rows)
            return rows

        return self.rule.build(self.byzantine, before)


__all__ = [
    "MAX_ROBUST_UPDATES",
    "PRE_AGGREGATORS",
    "ROBUST_RULES",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "Median",
    "MultiKrum",
    "NearestNeighbours",
    "PreAggregator",
    "Robust",
    "RobustRule",
    "TrimmedMean",
]
