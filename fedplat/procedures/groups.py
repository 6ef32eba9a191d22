"""The rows that a procedure uses, and the groups that it makes of them: the options `where` and `by`.

Both follow from the options of a procedure, so its owner has read them; the levels of groups are declared, never found
in the rows, so that all sites have the same and none is disclosed by its presence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat import texts
from fedplat.errors import ProcedureError
from fedplat.procedures.tables import SiteTable
from fedplat.tables.columns import Column, DateColumn, Name, NumericColumn
from fedplat.tables.conditions import RowFilter
from fedplat.tables.values import Array

MAX_CELLS = 100_000
"""Maximum number of groups, or of cells of all tables."""


class GroupOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a procedure for its rows and groups."""

    where: Annotated[str, Meta(max_length=1000)] = ""
    """Condition for the rows that count, such as `"age >= 40 and stage in ['I', 'II']"`; default: all rows. A
    comparison is false for a row without the value."""
    by: Annotated[tuple[Name, ...], Meta(max_length=4)] = ()
    """Columns of categories or truth values: the results are for each of their levels, also `other` and `missing`."""
    others: dict[str, Column] = msgspec.field(default_factory=dict[str, Column])
    """The columns that `where` and `by` name besides those of `columns`."""
    max_rows: Annotated[int, Meta(ge=1, le=2**40)] = 1_000_000
    """Number of rows that a site may have at most: with the ranges it bounds the sums."""


class RowGroups:
    """The rows of a table that count, with the number of the group of each.

    Raises `ValueError` for options that do not fit the declared columns.
    """

    def __init__(self, columns: Mapping[str, Column], options: GroupOptions) -> None:
        if both := sorted(columns.keys() & options.others.keys()):
            raise ValueError(f"others.{both[0]}: the column is also in columns; expected it once")
        self.declared = {**columns, **options.others}
        self._max_rows = options.max_rows
        for place, name in enumerate(options.by):
            if name not in self.declared:
                raise ValueError(f"by: the column {texts.quote(name)} is not declared; expected one that is")
            if name in options.by[:place]:
                raise ValueError(f"by: the column {texts.quote(name)} is listed twice; expected it once")
            if isinstance(self.declared[name], NumericColumn | DateColumn):
                raise ValueError(
                    f"by: the column {texts.quote(name)} has no levels; expected categories or truth values"
                )
        self._by = options.by
        try:
            self._filter = RowFilter(options.where, self.declared)
        except ValueError as exc:
            raise ValueError(f"where: {exc}") from exc
        if unused := sorted(options.others.keys() - {*options.by, *self._filter.names}):
            raise ValueError(f"others.{unused[0]}: neither where nor by names the column; expected no other columns")
        self.levels = tuple(self.declared[name].levels for name in options.by)
        """The levels of each column of `by`."""
        self.size = math.prod(map(len, self.levels))
        """The number of groups."""
        if self.size > MAX_CELLS:
            raise ValueError(f"by: there are {self.size:,} groups; expected at most {MAX_CELLS:,}")

    def read(self, table: SiteTable, names: Mapping[str, Column]) -> Iterator[tuple[Mapping[str, Array], Array]]:
        """Yield the rows that count, in batches of some columns, and the number of the group of each row.

        Raises `ProcedureError` for a table that does not fit, or has too many rows.
        """
        num_rows = 0
        wanted = dict.fromkeys((*names, *self._by, *self._filter.names))
        for batch in table.read_batches({name: self.declared[name] for name in wanted}):
            mask, size = self._filter.select(batch), next(iter(batch.values())).size
            num_rows += size
            rows = batch if mask is None else {name: array[mask] for name, array in batch.items()}
            groups = np.zeros(next(iter(rows.values())).size, np.int64)
            for name, levels in zip(self._by, self.levels, strict=True):
                groups = groups * len(levels) + rows[name]
            yield rows, groups
        if num_rows > self._max_rows:
            raise ProcedureError(f"the table has {num_rows:,} rows; expected at most max_rows = {self._max_rows:,}")

    def name_groups(self) -> list[dict[str, str]]:
        """Return the levels of each group, by column."""
        places = np.ndindex(*map(len, self.levels))
        return [
            {name: levels[place] for name, levels, place in zip(self._by, self.levels, each, strict=True)}
            for each in places
        ]


def count_codes(codes: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Return how often each number below `size` occurs."""
    return np.bincount(codes, minlength=size).astype(np.int64)
