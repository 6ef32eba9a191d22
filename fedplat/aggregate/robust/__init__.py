"""Robust aggregation: the result stays useful even if a bounded number of updates is arbitrary.

Each rule is one file and wraps any rule that ends with a mean of updates, so every server optimizer can be used with
it; pre-aggregators mix the updates first. `docs/contributing.md` has the steps to add one.

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

from typing import Annotated

import msgspec
from msgspec import Meta

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.bucketing import Bucketing
from fedplat.aggregate.robust.bulyan import Bulyan
from fedplat.aggregate.robust.centered_clipping import CenteredClipping
from fedplat.aggregate.robust.fltrust import FLTrust
from fedplat.aggregate.robust.geometric_median import GeometricMedian
from fedplat.aggregate.robust.inputs import Rows
from fedplat.aggregate.robust.krum import Krum, MultiKrum
from fedplat.aggregate.robust.median import Median
from fedplat.aggregate.robust.nearest import NearestNeighbours
from fedplat.aggregate.robust.trimmed_mean import TrimmedMean

RobustRule = Median | TrimmedMean | Krum | MultiKrum | Bulyan | GeometricMedian | CenteredClipping | FLTrust
"""The key `robust.rule` of a job file: a union tagged by its key `name`."""

PreAggregator = Bucketing | NearestNeighbours
"""One of the tables of the key `robust.before`."""

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
        ranges.check(self)
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
            name = self.rule.__struct_config__.tag
            raise ValueError(f"{name} with byzantine = {self.byzantine} needs at least {fewest}, not {text}")

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
