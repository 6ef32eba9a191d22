"""The folders of sources, and functions that sources share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Array, Dataset, Part

Fraction = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Owners = tuple[Part, tuple[str, ...]]
"""The number of each example's owner, and the owners' names."""
FOLDER_VARIABLE = "FEDPLAT_DATA"
_HIDDEN = frozenset(
    {"@eaDir", "@Recycle", "@Recently-Snapshot", "#recycle", "#snapshot", "$RECYCLE.BIN", "System Volume Information"}
    | {"__MACOSX", "lost+found"}
)
"""Folders that operating systems and storage appliances create."""
DEFAULT_FOLDER = Path("../shared/data")


@dataclasses.dataclass(frozen=True)
class SourcePaths:
    """The folders of the simulation file (`folder`) and of well-known data sets (`data`).

    `rng` draws the examples that are held out. `columns` are those that the partition reads, for `Dataset.columns`.
    """

    folder: Path
    data: Path
    rng: np.random.Generator
    columns: tuple[str, ...] = ()


def data_folder() -> Path:
    """Return the folder of well-known data sets: `FEDPLAT_DATA`, or `../shared/data`."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)


def find_data_file(data: Path, name: str, how_to_get: str) -> Path:
    """Return the path of a file in the data folder. Raises `DataError`, with `how_to_get`, if it is missing."""
    path = data / name
    if not path.is_file():
        raise DataError(
            f"{name} is not in {data.absolute()}; set {FOLDER_VARIABLE} to the folder that has it. {how_to_get}"
        )
    return path


def is_hidden(name: str) -> bool:
    """Return whether a file or folder belongs to a tool and not to the data: .ipynb_checkpoints, @eaDir, __MACOSX."""
    return name.startswith(".") or name in _HIDDEN


def name_files(files: Sequence[Path]) -> dict[Path, str]:
    """Return names that differ: those of the files without suffix, else their paths below the folder of all."""
    folder = Path(os.path.commonpath([file.parent for file in files]))
    below = [file.relative_to(folder) for file in files]
    for names in ([file.stem for file in files], [file.with_suffix("").as_posix() for file in below]):
        if len(set(names)) == len(files):
            return dict(zip(files, names, strict=True))
    return dict(zip(files, (file.as_posix() for file in below), strict=True))


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Read the named arrays of an `.npz` file, without unpickling. Raises `DataError` if one cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                raise DataError(f"{path} has no array {', '.join(missing)}; it has {', '.join(file) or 'none'}")
            return {name: file[name] for name in names}
    except (OSError, ValueError, EOFError) as exc:  # no file, not a zip file, or an array of Python objects
        raise DataError(f"{path} cannot be read as an .npz file of plain arrays: {exc}") from exc


def read_array(path: Path) -> Array:
    """Read an `.npy` file, without unpickling. Raises `DataError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise DataError(f"{path} cannot be read as an .npy file of a plain array: {exc}") from exc
    if array.ndim == 0:
        raise DataError(f"{path} has a single number; expected an array with a row for each example")
    return array


def hold_out(dataset: Dataset, fraction: float, rng: np.random.Generator) -> Dataset:
    """Move a random part of the examples to the test data, unless there is test data or `fraction` is 0."""
    count = round(fraction * len(dataset.inputs))
    if len(dataset.test_inputs) or not count:
        return dataset
    order = rng.permutation(len(dataset.inputs))
    test, rest = np.sort(order[:count]), np.sort(order[count:])
    groups: Part | None = None if dataset.groups is None else dataset.groups[rest]
    return dataclasses.replace(
        dataset,
        inputs=dataset.inputs[rest],
        targets=dataset.targets[rest],
        test_inputs=dataset.inputs[test],
        test_targets=dataset.targets[test],
        groups=groups,
        columns={name: values[rest] for name, values in dataset.columns.items()},
    )


def number_owners(owners: Array) -> Owners:
    """Return the number of each example's owner, and the owners' names."""
    names, groups = np.unique(owners, return_inverse=True)
    return groups.astype(np.int64), tuple(str(name) for name in names)
