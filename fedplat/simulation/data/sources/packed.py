"""Folders that `fedplat data pack` wrote (extra "tables")."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.packed import ColumnType, PackedReader
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources import common

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
