"""LEAF's folders: JSON files with the examples of each user (Caldas et al. 2018, arXiv 1812.01097)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedplat.config.decoding import prepare_type
from fedplat.errors import DataError
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources import common


class _User(msgspec.Struct):
    x: list[Any]
    y: list[Any]


class _File(msgspec.Struct):
    users: list[str]
    user_data: dict[str, _User]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="leaf"):
    """The files `path`/train/*.json and `path`/test/*.json; every user of the training files is an owner.

    Numbers become float32 inputs of the given `shape` ([]: unchanged), or int64 inputs with that `dtype`, and int64
    targets; with the type "auto" whole inputs have to be exact in float32. Texts become rows of character codes
    (`common.CHARACTERS`). Without a folder "test", `test_fraction` of the examples are held out.
    """

    path: str
    shape: list[int] = []
    dtype: common.InputType = "auto"
    test_fraction: common.Fraction = 0.2

    def load(self, place: common.SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`."""
        folder = place.folder / self.path
        train = self._split(folder / "train")
        test = self._split(folder / "test") if (folder / "test").is_dir() else None
        return common.make_dataset(train, test, (), place, self.test_fraction)

    def _split(self, folder: Path) -> common.Split:
        users = _users(folder, self.dtype)
        names = list(users)
        sizes = [len(targets) for _, targets, _ in users.values()]
        owners = np.repeat(np.arange(len(names)), sizes)
        starts = np.cumsum([0, *sizes])
        _require_equal(users)
        inputs = np.concatenate([pair[0] for pair in users.values()])
        targets = np.concatenate([pair[1] for pair in users.values()])

        def row(index: int) -> str:
            return users[names[owners[index]]][2](int(index - starts[owners[index]]))

        if targets.ndim == 2 and targets.shape[1] == 1:  # LEAF's next characters are texts of one character
            targets = targets[:, 0]
        try:
            inputs = inputs.reshape(-1, *self.shape) if self.shape else inputs
        except ValueError as exc:
            raise DataError(f"{folder}: shape = {self.shape} does not fit inputs of {list(inputs.shape)}") from exc
        return common.Split(inputs, common.as_whole(targets), row, owners=(owners.astype(np.int64), tuple(names)))


def _users(folder: Path, dtype: common.InputType) -> dict[str, tuple[Array, Array, common.Row]]:
    """Return the inputs and targets of each user with examples, and the function that names one of them."""
    paths = sorted(path for path in folder.glob("*.json") if not common.is_hidden(path.name))
    if not paths:
        raise DataError(f"{folder} has no .json files; expected LEAF's folders train and test")
    users: dict[str, tuple[Array, Array, common.Row]] = {}
    for path in paths:
        try:
            file = msgspec.json.decode(path.read_bytes(), type=prepare_type(_File))
        except (OSError, msgspec.MsgspecError) as exc:
            raise DataError(f"{path} is not a LEAF file: {exc}") from exc
        for name in file.users:
            user = file.user_data.pop(name, None)  # its lists need ten times the memory of the arrays
            if user is None or len(user.x) != len(user.y):
                raise DataError(f"{path}: the user {name!r} has different numbers of x and y; expected as many of each")
            if user.y:
                where = f"{path}, user {name!r}"
                users[name] = _inputs(user.x, dtype, where), _targets(user.y, where), common.rows_of(where)
    if not users:
        raise DataError(f"no user in {folder} has examples")
    return users


def _inputs(values: list[Any], dtype: common.InputType, where: str) -> Array:
    array = _array(values, where)
    if array.dtype == np.uint8:
        return array
    if dtype == "auto" and array.dtype.kind == "f":
        _refuse_long(values, array, common.rows_of(where))
    elif dtype == "auto":
        common.require_exact(array, common.rows_of(where), "x")
    return common.as_inputs(array, dtype="float32" if dtype == "auto" else dtype, row=common.rows_of(where))


def _refuse_long(values: list[Any], array: Array, row: common.Row) -> None:
    """Raise `DataError` for a whole number above int64, which NumPy makes a fraction if smaller ones are beside it."""
    for index in np.unique(np.argwhere(np.abs(array) >= 2.0**63)[:, 0]).tolist():
        for number in np.asarray(values[index], object).ravel().tolist():
            if isinstance(number, int) and number >= 2**63:
                raise DataError(f"{row(index)}: {common.describe_rounding(number, 'x')}")


def _targets(values: list[Any], where: str) -> Array:
    array = _array(values, where)
    return array if array.dtype == np.uint8 else array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)


def _array(values: list[Any], where: str) -> Array:
    """Return numbers as they are, or texts as rows of character codes."""
    try:
        if isinstance(values[0], str):
            return common.character_rows(values)
        array = np.asarray(values)
        return array if array.dtype.kind in "iuf" else array.astype(np.float32)
    except (ValueError, TypeError, AttributeError, DataError) as exc:
        raise DataError(f"{where}: expected values that are all numbers of one shape or all texts: {exc}") from exc


def _require_equal(users: dict[str, tuple[Array, Array, common.Row]]) -> None:
    """Raise `DataError` if the examples of two users have different shapes."""
    (inputs, targets, row), *others = users.values()
    for other_inputs, other_targets, other_row in others:
        for kind, one, other in (("x", inputs, other_inputs), ("y", targets, other_targets)):
            if one.shape[1:] != other.shape[1:] or (one.dtype == np.uint8) != (other.dtype == np.uint8):
                raise DataError(
                    f"{other_row(0)}: {kind} is {other.dtype}{list(other.shape[1:])}, and that of {row(0)} is "
                    f"{one.dtype}{list(one.shape[1:])}; expected values of one shape, all numbers or all texts"
                )
