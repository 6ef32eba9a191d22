"""Tables in files: CSV, Parquet and DuckDB, read in pieces, so that memory holds some rows rather than the file."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

from fedplat import texts
from fedplat.errors import MissingExtraError, ProcedureError
from fedplat.extras import install_command
from fedplat.tables.sources import Batch, ColumnFrame, FrameSource, TableSource

_BATCH_ROWS = 65_536

AnyPath: TypeAlias = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class CsvFile:
    """A file of text with a line for each row, and the names of the columns in its first line."""

    path: AnyPath
    delimiter: str = ","
    encoding: str = "utf-8"
    is_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise ProcedureError(f"the delimiter is {texts.quote(self.delimiter)}; expected one character, such as ;")
        try:
            "".encode(self.encoding)
        except LookupError as exc:
            shown = texts.quote(self.encoding)
            raise ProcedureError(f"the encoding {shown} is unknown; expected such as utf-8 or latin-1") from exc

    def read_names(self) -> list[str]:
        """Return the names in the first line."""
        with self._open() as rows:
            return _read_header(rows)

    def read_batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield the rows in pieces; a blank line is skipped."""
        with self._open() as rows:
            header = _read_header(rows)
            places = [header.index(name) for name in names]
            columns: list[list[str]] = [[] for _ in names]
            for row in rows:
                if len(row) != len(header):
                    if not row:
                        continue
                    raise ProcedureError(
                        f"line {rows.line_num:,} of the file has {texts.format_count(len(row), 'field')}; expected "
                        f"{len(header)}, as in the first line"
                    )
                for column, place in zip(columns, places, strict=True):
                    column.append(row[place])
                if columns and len(columns[0]) == _BATCH_ROWS:
                    yield dict(zip(names, columns, strict=True))
                    columns = [[] for _ in names]
            yield dict(zip(names, columns, strict=True))

    @contextlib.contextmanager
    def _open(self) -> Generator[Any]:
        # Spreadsheets write a byte order mark, which would be a part of the first name.
        encoding = "utf-8-sig" if self.encoding.lower() in ("utf-8", "utf8") else self.encoding
        try:
            with _translate_errors(csv.Error), open(self.path, encoding=encoding, newline="") as file:
                yield csv.reader(file, delimiter=self.delimiter, strict=True)
        except UnicodeError as exc:
            raise ProcedureError(f"the file has bytes that are not {self.encoding}; expected another encoding") from exc


def _read_header(rows: Iterator[list[str]]) -> list[str]:
    header = next(rows, None)
    if not header:
        raise ProcedureError("the file has no names of columns; expected them in its first line")
    return header


@dataclasses.dataclass(frozen=True)
class ParquetFile:
    """A file in the format Parquet. Requires the extra `tables`."""

    path: AnyPath
    is_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require("pyarrow", "tables", "a Parquet file")

    def read_names(self) -> list[str]:
        """Return the names of the columns."""
        with self._open() as file:
            return list(file.schema_arrow.names)

    def read_batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield the rows in pieces."""
        with self._open() as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=[*names]):
                yield {name: batch.column(name) for name in names}

    @contextlib.contextmanager
    def _open(self) -> Generator[Any]:
        import pyarrow
        from pyarrow import parquet

        with _translate_errors(pyarrow.ArrowException), parquet.ParquetFile(Path(self.path)) as file:
            yield file


@dataclasses.dataclass(frozen=True)
class DuckDBTable:
    """A table of a DuckDB database, or the rows of a query in SQL; without either the only table of the database.

    The database is opened to be read only. Requires the extra `duckdb`.
    """

    path: AnyPath
    table: str = ""
    query: str = ""
    is_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.table and self.query:
            raise ProcedureError("both a table and a query are given; expected one of them")
        _require("duckdb", "duckdb", "a DuckDB database")

    def read_names(self) -> list[str]:
        """Return the names of the columns."""
        with self._open() as database:
            return [each[0] for each in database.execute(f"SELECT * FROM {self._find(database)} LIMIT 0").description]

    def read_batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield the rows in pieces."""
        with self._open() as database:
            shown = ", ".join(map(_quote_name, names))
            database.execute(f"SELECT {shown} FROM {self._find(database)}")
            while rows := database.fetchmany(_BATCH_ROWS):
                yield {name: [row[place] for row in rows] for place, name in enumerate(names)}

    def _find(self, database: Any) -> str:
        """Return the rows in SQL."""
        if self.query:
            return f"({self.query.strip().rstrip(';')})"
        if self.table:
            return ".".join(map(_quote_name, self.table.split(".")))
        found = database.execute("SELECT schema_name, table_name FROM duckdb_tables() WHERE NOT internal").fetchall()
        if len(found) != 1:
            number = texts.format_count(len(found), "table")
            raise ProcedureError(f"the database has {number}; expected one, or the name of a table, or a query")
        return ".".join(map(_quote_name, found[0]))

    @contextlib.contextmanager
    def _open(self) -> Generator[Any]:
        import duckdb

        with _translate_errors(duckdb.Error):
            options: Any = {"autoinstall_known_extensions": "false"}  # nothing is downloaded for a query
            with duckdb.connect(str(self.path), read_only=True, config=options) as database:
                yield database


Frame: TypeAlias = ColumnFrame | TableSource | AnyPath
"""What a table can be: columns in memory, a source, or the path of a file."""
_SUFFIXES: Mapping[str, type[CsvFile | ParquetFile | DuckDBTable]] = {
    ".csv": CsvFile,
    ".parquet": ParquetFile,
    ".duckdb": DuckDBTable,
}


def open_source(frame: Frame) -> TableSource:
    """Return the source of a frame or a file, of which nothing is read yet.

    Raises `ProcedureError` for a file of an unknown form, and `MissingExtraError` without the package that reads it.
    """
    if isinstance(frame, (str, os.PathLike)):
        suffix = Path(frame).suffix
        if (kind := _SUFFIXES.get(suffix.lower())) is None:
            raise ProcedureError(
                f"the table is a file {texts.quote(suffix)}; expected {', '.join(_SUFFIXES)}, or a data frame"
            )
        return kind(frame)
    is_source = all(hasattr(type(frame), name) for name in ("read_names", "read_batches"))
    return cast(TableSource, frame) if is_source else FrameSource(cast(ColumnFrame, frame))


@contextlib.contextmanager
def _translate_errors(*kinds: type[Exception]) -> Generator[None]:
    """Raise `ProcedureError` for errors of a library, whose texts may have paths and values."""
    try:
        yield
    except (OSError, *kinds) as exc:
        why = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else texts.name_type(exc)
        raise ProcedureError(f"the file of the table cannot be read ({why})") from exc


def _require(package: str, extra: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"{what} needs {package}; install it with: {install_command(extra)}")


def _quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
