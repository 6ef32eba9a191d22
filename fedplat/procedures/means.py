"""Means, standard deviations and standard errors of columns, from one exact sum.

Each value is rounded to the resolution of its column and counted in it from the middle of the declared range:
k = round(x / r) - c. The sites send n, the sum of k and the sum of k^2, which are integers. So the pooled mean
r (c + S1 / n) and variance r^2 (S2 - S1^2 / n) / (n - 1) are computed in exact arithmetic and rounded once, and do not
depend on how the rows are divided into sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures.contract import Finished, Json, ReplyDisclosure, Step
from fedplat.procedures.groups import GroupOptions, RowGroups, count_codes
from fedplat.procedures.sums import ReplySchema, ReplyTensor, ReplyTotals
from fedplat.procedures.tables import SiteTable
from fedplat.secure_aggregation.messages import MAX_GROUP
from fedplat.tables.columns import NumericColumn

_TENSORS = ("rows", "missing", "sums", "squares")
_NUMBERS = ("rows", "missing", "mean", "standard_deviation", "standard_error")


class Means(GroupOptions, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="means"):
    """The mean, standard deviation and standard error of columns, over the rows of all sites that have a value."""

    columns: Annotated[dict[str, NumericColumn], Meta(min_length=1, max_length=1000)]
    """Columns with their ranges, such as `columns = { age = { low = 0, high = 120, resolution = 1 } }`."""
    min_rows: Annotated[int, Meta(ge=2, le=1_000_000)] = 10
    """Number of rows with a value, over all sites, below which the numbers of a column are left out of the result. Who
    adds up the replies learns them all the same."""

    def __post_init__(self) -> None:
        self._groups()
        check_squares(self.columns, self.max_rows)

    def _groups(self) -> RowGroups:
        return RowGroups(self.columns, self)

    def begin(self) -> Step:
        """Return the only question."""
        return Step(Parameters.from_arrays({"step": np.array([1], np.int64)}))

    def schema(self, message: Parameters) -> ReplySchema:
        """Return the form of the replies: four integers for each column, and for each group of rows."""
        if {*message} != {"step"} or message["step"].tolist() != [1]:
            raise ProcedureError("the message is not one of this procedure; expected that of its only step")
        reach = max(column.reach for column in self.columns.values())
        limits = {"rows": 1, "missing": 1, "sums": reach, "squares": reach**2}
        shape = (len(self.columns),) if not self.by else (self._groups().size, len(self.columns))
        return ReplySchema(
            tuple(ReplyTensor(name, round_up(self.max_rows * limit), shape) for name, limit in limits.items())
        )

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        """Return the sums over a site's rows."""
        groups = self._groups()
        sums = {name: np.zeros((groups.size, len(self.columns)), np.int64) for name in _TENSORS}
        for rows, codes in groups.read(table, self.columns):
            for place, (name, column) in enumerate(self.columns.items()):
                is_present = ~np.isnan(rows[name])
                present, steps = codes[is_present], column.count_steps(rows[name][is_present])
                sums["rows"][:, place] += count_codes(present, groups.size)
                sums["missing"][:, place] += count_codes(codes[~is_present], groups.size)
                np.add.at(sums["sums"][:, place], present, steps)
                np.add.at(sums["squares"][:, place], present, np.square(steps))
        return sums if self.by else {name: each[0] for name, each in sums.items()}

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        """Return the result."""
        groups = self._groups()
        sums = np.stack([totals.steps(name).reshape(groups.size, -1) for name in _TENSORS], axis=-1)
        found = [self._describe_group(each) for each in sums]
        if not self.by:
            return Finished({"columns": found[0]})
        named = zip(groups.name_groups(), found, strict=True)
        return Finished({"groups": [{"group": dict[str, Json](group), "columns": each} for group, each in named]})

    def _describe_group(self, sums: npt.NDArray[np.int64]) -> dict[str, Json]:
        """Return the numbers of each column, from its four sums."""
        columns = zip(self.columns.items(), sums.tolist(), strict=True)
        return {name: self._describe(column, *each) for (name, column), each in columns}

    def _describe(self, column: NumericColumn, rows: int, missing: int, total: int, squares: int) -> Json:
        if rows < self.min_rows:
            return {**dict.fromkeys(_NUMBERS), "suppressed": f"fewer than {self.min_rows} rows have a value"}
        resolution = Fraction(column.resolution)
        mean = resolution * (column.middle + Fraction(total, rows))
        variance = resolution**2 * Fraction(rows * squares - total**2, rows * (rows - 1))
        numbers = (rows, missing, float(mean), math.sqrt(variance), math.sqrt(variance / rows))
        return dict(zip(_NUMBERS, numbers, strict=True))

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        """Return the four numbers of each column, and of each group."""
        each_group = ", in each group of rows" if self.by else ""
        contents = {
            "rows": "how many rows have a value, for each column",
            "missing": "how many rows have none, for each column",
            "sums": "the sum of the values, for each column, counted in its resolution from the middle of its range",
            "squares": "the sum of the squares of these numbers, for each column",
        }
        return tuple(
            ReplyDisclosure(
                each.name, contents[each.name] + each_group, each.count, each.bound, 2.0**each.exponent, times=1
            )
            for each in self.schema(self.begin().message).tensors
        )


def check_squares(columns: Mapping[str, NumericColumn], max_rows: int) -> None:
    """Raise `ValueError` unless the squares of all values, in steps, add up to less than 2^63, and so all products."""
    for name, column in columns.items():
        if max_rows * column.reach**2 * MAX_GROUP >= 2**63:
            raise ValueError(
                f"columns.{name}: sums of squares of {2 * column.reach + 1:,} different values in up to {max_rows:,} "
                "rows of each site do not fit 64 bits; expected a larger resolution, or a lower max_rows"
            )


def round_up(limit: int) -> float:
    """Return the least float that is not below a limit."""
    rounded = float(limit)
    return rounded if rounded >= limit else math.nextafter(rounded, math.inf)
