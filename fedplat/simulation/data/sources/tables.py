"""Tables in files: Parquet and CSV, read by PyArrow (extra "tables")."""

from __future__ import annotations

import csv
import dataclasses
import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from fedplat.errors import DataError, MissingExtraError
from fedplat.extras import install_command
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources import arrow, common
from fedplat.simulation.data.sources.arrow import ColumnNames, Names

_LARGEST = 2.0**63
"""The first float above the numbers of int64."""
_WHOLE = re.compile(r"[+-]?\d+")
_PADDED = re.compile(r"[+-]?0[0-9xX]")
"""Whole numbers, and those that are written as codes are: 007, 0x1F."""
FILE = "file"
"""The column with the name of the file that has the example, unless the table has such a column: see `name_files`."""


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
    test_fraction: common.Fraction = 0.2
    classes: list[str] = []
    scale: common.Scale = "none"
    dtype: common.InputType = "auto"


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

    def read_texts(self, path: Path, columns: Sequence[str]) -> Any | None:
        """Return some columns as they are written, if the file has no types: an empty field is a missing value."""
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

    def read_texts(self, path: Path, columns: Sequence[str]) -> None:
        """Return None: the columns have types."""


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
        """Return some columns as a table. Types are inferred; an empty field, or NA, is a missing value."""
        return self._read(path, include_columns=list(columns))

    def read_texts(self, path: Path, columns: Sequence[str]) -> Any | None:
        """Return some columns as texts: 007 and 7 are different ids, and NA is the name of a country."""
        import pyarrow as pa

        types = dict.fromkeys(columns, pa.string())
        return self._read(path, include_columns=list(columns), column_types=types, null_values=[""])

    def _read(self, path: Path, **options: Any) -> Any:
        from pyarrow import csv as arrow_csv

        return arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(use_threads=False),  # errors then name the row
            parse_options=arrow_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(strings_can_be_null=True, **options),
        )


class Parquet(TableOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="parquet"):
    """ColumnNames of Parquet files; see `TableOptions`."""

    def load(self, place: common.SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without PyArrow."""
        return load(self, ParquetFormat(), place)


class Csv(TableOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="csv"):
    """ColumnNames of CSV files whose first line has their names; see `TableOptions`."""

    delimiter: str = ","

    def __post_init__(self) -> None:
        if len(self.delimiter.encode()) != 1:
            raise ValueError(f"delimiter = {self.delimiter!r}: expected one ASCII character, such as ';' or '\\t'")

    def load(self, place: common.SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without PyArrow."""
        return load(self, CsvFormat(self.delimiter), place)


def load(options: TableOptions, format_: TableFormat, place: common.SourcePaths) -> Dataset:
    """Load the examples in files of a format. Raises `DataError`, and `MissingExtraError` without PyArrow."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            f"Parquet and CSV files need the package pyarrow; install it with: {install_command('tables')}"
        ) from exc
    del pa
    files = _files(place.folder, options.path, format_.suffix)
    columns = _choose(ColumnNames(options.inputs, options.targets, place.columns), format_, files[0])
    columns = dataclasses.replace(columns, others=place.columns)
    names, tests = common.name_files(files), list[_Part]()
    parts = [_read(format_, file, columns, options, names[file]) for file in files]
    if options.test_path:
        files = _files(place.folder, options.test_path, format_.suffix)
        without = dataclasses.replace(columns, others=())
        tests = [_read(format_, file, without, options) for file in files]
    _unify_targets([*parts, *tests], columns.targets)
    if not options.classes:
        _refuse_lost_differences([*parts, *tests], columns.targets)
    train, test = _merge(options, parts), _merge(options, tests) if tests else None
    return common.make_dataset(train, test, options.classes, place, options.test_fraction)


@dataclasses.dataclass
class _Part:
    """The examples of a file; `texts` are its targets as they are written, if the file has no types."""

    file: Path
    split: common.Split
    texts: Array | None


def _files(folder: Path, path: str, suffix: str) -> list[Path]:
    """Return the files of a path, sorted. Raises `DataError` if there is no file."""
    place = folder / path
    if place.is_file():
        return [place]
    pattern = str(place / "*") if place.is_dir() else str(place)
    found = sorted(file for file in map(Path, glob.glob(pattern)) if file.is_file())
    found = [
        file for file in found if not any(part not in place.parts and common.is_hidden(part) for part in file.parts)
    ]
    if place.is_dir():
        found = [file for file in found if file.suffix.lower() == suffix]
    if not found:
        raise DataError(f"there is no file in {place}; expected a file, a folder of {suffix} files, or wildcards")
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


def _read(format_: TableFormat, file: Path, columns: ColumnNames, options: TableOptions, file_name: str = "") -> _Part:
    """Read the columns of a file that are needed. Texts that are all among the classes need no other type."""
    import pyarrow as pa

    names = _choose(columns, format_, file).names
    others = [name for name in columns.others if name != FILE or FILE in names]
    target = [columns.targets] if isinstance(columns.targets, str) else []
    try:
        table = format_.read(file, names)
        written = format_.read_texts(file, list(dict.fromkeys([*others, *target]))) if others or target else None
    except (pa.ArrowException, OSError) as exc:
        raise DataError(f"{file} cannot be read as a {format_.suffix} file: {exc}") from exc
    if len(table) == 0:
        raise DataError(f"{file} has no rows; expected at least one example")
    row, texts = common.rows_of(file), None
    if options.dtype == "auto":
        _refuse_long_inputs(format_, file, table, arrow.as_list(columns.inputs))
    if FILE in columns.others and FILE not in table.column_names:
        table = table.append_column(FILE, pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int8), [file_name]))
    if written is not None and target:
        texts = written.column(target[0])
        if options.classes and set(texts.unique().to_pylist()) <= set(options.classes):
            table = table.set_column(table.column_names.index(target[0]), target[0], texts)
        _refuse_missing(table.column(target[0]), texts, row, target[0])
    split = arrow.split_of(table, columns, row, written, dtype=options.dtype)
    return _Part(file, split, None if texts is None or texts.null_count else arrow.values(texts, row, target[0]))


def _refuse_missing(column: Any, texts: Any, row: common.Row, name: str) -> None:
    """Raise `DataError` for a target such as NA, which stands for a missing value unless it is the name of a class."""
    missing = np.flatnonzero(np.asarray(column.is_null()) & ~np.asarray(texts.is_null()))
    if len(missing):
        first = int(missing[0])
        raise DataError(
            f"{row(first)}: {texts[first].as_py()!r} in column {name!r} stands for a missing value; "
            f"{common.FILL_IN}, or name it among all classes: classes = [...]"
        )


def _unify_targets(parts: Sequence[_Part], column: Names) -> None:
    """Give the targets of all files one type, in place: texts if some are, whole numbers if all are, else fractions.

    Raises `DataError` for texts in one file with types and numbers in another.
    """
    kinds = {part.split.targets.dtype.kind: part for part in parts}
    if not isinstance(column, str) or kinds.keys() == {"U"}:
        return
    if "U" in kinds:
        for part in parts:
            if part.split.targets.dtype.kind != "U" and part.texts is None:
                raise DataError(
                    f"{part.file} has {part.split.targets.dtype} in column {column!r}, and {kinds['U'].file} texts; "
                    "expected one type in all files"
                )
            if part.texts is not None:
                part.split = dataclasses.replace(part.split, targets=part.texts)
        return
    are_whole = len(kinds) > 1 and all(_is_whole(part.split.targets) for part in parts)
    for part in parts:
        targets = part.split.targets
        if are_whole:
            targets = targets.astype(np.int64)
        elif "f" in kinds:
            targets = common.as_column(targets.astype(np.float64))
        part.split = dataclasses.replace(part.split, targets=targets)


def _refuse_lost_differences(parts: Sequence[_Part], column: Names) -> None:
    """Raise `DataError` for targets that differ as they are written, and would be one class or number: 007 and 7."""
    if not isinstance(column, str) or parts[0].split.targets.dtype.kind == "U":
        return
    first: dict[float, str] = {}
    for part in parts:
        targets = part.split.targets
        if part.texts is None or (targets.dtype.kind == "f" and np.abs(targets).max() < _LARGEST):
            continue  # the file has types, or these are quantities
        texts, rows = np.unique(part.texts, return_index=True)
        for text, row in zip((text.strip() for text in texts.tolist()), rows.tolist(), strict=True):
            where = f"{part.split.row(row)}: {text!r} in column {column!r}"
            if _WHOLE.fullmatch(text) and not -_LARGEST <= int(text) < _LARGEST:
                raise DataError(
                    f"{where} is no whole number of 64 bits, and would be rounded; name all classes: classes = [...], "
                    "or write a quantity with a decimal point or an exponent"
                )
            known = first.setdefault(int(targets[row]), text) if targets.dtype.kind == "i" else text
            if known != text and (_PADDED.match(known) or _PADDED.match(text)):
                raise DataError(
                    f"{where} would be the same class as {known!r}; name all classes, which are texts then: "
                    "classes = [...], or write equal ones in the same way"
                )


def _refuse_long_inputs(format_: TableFormat, file: Path, table: Any, names: Sequence[str]) -> None:
    """Raise `DataError` for a whole number of more than 64 bits, which is a fraction to a file without types."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = {name: table.column(name).type for name in names}
    floats = [name for name, kind in kinds.items() if pa.types.is_floating(kind)]
    bounds = {name: pc.call_function("min_max", [table.column(name)]).as_py() for name in floats}
    large = [name for name, found in bounds.items() if any(abs(each or 0.0) >= _LARGEST for each in found.values())]
    written = format_.read_texts(file, large) if large else None
    if written is None:
        return
    for name in large:
        for index, text in enumerate(written.column(name).to_pylist()):
            if _WHOLE.fullmatch((text or "").strip()) and not -_LARGEST <= int(text) < _LARGEST:
                raise DataError(f"{common.rows_of(file)(index)}: {arrow.describe_rounding(text, name)}")


def _is_whole(values: Array) -> bool:
    return values.dtype.kind != "f" or bool(((np.floor(values) == values) & (np.abs(values) < _LARGEST)).all())


def _merge(options: TableOptions, parts: Sequence[_Part]) -> common.Split:
    """Join the examples of files. Raises `DataError` for inputs of different shapes."""
    splits, files = [part.split for part in parts], [part.file for part in parts]
    first = splits[0]
    for file, split in zip(files, splits, strict=True):
        if split.inputs.shape[1:] != first.inputs.shape[1:]:
            raise DataError(
                f"{file} has inputs of shape {list(split.inputs.shape[1:])}, and {files[0]} has "
                f"{list(first.inputs.shape[1:])}; expected equal files"
            )
    row = common.rows_of_files(files, [len(split.targets) for split in splits])
    inputs = np.concatenate([split.inputs for split in splits])
    columns = {name: _join([split.columns[name] for split in splits]) for name in first.columns}
    targets = np.concatenate([split.targets for split in splits])
    return common.Split(common.as_inputs(inputs, options.scale, options.dtype, row), targets, row, columns)


def _join(columns: Sequence[Array]) -> Array:
    """Join the values of a partition. If files have them in different types, they are texts: an id is no quantity."""
    if len({column.dtype.kind for column in columns}) == 1:
        return np.concatenate(columns)
    return np.concatenate([_as_texts(column) for column in columns])


def _as_texts(column: Array) -> Array:
    """Return texts; a whole number has no decimals, in whatever type a file stores it."""
    if column.dtype.kind == "f" and _is_whole(column):
        return np.array([f"{value:.0f}" for value in column.tolist()])
    return column.astype(np.str_)
