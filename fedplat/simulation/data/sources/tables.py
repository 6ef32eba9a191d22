"""Tables in files: Parquet and CSV, read by PyArrow (extra "tables")."""

from __future__ import annotations

import csv
import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from fedplat.errors import DataError, MissingExtraError
from fedplat.simulation.data.federation import Dataset
from fedplat.simulation.data.sources import arrow
from fedplat.simulation.data.sources.arrow import ColumnNames, Names
from fedplat.simulation.data.sources.conversion import (
    InputType,
    Scale,
    Split,
    as_inputs,
    make_dataset,
    rows_of,
    rows_of_files,
)
from fedplat.simulation.data.sources.paths import Fraction, SourcePaths

FILE = "file"
"""The column with the name of the file that has the example, without its suffix, unless the table has such a column."""


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of tables in files.

    `path` is relative to the simulation file: a file, a folder, or a name with wildcards. `inputs` and `targets` are
    names of columns, with wildcards. Texts in `targets` become classes, sorted or in the order of `classes`. Without
    `test_path`, `test_fraction` of the examples are held out. `scale` "unit" divides inputs by 255.
    """

    path: str
    inputs: Names
    targets: Names
    test_path: str = ""
    test_fraction: Fraction = 0.2
    classes: list[str] = []
    scale: Scale = "none"
    dtype: InputType = "auto"


class TableFormat(Protocol):
    """A format of files with tables."""

    @property
    def suffix(self) -> str:
        """The suffix of such files in a folder."""
        ...

    def names(self, path: Path) -> list[str]:
        """Return the names of the columns."""
        ...

    def read(self, path: Path, columns: Sequence[str]) -> Any:
        """Return some columns as a `pyarrow.Table`."""
        ...


class ParquetFormat:
    """Parquet files."""

    suffix = ".parquet"

    def names(self, path: Path) -> list[str]:
        """Return the names of the columns."""
        import pyarrow.parquet as pq

        return pq.read_schema(path).names

    def read(self, path: Path, columns: Sequence[str]) -> Any:
        """Return some columns as a table."""
        import pyarrow.parquet as pq

        return pq.ParquetFile(path).read(columns=list(columns))


class CsvFormat:
    """CSV files whose first line has the names of the columns."""

    suffix = ".csv"

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter

    def names(self, path: Path) -> list[str]:
        """Return the names of the columns."""
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file, delimiter=self._delimiter), [])

    def read(self, path: Path, columns: Sequence[str]) -> Any:
        """Return some columns as a table. Types are inferred; an empty field is a missing value."""
        from pyarrow import csv as arrow_csv

        return arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(use_threads=False),  # errors then name the row
            parse_options=arrow_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(include_columns=list(columns), strings_can_be_null=True),
        )


class Parquet(TableOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="parquet"):
    """ColumnNames of Parquet files; see `TableOptions`."""

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without PyArrow."""
        return load(self, ParquetFormat(), place)


class Csv(TableOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="csv"):
    """ColumnNames of CSV files whose first line has their names; see `TableOptions`."""

    delimiter: str = ","

    def __post_init__(self) -> None:
        if len(self.delimiter.encode()) != 1:
            raise ValueError(f"delimiter = {self.delimiter!r}: expected one ASCII character, such as ';' or '\\t'")

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without PyArrow."""
        return load(self, CsvFormat(self.delimiter), place)


def load(options: TableOptions, format_: TableFormat, place: SourcePaths) -> Dataset:
    """Load the examples in files of a format. Raises `DataError`, and `MissingExtraError` without PyArrow."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            "Parquet and CSV files need the package pyarrow; install it with: pip install 'fedplat[tables]'"
        ) from exc
    del pa
    files = _files(place.folder, options.path, format_.suffix)
    columns = _choose(ColumnNames(options.inputs, options.targets, place.columns), format_, files[0])
    columns = dataclasses.replace(columns, others=place.columns)
    train, test = _split(options, format_, files, columns), None
    if options.test_path:
        files = _files(place.folder, options.test_path, format_.suffix)
        test = _split(options, format_, files, dataclasses.replace(columns, others=()))
    return make_dataset(train, test, options.classes, place, options.test_fraction)


def _split(options: TableOptions, format_: TableFormat, files: Sequence[Path], columns: ColumnNames) -> Split:
    """Read files one after the other, and only the columns that are needed."""
    parts = [_read(format_, file, columns) for file in files]
    row = rows_of_files(files, [len(part.targets) for part in parts])
    whole = _merge(files, parts) if len(parts) > 1 else parts[0]
    return dataclasses.replace(whole, inputs=as_inputs(whole.inputs, options.scale, options.dtype, row), row=row)


def _files(folder: Path, path: str, suffix: str) -> list[Path]:
    """Return the files of a path, sorted. Raises `DataError` if there is no file."""
    place = folder / path
    if place.is_file():
        return [place]
    pattern = str(place / f"*{suffix}") if place.is_dir() else str(place)
    found = sorted(Path(name) for name in glob.glob(pattern) if Path(name).is_file())
    if not found:
        raise DataError(f"there is no file {pattern}; expected a file, a folder of {suffix} files, or wildcards")
    return found


def _choose(columns: ColumnNames, format_: TableFormat, file: Path) -> ColumnNames:
    """Return the columns of a file to read, with all names in place of wildcards. Raises `DataError`."""
    import pyarrow as pa

    try:
        names = format_.names(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as exc:
        raise DataError(f"{file} cannot be read as a {format_.suffix} file: {exc}") from exc
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{file} has two columns {twice[0]!r}; expected a name for each column")
    others = [name for name in columns.others if name != FILE or FILE in names]
    return arrow.choose(dataclasses.replace(columns, others=others), names, file)


def _read(format_: TableFormat, file: Path, columns: ColumnNames) -> Split:
    import pyarrow as pa

    names = _choose(columns, format_, file).names
    try:
        table = format_.read(file, names)
    except (pa.ArrowException, OSError) as exc:
        raise DataError(f"{file} cannot be read as a {format_.suffix} file: {exc}") from exc
    if len(table) == 0:
        raise DataError(f"{file} has no rows; expected at least one example")
    if FILE in columns.others and FILE not in table.column_names:
        table = table.append_column(FILE, pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int8), [file.stem]))
    return arrow.split_of(table, columns, rows_of(file))


def _merge(files: Sequence[Path], parts: Sequence[Split]) -> Split:
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        is_text = part.targets.dtype.kind == "U"
        if part.inputs.shape[1:] != first.inputs.shape[1:] or is_text != (first.targets.dtype.kind == "U"):
            raise DataError(
                f"{file} has inputs of shape {list(part.inputs.shape[1:])} and targets {part.targets.dtype}, and "
                f"{files[0]} has {list(first.inputs.shape[1:])} and {first.targets.dtype}; expected equal files"
            )
    return Split(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        first.row,
        {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns},
    )
