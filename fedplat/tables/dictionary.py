"""The dictionary of a table: what its owner declares about the columns, in Python or in a file of TOML or JSON.

It is how an owner fits a table to the columns that procedures name: which column of the table each of them is, what
counts as missing or as true, and who a person is. Only declared columns can be read. No value is in it but those that
its owner has written there.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct

from fedplat import texts
from fedplat.config import toml
from fedplat.errors import JobFileError, ProcedureError
from fedplat.tables.columns import BooleanColumn, CategoryColumn, Column, DateColumn, NumericColumn

Marker = float | str
_MAX_FILE_BYTES = 4 * 2**20


class SiteNumbers(NumericColumn, frozen=True, tag="number", kw_only=True):
    """A column of numbers of a site's table."""

    source: str = ""
    """Name in the table; default: the same as here."""
    missing: tuple[Marker, ...] = ()
    """Values that stand for a missing one, such as `[-99, "NA"]`, besides empty fields, null and NaN."""


class SiteCategories(CategoryColumn, frozen=True, tag="category", kw_only=True):
    """A column of categories of a site's table."""

    source: str = ""
    """Name in the table; default: the same as here."""
    missing: tuple[Marker, ...] = ()
    """Values that stand for a missing one, such as `["unknown", 9]`, besides blank texts, null and NaN."""
    rename: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Categories by what the table has for them, such as `{ w = "f", m = "m" }`."""

    def __post_init__(self) -> None:
        CategoryColumn.__post_init__(self)
        if unknown := sorted({*self.rename.values()} - {*self.categories}):
            raise ValueError(f"rename: {texts.quote(unknown[0])} is not a category; expected one of categories")


class SiteTruthValues(BooleanColumn, frozen=True, tag="boolean", kw_only=True):
    """A column of truth values of a site's table."""

    source: str = ""
    """Name in the table; default: the same as here."""
    missing: tuple[Marker, ...] = ()
    """Values that stand for a missing one, such as `["unknown", 9]`, besides blank texts, null and NaN."""
    true: tuple[str, ...] = ("true",)
    """Words for true, in upper or lower case."""
    false: tuple[str, ...] = ("false",)
    """Words for false, in upper or lower case."""

    def __post_init__(self) -> None:
        if both := {each.lower() for each in self.true} & {each.lower() for each in self.false}:
            raise ValueError(f"true, false: both have {texts.quote(min(both))}; expected different words")


class SiteDates(DateColumn, frozen=True, tag="date", kw_only=True):
    """A column of days of a site's table."""

    source: str = ""
    """Name in the table; default: the same as here."""
    missing: tuple[Marker, ...] = ()
    """Values that stand for a missing one, such as `["1900-01-01"]`, besides blank texts and null."""


SiteColumn: TypeAlias = SiteNumbers | SiteCategories | SiteTruthValues | SiteDates
_KINDS: Mapping[type[Column], type[SiteColumn]] = {
    NumericColumn: SiteNumbers,
    CategoryColumn: SiteCategories,
    BooleanColumn: SiteTruthValues,
    DateColumn: SiteDates,
}


class TableDictionary(Struct, frozen=True, forbid_unknown_fields=True):
    """The declared columns of a site's table."""

    columns: dict[str, SiteColumn]
    """The columns by the names that procedures use."""
    person: Annotated[str, Meta(max_length=200)] = ""
    """Column of the table that identifies a person. With it, more rows of one person than declared are an error."""
    rows_per_person: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """Number of rows that a person may have at most."""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("columns: the table is empty; expected at least one column")


Columns: TypeAlias = TableDictionary | Mapping[str, Column | Mapping[str, Any]] | str | os.PathLike[str]
"""A dictionary, its columns as records or tables, or the file that has it."""


def load_dictionary(columns: Columns) -> TableDictionary:
    """Return a dictionary that was given as a record, as columns by name, or as a file (`.toml` or `.json`).

    Raises `ProcedureError` with all mistakes.
    """
    if isinstance(columns, TableDictionary):
        return columns
    if isinstance(columns, (str, os.PathLike)):
        path = Path(columns)
        return _read(_parse_file(path), f"the dictionary {path.name}")
    if not isinstance(cast(object, columns), Mapping):
        raise ProcedureError(
            f"columns are of the type {texts.name_type(columns)}; expected columns by their names, or a file .toml or "
            ".json"
        )
    tables = {str(name): _to_table(column) for name, column in columns.items()}
    return _read({"columns": tables}, "the declared columns")


def adopt_column(column: Column) -> SiteColumn:
    """Return a procedure's column as that of a table without a dictionary, which has the same names and values."""
    if isinstance(column, SiteColumn):
        return column
    return _KINDS[type(column)](**msgspec.structs.asdict(column))


def merge_columns(site: SiteColumn, column: Column) -> SiteColumn:
    """Return a site's column with the order of categories and the coarser resolution of a procedure's column.

    Except for these `column` has no differences from `site`.
    """
    if isinstance(site, SiteCategories) and isinstance(column, CategoryColumn):
        return msgspec.structs.replace(site, categories=column.categories)
    if isinstance(site, SiteDates) and isinstance(column, DateColumn):
        return msgspec.structs.replace(site, resolution_days=column.resolution_days)
    return site


def _to_table(column: object) -> Any:
    if isinstance(column, Struct):
        return toml.to_table(column)
    return dict(cast(Mapping[str, Any], column)) if isinstance(column, Mapping) else column


def _read(raw: Mapping[str, Any], what: str) -> TableDictionary:
    try:
        return toml.read_record(raw, TableDictionary)
    except JobFileError as exc:
        raise ProcedureError(f"{what} cannot be used:\n{exc}") from exc


def _parse_file(path: Path) -> Mapping[str, Any]:
    if path.suffix.lower() not in (".toml", ".json"):
        raise ProcedureError(f"the dictionary {path.name} is of no known form; expected a file .toml or .json")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ProcedureError(f"the dictionary {path.name} cannot be read: {exc.strerror}") from exc
    if len(content) > _MAX_FILE_BYTES:
        raise ProcedureError(f"the dictionary {path.name} is larger than {texts.size(_MAX_FILE_BYTES)}")
    try:
        text = content.decode("utf-8-sig")
        raw = msgspec.json.decode(text) if path.suffix.lower() == ".json" else toml.loads(text)
    except (ValueError, RecursionError, tomllib.TOMLDecodeError) as exc:
        raise ProcedureError(f"the dictionary {path.name} cannot be read: {exc}") from exc
    if not isinstance(raw, dict):
        raise ProcedureError(f"the dictionary {path.name} is no table; expected columns and their declarations")
    return cast(dict[str, Any], raw)
