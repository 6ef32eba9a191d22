"""Counts of rows: by the categories of columns, how many values are missing, and contingency tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedplat import texts
from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures.contract import Finished, Json, ReplyDisclosure, Step
from fedplat.procedures.groups import MAX_CELLS, GroupOptions, RowGroups, count_codes
from fedplat.procedures.sums import ReplySchema, ReplyTensor, ReplyTotals
from fedplat.procedures.suppression import Mask, find_suppressed
from fedplat.procedures.tables import SiteTable
from fedplat.tables.columns import Column, DateColumn, Name, NumericColumn


class Counts(GroupOptions, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="counts"):
    """How many rows there are, by the levels of each column, and of several columns at once.

    A column of categories has a level for each of them, `other` if it is declared so, and `missing`; one of truth
    values `false`, `true` and `missing`; all others `present` and `missing`.
    """

    columns: Annotated[dict[str, Column], Meta(min_length=1, max_length=1000)]
    """The columns whose levels are counted."""
    tables: Annotated[
        tuple[Annotated[tuple[Name, ...], Meta(min_length=2, max_length=4)], ...], Meta(max_length=100)
    ] = ()
    """Contingency tables, each the names of some of the columns, such as `tables = [["smoker", "died"]]`."""
    min_cell: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """Count, over all sites, below which a cell is left out of the result, unless it is 0; further cells are left out
    if it would follow from them. Who adds up the replies learns them all the same. 1: all cells are shown."""

    def __post_init__(self) -> None:
        groups = self._groups()
        for names in self.tables:
            for place, name in enumerate(names):
                if name not in self.columns:
                    raise ValueError(f"tables: the column {texts.quote(name)} is not in columns; expected one that is")
                if name in names[:place] or name in self.by:
                    raise ValueError(f"tables: the column {texts.quote(name)} is twice in a table, or in by as well")
        if both := [name for name in self.by if name in self.columns]:
            raise ValueError(f"by: the column {texts.quote(both[0])} is in columns; expected it in others")
        if len({frozenset(names) for names in self.tables}) < len(self.tables):
            raise ValueError("tables: two tables have the same columns; expected each once")
        size = sum(int(np.prod(self._shape(names), dtype=object)) for names in self._list_tables())
        if size > MAX_CELLS:
            raise ValueError(f"there are {size:,} cells of {groups.size:,} groups; expected at most {MAX_CELLS:,}")

    def _groups(self) -> RowGroups:
        return RowGroups(self.columns, self)

    def _list_tables(self) -> list[tuple[str, ...]]:
        """Return the columns of each table without those of `by`: of all rows, of each column, and of several."""
        return [(), *((name,) for name in self.columns), *self.tables]

    def _list_levels(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [*self._groups().levels, *(self.columns[name].levels for name in names)]

    def _shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(map(len, self._list_levels(names)))

    def begin(self) -> Step:
        """Return the only question."""
        return Step(Parameters.from_arrays({"step": np.array([1], np.int64)}))

    def schema(self, message: Parameters) -> ReplySchema:
        """Return the form of the replies: the cells of each table."""
        if {*message} != {"step"} or message["step"].tolist() != [1]:
            raise ProcedureError("the message is not one of this procedure; expected that of its only step")
        bound = float(self.max_rows)
        return ReplySchema(
            tuple(ReplyTensor(f"table {number}", bound, self._shape(names)) for number, names in self._number_tables())
        )

    def _number_tables(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        return enumerate(self._list_tables())

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        """Return the counts of a site's rows."""
        groups = self._groups()
        shapes = {number: self._shape(names) for number, names in self._number_tables()}
        found = {number: np.zeros(shape, np.int64) for number, shape in shapes.items()}
        for rows, codes in groups.read(table, self.columns):
            levels = {name: _find_levels(rows[name], column) for name, column in self.columns.items()}
            for number, names in self._number_tables():
                cells = codes
                for name in names:
                    cells = cells * len(self.columns[name].levels) + levels[name]
                found[number] += count_codes(cells, found[number].size).reshape(shapes[number])
        return {f"table {number}": counts for number, counts in found.items()}

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        """Return the result."""
        tables = self._list_tables()
        counts = [totals.steps(f"table {number}") for number in range(len(tables))]
        named = [((*self.by, *names), each) for names, each in zip(tables, counts, strict=True)]
        hidden = find_suppressed(named, self.min_cell)
        levels = map(self._list_levels, tables)
        shown = [_nest(*each) for each in zip(levels, counts, hidden, strict=True)]
        end = 1 + len(self.columns)
        result: dict[str, Json] = {"rows": shown[0], "columns": dict(zip(self.columns, shown[1:end], strict=True))}
        if self.tables:
            several = zip(self.tables, shown[end:], strict=True)
            result["tables"] = [{"columns": [*names], "counts": cells} for names, cells in several]
        if self.by:
            result["by"] = [*self.by]
        num_hidden = sum(int(np.count_nonzero(each)) for each in hidden)
        if num_hidden:
            result["suppressed"] = (
                f"{num_hidden} cells are null: those with fewer than {self.min_cell} rows, but for 0, and others from "
                "which they would follow"
            )
        return Finished(result)

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        """Return the cells of each table."""
        contents = {number: " and of ".join(map(texts.quote, names)) for number, names in self._number_tables()}
        groups = f", in each group by {', '.join(map(texts.quote, self.by))}" if self.by else ""
        return tuple(
            ReplyDisclosure(
                tensor.name,
                (f"how many rows have each level of {contents[number]}" if number else "how many rows there are")
                + groups,
                tensor.count,
                tensor.bound,
                2.0**tensor.exponent,
                times=1,
            )
            for number, tensor in enumerate(self.schema(self.begin().message).tensors)
        )


def _find_levels(values: npt.NDArray[np.float64 | np.int64], column: Column) -> npt.NDArray[np.int64]:
    """Return the places of values in the levels of their column."""
    is_number = isinstance(column, NumericColumn | DateColumn)
    return (np.isnan(values) if is_number else values).astype(np.int64)


def _nest(levels: list[tuple[str, ...]], counts: npt.NDArray[np.int64], hidden: Mask) -> Json:
    """Return the cells of a table by the levels of their columns; suppressed ones are None."""
    if not levels:
        return None if hidden else int(counts)
    parts = zip(levels[0], counts, hidden, strict=True)
    return {level: _nest(levels[1:], *part) for level, *part in parts}
