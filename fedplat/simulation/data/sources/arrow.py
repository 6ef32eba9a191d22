"""Columns of Arrow tables as NumPy arrays, and folders that `fedplat data pack` wrote (extra "tables")."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.packed import ColumnType, PackedReader
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources import common

Names = str | list[str]
"""One column, or several; a name may have the wildcards *, ? and [...]."""


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnNames:
    """The columns of a table that are needed: `inputs` and `targets`, and `others` for the partition."""

    inputs: Names
    targets: Names
    others: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """All names, each once."""
        return list(dict.fromkeys([*as_list(self.inputs), *as_list(self.targets), *self.others]))


def as_list(names: Names) -> list[str]:
    """Return the names of columns as a list."""
    return [names] if isinstance(names, str) else names


def choose(columns: ColumnNames, available: Sequence[str], where: object) -> ColumnNames:
    """Return the columns with all names in place of wildcards, which only stand for those that are not named elsewhere.

    Raises `DataError` if there is no column for a name.
    """
    targets = columns.targets
    if isinstance(targets, list):
        targets = _expand(targets, available, columns.others, where)
    taken = [*as_list(targets), *columns.others]
    for name in taken:
        _require(name, available, where)
    return ColumnNames(_expand(as_list(columns.inputs), available, taken, where), targets, columns.others)


def _expand(names: list[str], available: Sequence[str], taken: Sequence[str], where: object) -> list[str]:
    expanded: dict[str, None] = {}
    for pattern in names:
        free = [name for name in available if name not in taken and fnmatchcase(name, pattern)]
        if pattern in available or not free:
            _require(pattern, available, where)
            free = [pattern]
        expanded.update(dict.fromkeys(free))
    if not expanded:
        raise DataError(f"{where}: no columns are named; expected some of {listing(available)}")
    return list(expanded)


def _require(name: str, available: Sequence[str], where: object) -> None:
    if name not in available:
        raise DataError(f"{where} has no column {name!r}; it has {listing(available)}")


def listing(names: Sequence[str]) -> str:
    """Return names for an error, at most twenty."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def split_of(
    table: Any, columns: ColumnNames, row: common.Row, written: Any | None = None, *, dtype: common.InputType = "auto"
) -> common.Split:
    """Return inputs, targets and other columns of a table.

    A single column of lists has its own shape; columns of numbers are stacked to float32 [n, columns], or int64 [n,
    columns] with that `dtype`, since float32 has no room for an id or a token above 16,777,216: with "auto" whole
    numbers have to be exact. Several targets are float32 [n, targets]; a single one is [n], of the type in the table.
    Other columns are those of `written`, a table of texts, if it has them.
    """
    names = as_list(columns.inputs)
    if len(names) == 1 and _is_list(table.column(names[0]).type):
        inputs = numbers(table.column(names[0]), row, names[0])
    else:
        if dtype == "auto":
            _require_exact(table, names, row, common.EXACT_INPUTS)
        inputs = (_stack_whole if dtype == "int64" else _stack)(table, names, row)
    if isinstance(columns.targets, str):
        targets = values(table.column(columns.targets), row, columns.targets)
    else:
        _require_exact(table, columns.targets, row, common.EXACT_TARGETS)
        targets = _stack(table, columns.targets, row)
    tables = [table] if written is None else [written, table]
    others = {name: next(each.column(name) for each in tables if name in each.column_names) for name in columns.others}
    return common.Split(inputs, targets, row, {name: values(column, row, name) for name, column in others.items()})


def numbers(column: Any, row: common.Row, name: str) -> Array:
    """Return numbers, or lists of numbers of one shape, as an array [n, ...]. Raises `DataError`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    _require_all(column, row, name)
    kind = getattr(column.type, "storage_type", column.type)
    if kind != column.type:  # an extension type, such as an array of Hugging Face's datasets
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind)
    if _is_list(kind):
        lengths = np.asarray(pc.call_function("list_value_length", [column]))
        if len(other := np.flatnonzero(lengths != lengths[:1])):
            raise DataError(
                f"{row(int(other[0]))}: the list in column {name!r} has {lengths[other[0]]} entries, and that of "
                f"{row(0)} has {lengths[0]}; expected lists of one length: cut or pad them"
            )
        length = int(lengths[0]) if len(lengths) else 0
        inner = numbers(pc.call_function("list_flatten", [column]), lambda index: row(index // length), name)
        return inner.reshape(len(column), length, *inner.shape[1:])
    if pa.types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.to_numpy()
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy()
    text = _first_text(column)
    found = f"{row(text[0])}: {text[1]!r} in column {name!r} is not a number" if text else f"column {name!r} is {kind}"
    raise DataError(f"{found}; expected numbers, or lists of numbers of one shape: correct it, or leave the column out")


def values(column: Any, row: common.Row, name: str) -> Array:
    """Return a value of each row: numbers, or texts (also for dates and the like). Raises `DataError`."""
    import pyarrow as pa

    _require_all(column, row, name)
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        found = numbers(column, row, name)
        if found.dtype.kind == "f":
            _require_finite(found, row, name)
        return found
    try:
        coded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    except pa.ArrowException as exc:
        raise DataError(f"column {name!r} is {kind}; expected numbers or texts: {exc}") from exc
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    texts = np.array(coded.dictionary.to_pylist() or [""])
    return texts[coded.indices.to_numpy()]


def _stack_whole(table: Any, names: Sequence[str], row: common.Row) -> Array:
    """Return columns of whole numbers as int64, each exact. Raises `DataError` for other numbers."""
    parts: list[Array] = []
    for name in names:
        found = numbers(table.column(name), row, name)
        if found.dtype.kind == "f":
            _require_finite(found, row, name)
        parts.append(common.as_inputs(found, dtype="int64", row=row))
    return np.stack(parts, axis=1)


def _require_exact(table: Any, names: Sequence[str], row: common.Row, advice: str) -> None:
    """Raise `DataError` for the first whole number that float32 rounds."""
    import pyarrow as pa

    for name in names:
        column = table.column(name)
        if not column.null_count and pa.types.is_integer(column.type):
            common.require_exact(column.to_numpy(), row, f"column {name!r}", advice)


def _stack(table: Any, names: Sequence[str], row: common.Row) -> Array:
    stacked = np.empty((len(table), len(names)), np.float32)
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, which is refused
        for position, name in enumerate(names):
            if _is_list(table.column(name).type):
                raise DataError(
                    f"column {name!r} has lists, and there are {len(names)} columns; expected one column of lists, or "
                    "columns of numbers"
                )
            stacked[:, position] = numbers(table.column(name), row, name)
            _require_finite(stacked[:, position], row, name)
    return stacked


def _require_finite(column: Array, row: common.Row, name: str) -> None:
    if len(missing := np.flatnonzero(~np.isfinite(column))):
        raise DataError(f"{row(int(missing[0]))}: {column[missing[0]]} in column {name!r}; {common.FILL_IN}")


def _require_all(column: Any, row: common.Row, name: str) -> None:
    """Raise `DataError` for the first null."""
    if column.null_count:
        first = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise DataError(f"{row(first)}: there is no value in column {name!r}; {common.FILL_IN}")


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    kind = getattr(kind, "storage_type", kind)
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _first_text(column: Any) -> tuple[int, str] | None:
    """Return the first text that is not a number, with its row."""
    import pyarrow as pa

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return None
    for index, text in enumerate(column.to_pylist()):
        try:
            float(text)
        except ValueError:
            return index, text[:40]
    return None


FOLDER = "folder"
"""The column with the name of the folder that has the example."""
_ROWS_AT_ONCE = 4096


class Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="packed"):
    """Packed data, which is read into memory.

    `path` is relative to the simulation file: a folder, or a name with wildcards. Without `test_path`, `test_fraction`
    of the examples are held out. The column of a partition is "folder", or an `.npy` file with a value per example.
    `scale` "unit" divides inputs by 255.
    """

    path: str
    test_path: str = ""
    test_fraction: common.Fraction = 0.2
    scale: common.Scale = "none"

    def load(self, place: common.SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without PyArrow."""
        train = self._split(place.folder, self.path, place.columns)
        test = self._split(place.folder, self.test_path, ()) if self.test_path else None
        return common.make_dataset(train, test, (), place, self.test_fraction)

    def _split(self, folder: Path, path: str, columns: Sequence[str]) -> common.Split:
        folders = _find_folders(folder, path)
        readers = [PackedReader(found) for found in folders]
        inputs, targets = _read_all(readers)
        sizes = [len(reader) for reader in readers]
        others = {
            name: _folder_names(folders, sizes) if name == FOLDER else common.read_array(folder / name)
            for name in columns
        }
        return common.Split(common.as_inputs(inputs, self.scale), targets, common.rows_of_files(folders, sizes), others)


def _find_folders(folder: Path, path: str) -> list[Path]:
    """Return the folders of a path, sorted. Raises `DataError` if no folder matches."""
    place = folder / path
    if place.is_dir():
        return [place]
    found = sorted(Path(name) for name in glob.glob(str(place)) if Path(name).is_dir())
    if not found:
        raise DataError(f"there is no folder {place}; expected one that fedplat data pack wrote, or wildcards")
    return found


def _read_all(readers: Sequence[PackedReader]) -> tuple[Array, Array]:
    """Return all inputs and targets. Raises `DataError` if the folders have different columns, or memory is short."""
    first = readers[0].index
    for reader in readers:
        index = reader.index
        if (index.inputs, index.targets) != (first.inputs, first.targets):
            raise DataError(
                f"{reader.folder} has inputs {index.inputs} and targets {index.targets}, and {readers[0].folder} has "
                f"{first.inputs} and {first.targets}; expected equal folders"
            )
    rows = sum(map(len, readers))
    inputs, targets = (_allocate(readers[0].folder, rows, column) for column in (first.inputs, first.targets))
    done = 0
    for reader in readers:
        for start in range(0, len(reader), _ROWS_AT_ONCE):
            some = reader.read(range(start, min(start + _ROWS_AT_ONCE, len(reader))))
            part = slice(done, done + len(some[0]))
            inputs[part], targets[part] = some
            done = part.stop
    return inputs, targets


def _allocate(folder: Path, rows: int, column: ColumnType) -> Array:
    try:
        return np.empty((rows, *column.shape), column.numpy_type)
    except (MemoryError, ValueError) as exc:  # a hostile index may promise more than an array can have
        raise DataError(
            f"{folder}: {rows:,} examples of {column.row_bytes:,} bytes do not fit into memory; a simulation reads all "
            "of them: pack fewer"
        ) from exc


def _folder_names(folders: Sequence[Path], sizes: Sequence[int]) -> Array:
    names = [found.name for found in folders]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"there are two folders named {twice!r}; expected different names, which are those of clients")
    return np.repeat(np.array(names), sizes)
