"""What sources share: their folders, and the conversion of values to inputs and targets."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError
from fedplat.simulation.data.federation import FILL_IN, Array, Dataset, Part

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


Scale = Literal["none", "unit"]
InputType = Literal["auto", "float32", "int64"]
EXACT_INPUTS = (
    '; expected whole numbers that it holds exactly: use dtype = "int64" for ids and tokens, or dtype = "float32" for '
    "quantities that may be rounded"
)
EXACT_TARGETS = (
    ", as several targets are; expected whole numbers that it holds exactly: name one target to keep classes and ids, "
    "or write quantities with a decimal point"
)
Row = Callable[[int], str]
"""A function that names an example, such as "people.csv, row 7", by its index."""


def rows_of(name: object) -> Row:
    """Return the function that names rows of one file or array, counted from 1."""
    return lambda index: f"{name}, row {index + 1}"


def rows_of_files(files: Sequence[object], sizes: Sequence[int]) -> Row:
    """Return the function that names an example of several files by its file and its row there, counted from 1."""
    ends = list(itertools.accumulate(sizes))

    def row(index: int) -> str:
        file = bisect.bisect_right(ends, index)
        return f"{files[file]}, row {index - (ends[file] - sizes[file]) + 1}"

    return row


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Examples as a source reads them, before texts are mapped to classes: the training data or the test data.

    `row` names an example in errors. `columns` are values for the partition, by name; `owners` the number of each
    example's owner, and the owners' names.
    """

    inputs: Array
    targets: Array
    row: Row
    columns: dict[str, Array] = dataclasses.field(default_factory=dict[str, Array])
    owners: Owners | None = None


def class_names(targets: Array, named: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes: those that were `named`, or else the sorted texts; numbers have no names."""
    return tuple(named) if named or targets.dtype.kind != "U" else tuple(np.unique(targets).tolist())


def encode(split: Split, names: Sequence[str]) -> Array:
    """Return the targets as int64 positions in `names`; without names, whole numbers as int64 and others unchanged.

    Raises `DataError` if a target is not one of the names, or has no room in 64 bits.
    """
    if not names:
        if split.targets.dtype == np.uint64 and len(wrong := np.argwhere(split.targets > np.uint64(2**63 - 1))):
            value = split.targets[tuple(wrong[0])]
            raise DataError(f"{split.row(int(wrong[0][0]))}: the target {value} has more than 63 bits; expected a text")
        return as_whole(split.targets)
    order = np.argsort(names)
    in_order, texts = np.array(names)[order], split.targets.astype(np.str_)
    found = np.minimum(np.searchsorted(in_order, texts), len(names) - 1)
    if len(wrong := np.flatnonzero(in_order[found] != texts)):
        known = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
        raise DataError(
            f"{split.row(int(wrong[0]))}: the target is {str(texts[wrong[0]])!r}, which is not one of the classes "
            f"{known}; name all classes in their order: classes = [...]"
        )
    return order[found].astype(np.int64)


def as_whole(values: Array) -> Array:
    """Convert booleans and integers of any width to int64, which losses require; return other values unchanged."""
    return values.astype(np.int64, copy=False) if values.dtype.kind in "iub" else values


def as_column(targets: Array) -> Array:
    """Return a single target of fractions as float32 [n, 1], like several; others, which may be classes, unchanged."""
    return targets.astype(np.float32)[:, None] if targets.dtype.kind == "f" and targets.ndim == 1 else targets


def as_inputs(values: Array, scale: Scale = "none", dtype: InputType = "auto", row: Row = str) -> Array:
    """Return inputs of a type, divided by 255 with the scale "unit". The type "auto" converts float64 to float32.

    Raises `DataError` if the type "int64" would lose fractions, or has no room for a number.
    """
    if dtype == "int64":
        with np.errstate(invalid="ignore"):  # what is too large is refused
            whole = values.astype(np.int64, copy=False)
        if values.dtype.kind in "fu" and len(wrong := np.argwhere((whole != values) | ((whole < 0) & (values > 0)))):
            raise DataError(
                f"{row(wrong[0][0])}: {values[tuple(wrong[0])]} is not a whole number of 64 bits; use another dtype"
            )
        return whole
    if scale == "none" and dtype == "auto" and values.dtype.kind != "f":
        return values
    inputs = values.astype(np.float32, copy=scale == "unit")
    if scale == "unit":
        inputs /= np.float32(255.0)
    return inputs


def require_exact(whole: Array, row: Row, what: str, advice: str = EXACT_INPUTS) -> None:
    """Raise `DataError` for the first row with a whole number that float32 rounds: an id would become another one."""
    with np.errstate(invalid="ignore"):  # what is rounded up to no number of this type differs, too
        wrong = np.argwhere(whole.astype(np.float32).astype(whole.dtype) != whole)
    if len(wrong):
        raise DataError(f"{row(int(wrong[0][0]))}: {describe_rounding(whole[tuple(wrong[0])], what, advice)}")


def describe_rounding(number: object, what: str, advice: str = EXACT_INPUTS) -> str:
    """Return what to do about a whole number that float32 cannot hold."""
    return f"{number} in {what} would be rounded to float32{advice}"


def require_finite(values: Array, row: Row, what: str) -> None:
    """Raise `DataError` for the first row with a value that is NaN or infinite."""
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        position = np.argwhere(~finite)[0]
        missing = "a missing value (NaN)" if np.isnan(values[tuple(position)]) else "an infinite value"
        raise DataError(f"{row(int(position[0]))}: {missing} in {what}; {FILL_IN}")


def make_dataset(train: Split, test: Split | None, classes: Sequence[str], place: SourcePaths, share: float) -> Dataset:
    """Return the data set of what a source read. Without test data, the share of the examples is held out.

    Texts in targets become classes. Raises `DataError` for missing values, and for parts that do not fit.
    """
    for split in _present(train, test):
        require_finite(split.inputs, split.row, "inputs")
        require_finite(split.targets, split.row, "targets")
    if test is not None and test.inputs.shape[1:] != train.inputs.shape[1:]:
        raise DataError(
            f"{test.row(0)}: inputs have shape {list(test.inputs.shape[1:])}, and those of {train.row(0)} "
            f"{list(train.inputs.shape[1:])}; expected equal shapes in training and test data"
        )
    names = class_names(train.targets, classes)
    targets = encode(train, names)
    held_out = (train.inputs[:0], targets[:0]) if test is None else (test.inputs, encode(test, names))
    groups, owners = train.owners or (None, ())
    try:
        dataset = Dataset(train.inputs, targets, *held_out, groups, owners, train.columns, names)
    except ValueError as exc:
        raise DataError(f"{train.row(0).partition(', row ')[0]}: {exc}") from exc
    return hold_out(dataset, share, place.rng)


def _present(*splits: Split | None) -> Iterable[Split]:
    return (split for split in splits if split is not None)


CHARACTERS = "\x00 \n!\"$&'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz|{}>\ufffd"
"""LEAF's alphabet and the newline; the first character is padding, the last stands for all other characters."""
_OTHER = len(CHARACTERS) - 1
_CODES = np.full(0x110000, _OTHER, np.uint8)
for _code, _character in enumerate(CHARACTERS):
    _CODES[ord(_character)] = _code


def character_codes(text: str) -> npt.NDArray[np.uint8]:
    """Return the index of each character in `CHARACTERS`."""
    return _CODES[np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)]


def character_rows(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Encode texts of one length as rows of codes. Raises `DataError` if their lengths differ."""
    lengths = {len(text) for text in texts}
    if len(lengths) > 1:
        raise DataError(f"texts have {min(lengths)} to {max(lengths)} characters; expected all of one length")
    return character_codes("".join(texts)).reshape(len(texts), -1)
