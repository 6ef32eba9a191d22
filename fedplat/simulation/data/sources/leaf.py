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

    Numbers become float32 inputs of the given `shape` ([]: unchanged) and int64 targets; texts become rows of character
    codes (`common.CHARACTERS`). Without a folder "test", `test_fraction` of the examples are held out.
    """

    path: str
    shape: list[int] = []
    test_fraction: common.Fraction = 0.2

    def load(self, place: common.SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`."""
        folder = place.folder / self.path
        train = self._split(folder / "train")
        test = self._split(folder / "test") if (folder / "test").is_dir() else None
        return common.make_dataset(train, test, (), place, self.test_fraction)

    def _split(self, folder: Path) -> common.Split:
        users = _users(folder)
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


def _users(folder: Path) -> dict[str, tuple[Array, Array, common.Row]]:
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
                users[name] = _array(user.x, np.float32, where), _array(user.y, np.int64, where), common.rows_of(where)
    if not users:
        raise DataError(f"no user in {folder} has examples")
    return users


def _array(values: list[Any], dtype: type[np.generic], where: str) -> Array:
    try:
        if isinstance(values[0], str):
            return common.character_rows(values)
        array = np.asarray(values)
        is_whole = np.issubdtype(array.dtype, np.integer) and dtype is np.int64
        return array.astype(dtype if is_whole or dtype is np.float32 else np.float32)
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
