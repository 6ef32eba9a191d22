"""Covariances and correlations of columns, from one exact sum.

The sites count values in steps of their columns' resolutions from the middle of the declared ranges, k and l, and send
n, the sums of k and the sums of the products k l, over the rows that have all columns. The covariance
r_k r_l (S_kl - S_k S_l / n) / (n - 1) is computed in exact arithmetic and rounded once.
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
from fedplat.procedures.means import check_squares, round_up
from fedplat.procedures.sums import ReplySchema, ReplyTensor, ReplyTotals
from fedplat.procedures.tables import SiteTable
from fedplat.tables.columns import NumericColumn

_MIN_BLOCK = 256
_NUMBERS = ("rows", "incomplete", "mean", "covariance", "correlation")


class Covariances(GroupOptions, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="covariances"):
    """The means, covariances and correlations of columns, over the rows of all sites that have a value in each."""

    columns: Annotated[dict[str, NumericColumn], Meta(min_length=1, max_length=300)]
    """Columns with their ranges, such as `columns = { age = { low = 0, high = 120, resolution = 1 } }`."""
    min_rows: Annotated[int, Meta(ge=2, le=1_000_000)] = 10
    """Number of complete rows, over all sites, below which all numbers are left out of the result. Who adds up the
    replies learns them all the same."""

    def __post_init__(self) -> None:
        self._groups()
        check_squares(self.columns, self.max_rows)

    def _groups(self) -> RowGroups:
        return RowGroups(self.columns, self)

    def begin(self) -> Step:
        """Return the only question."""
        return Step(Parameters.from_arrays({"step": np.array([1], np.int64)}))

    def schema(self, message: Parameters) -> ReplySchema:
        """Return the form of the replies: for each group the numbers of rows, the sums and those of the products."""
        if {*message} != {"step"} or message["step"].tolist() != [1]:
            raise ProcedureError("the message is not one of this procedure; expected that of its only step")
        groups, size = self._groups().size, len(self.columns)
        reach = max(column.reach for column in self.columns.values())
        return ReplySchema(
            (
                ReplyTensor("rows", float(self.max_rows), (groups,)),
                ReplyTensor("incomplete", float(self.max_rows), (groups,)),
                ReplyTensor("sums", round_up(self.max_rows * reach), (groups, size)),
                ReplyTensor("products", round_up(self.max_rows * reach**2), (groups, size * (size + 1) // 2)),
            )
        )

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        """Return the sums over a site's rows."""
        groups, upper = self._groups(), np.triu_indices(len(self.columns))
        reply = {each.name: np.zeros(each.shape, np.int64) for each in self.schema(message).tensors}
        for rows, codes in groups.read(table, self.columns):
            values = np.stack([rows[name] for name in self.columns], axis=-1)
            is_complete = ~np.isnan(values).any(axis=-1)
            reply["incomplete"] += count_codes(codes[~is_complete], groups.size)
            present, values = codes[is_complete], values[is_complete]
            reply["rows"] += count_codes(present, groups.size)
            columns = enumerate(self.columns.values())
            steps = np.stack([column.count_steps(values[:, place]) for place, column in columns], axis=-1)
            for group in np.unique(present).tolist():
                part = steps[present == group]
                reply["sums"][group] += part.sum(axis=0)
                reply["products"][group] += _multiply(part)[upper]
        return reply

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        """Return the result."""
        found = [
            self._describe(*(totals.steps(name)[group].tolist() for name in ("rows", "incomplete", "sums", "products")))
            for group in range(self._groups().size)
        ]
        if not self.by:
            return Finished(found[0])
        named = zip(self._groups().name_groups(), found, strict=True)
        return Finished({"groups": [{"group": dict[str, Json](group), **each} for group, each in named]})

    def _describe(self, rows: int, incomplete: int, sums: list[int], products: list[int]) -> dict[str, Json]:
        if rows < self.min_rows:
            return {**dict.fromkeys(_NUMBERS), "suppressed": f"fewer than {self.min_rows} rows have all values"}
        names, columns = [*self.columns], [*self.columns.values()]
        means = [
            Fraction(column.resolution) * (column.middle + Fraction(total, rows))
            for column, total in zip(columns, sums, strict=True)
        ]
        covariances: dict[str, dict[str, Json]] = {name: {} for name in names}
        spreads: dict[tuple[int, int], Fraction] = {}
        for i, j, product in zip(*map(np.ndarray.tolist, np.triu_indices(len(names))), products, strict=True):
            spreads[i, j] = spreads[j, i] = Fraction(rows * product - sums[i] * sums[j], rows * (rows - 1))
        correlations: dict[str, dict[str, Json]] = {name: {} for name in names}
        for (i, j), spread in sorted(spreads.items()):
            units = Fraction(columns[i].resolution) * Fraction(columns[j].resolution)
            covariances[names[i]][names[j]] = float(units * spread)
            variances = spreads[i, i] * spreads[j, j]
            correlations[names[i]][names[j]] = _divide_by_root(spread, variances) if variances else None
        return {
            "rows": rows,
            "incomplete": incomplete,
            "mean": {name: float(mean) for name, mean in zip(names, means, strict=True)},
            "covariance": dict[str, Json](covariances),
            "correlation": dict[str, Json](correlations),
        }

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        """Return the sums of each group."""
        contents = {
            "rows": "how many rows have a value in each column",
            "incomplete": "how many rows lack one",
            "sums": "the sum of the values, for each column, counted in its resolution from the middle of its range",
            "products": "the sum of the products of these numbers, for each two columns",
        }
        groups = ", in each group of rows" if self.by else ""
        return tuple(
            ReplyDisclosure(
                each.name, contents[each.name] + groups, each.count, each.bound, 2.0**each.exponent, times=1
            )
            for each in self.schema(self.begin().message).tensors
        )


def _multiply(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the sums over rows of the products of each two columns, exactly.

    Products of floats are ten times as fast, and exact for as many rows as have a sum of squares below 2^53.
    """
    num_rows = 2**53 // max(int(np.abs(steps).max()) ** 2, 1)
    if num_rows < _MIN_BLOCK:
        return steps.T @ steps
    blocks = (steps[start : start + num_rows].astype(np.float64) for start in range(0, len(steps), num_rows))
    return sum(((block.T @ block).astype(np.int64) for block in blocks), np.zeros((steps.shape[1],) * 2, np.int64))


def _divide_by_root(value: Fraction, square: Fraction) -> float:
    """Return value / sqrt(square), from -1 to 1."""
    quotient = math.sqrt(value**2 / square)
    return math.copysign(min(quotient, 1.0), value)
