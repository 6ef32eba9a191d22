"""The table of a site as procedures read it: declared columns, in batches of rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat import texts
from fedplat.errors import ProcedureError
from fedplat.tables import dictionary, values
from fedplat.tables.columns import CategoryColumn, Column
from fedplat.tables.dictionary import Columns, SiteCategories, SiteColumn
from fedplat.tables.files import Frame, open_source
from fedplat.tables.values import Array, ColumnCounts


@dataclasses.dataclass
class TableCounts:
    """What a table has, in counts: how many rows fit the declaration, and how many do not."""

    declared: Mapping[str, SiteColumn | None]
    rows_per_person: int = 1
    rows: int = 0
    columns: dict[str, ColumnCounts] = dataclasses.field(default_factory=dict[str, ColumnCounts])
    """The counts of the columns that the table has."""
    num_found: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    """How often the table has a declared column, by its name, unless that is once."""
    num_persons_columns: int = 1
    """How often the table has the column of persons, if one is declared."""
    unidentified_rows: int = 0
    """Rows without a value in the column of persons."""
    repeated_persons: int = 0
    """Persons with more rows than a person may have."""

    @property
    def fits(self) -> bool:
        """True if all rows so far are as declared."""
        is_found = not self.num_found and self.num_persons_columns == 1
        return is_found and all(each.fits for each in self.columns.values())

    def list_mistakes(self) -> list[str]:
        """Return what does not fit, in sentences without values."""
        mistakes = [
            f"the table has {f'{number} columns for' if number else 'no column'} {texts.quote(name)}"
            for name, number in self.num_found.items()
        ]
        if self.num_persons_columns != 1:
            mistakes.append(f"the table has the column of persons {self.num_persons_columns} times; expected it once")
        mistakes += [each.describe(name, self.declared[name]) for name, each in self.columns.items() if not each.fits]
        if self.unidentified_rows:
            rows = "1 row has" if self.unidentified_rows == 1 else f"{self.unidentified_rows:,} rows have"
            mistakes.append(f"{rows} no value in the column of persons")
        if self.repeated_persons:
            persons = "1 person has" if self.repeated_persons == 1 else f"{self.repeated_persons:,} persons have"
            mistakes.append(
                f"{persons} more than {texts.format_count(self.rows_per_person, 'row')}; expected at most that"
            )
        return mistakes


class SiteTable:
    """The rows of one site, with what their owner declares about the columns.

    `frame` is a data frame of pandas or polars, a table of pyarrow, a dictionary of arrays, the path of a file (`.csv`,
    `.parquet`, `.duckdb`), or a `TableSource`. `columns` is the dictionary of the table, as a `TableDictionary`, as
    columns by name, or as the path of a file; without it all columns may be read, as a procedure declares them.
    `person` is the column that identifies a person, for a dictionary that does not name it.

    Nothing of the table is read until a procedure asks for it, and nothing of it is kept. Messages of its errors have
    names of columns that were asked for, types and counts, and never values: they may leave the site.

    Raises `ProcedureError` for a dictionary or a kind of file that cannot be used, and `MissingExtraError`.
    """

    def __init__(self, frame: Frame, columns: Columns | None = None, person: str | None = None) -> None:
        self._source = open_source(frame)
        self._dictionary = None if columns is None else dictionary.load_dictionary(columns)
        self._person = person or (self._dictionary.person if self._dictionary else "")
        self._rows_per_person = self._dictionary.rows_per_person if self._dictionary else 1

    def check(self, columns: Mapping[str, Column]) -> None:
        """Raise `ProcedureError` unless columns are declared as in the dictionary. No row is read."""
        for name, column in columns.items():
            self._find(name, column)

    def read_batches(self, columns: Mapping[str, Column]) -> Iterator[dict[str, Array]]:
        """Yield the rows in batches of columns: numbers and days as floats, all others as places in their levels.

        Raises `ProcedureError` as `check` does, before a row is read, and at the end of the table if there are rows
        that do not fit, with their number.
        """
        yield from self._scan({name: self._find(name, column) for name, column in columns.items()}, columns)

    def read(self, name: str, column: Column | None = None) -> Array:
        """Return one column, as declared in the dictionary or here, or else as numbers without a range.

        Raises `ProcedureError` if there is no such column, or if it has rows that do not fit.
        """
        site = self._find(name, column)
        wanted = {} if column is None else {name: column}
        return np.concatenate([each[name] for each in self._scan({name: site}, wanted)])

    def count(self) -> TableCounts:
        """Return what the columns of the dictionary have, in counts, for the owner of the table.

        Raises `ProcedureError` if the table cannot be read, or has no dictionary.
        """
        if self._dictionary is None:
            raise ProcedureError("the table has no dictionary; expected declared columns")
        counts = TableCounts(self._dictionary.columns, self._rows_per_person)
        for _ in self._read_rows(counts):
            pass
        return counts

    def _find(self, name: str, column: Column | None) -> SiteColumn | None:
        """Return how a column is read."""
        if self._dictionary is None:
            return None if column is None else dictionary.adopt_column(column)
        site = self._dictionary.columns.get(name)
        if site is None:
            raise ProcedureError(f"the dictionary of the table has no column {texts.quote(name)}")
        if column is None:
            return site
        if differences := [*column.differences_from(site)]:
            raise ProcedureError(
                f"column {texts.quote(name)} is declared differently in the dictionary of the table: "
                f"{'; '.join(differences)}"
            )
        return dictionary.merge_columns(site, column)

    def _scan(
        self, sites: Mapping[str, SiteColumn | None], columns: Mapping[str, Column]
    ) -> Iterator[dict[str, Array]]:
        """Yield rows as long as all fit, and raise at the end if one does not."""
        counts = TableCounts(sites, self._rows_per_person)
        batches = self._read_rows(counts)
        if counts.fits:
            for batch in batches:
                if counts.fits:
                    yield {name: _align(array, sites[name], columns.get(name)) for name, array in batch.items()}
        if mistakes := counts.list_mistakes():
            raise ProcedureError("; ".join(mistakes))

    def _read_rows(self, counts: TableCounts) -> Iterator[dict[str, Array]]:
        """Find the columns at once, and return an iterator over all rows, which counts them."""
        sources = {name: (site.source if site else "") or name for name, site in counts.declared.items()}
        if (found := self._source.read_names()) is not None:
            counts.num_found = {name: number for name, each in sources.items() if (number := found.count(each)) != 1}
            counts.num_persons_columns = found.count(self._person) if self._person else 1
        counts.columns = {name: ColumnCounts() for name in sources if name not in counts.num_found}
        return self._read_columns({name: sources[name] for name in counts.columns}, counts)

    def _read_columns(self, sources: Mapping[str, str], counts: TableCounts) -> Iterator[dict[str, Array]]:
        person = self._person if counts.num_persons_columns == 1 else ""
        wanted = {*sources.values(), person} - {""}
        persons: list[npt.NDArray[np.int64]] = []
        batches = iter(self._source.read_batches(sorted(wanted)))
        first = next(batches, dict.fromkeys(wanted, ()))  # the columns of an empty table have their types, too
        for batch in itertools.chain([first], batches):
            arrays = {name: self._convert(batch[source], name, counts) for name, source in sources.items()}
            if person:
                persons.append(_hash_persons(batch[person], counts))
            sizes = {array.size for array in (*arrays.values(), *persons[-1:])}
            if len(sizes) > 1:
                raise ProcedureError("the columns of the table have different numbers of rows; expected the same")
            counts.rows += max(sizes, default=0)
            yield arrays
        if persons:
            _, repeats = np.unique(np.concatenate(persons), return_counts=True)
            counts.repeated_persons = int(np.count_nonzero(repeats > self._rows_per_person))

    def _convert(self, raw: Any, name: str, counts: TableCounts) -> Array:
        try:
            return values.convert(raw, counts.declared[name], counts.columns[name], is_text=self._source.is_text)
        except ProcedureError as exc:
            raise ProcedureError(f"column {texts.quote(name)}: {exc}") from exc


def _hash_persons(raw: Any, counts: TableCounts) -> npt.NDArray[np.int64]:
    """Return a number for each row that is the same for equal persons: memory for 8 bytes a row, not for the names."""
    names = [values.name_code(each) for each in values.to_array(raw).tolist()]
    hashes = np.fromiter(map(hash, names), np.int64, len(names))
    unidentified = [place for place, name in enumerate(names) if not isinstance(name, str)]
    counts.unidentified_rows += len(unidentified)
    hashes[unidentified] = [hash((counts.rows, place)) for place in unidentified]  # each is counted as one of its own
    return hashes


def _align(array: Array, site: SiteColumn | None, column: Column | None) -> Array:
    """Return places in a site's levels as places in a procedure's: only it may have a level for other values."""
    if isinstance(site, SiteCategories) and isinstance(column, CategoryColumn) and column.other and not site.other:
        return np.where(array == len(site.levels) - 1, len(column.levels) - 1, array)
    return array
