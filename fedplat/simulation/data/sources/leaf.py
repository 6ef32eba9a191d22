"""LEAF's folders: JSON files with the examples of each user (Caldas et al. 2018, arXiv 1812.01097)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources import text
from fedplat.simulation.data.sources.paths import Fraction, SourcePaths, hold_out


class _User(msgspec.Struct):
    x: list[Any]
    y: list[Any]


class _File(msgspec.Struct):
    users: list[str]
    user_data: dict[str, _User]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="leaf"):
    """The files `path`/train/*.json and `path`/test/*.json; every user of the training files is an owner.

    Numbers become float32 inputs of the given `shape` ([]: unchanged) and int64 targets; texts become rows of character
    codes (`text.CHARACTERS`). Without a folder "test", `test_fraction` of the examples are held out.
    """

    path: str
    shape: list[int] = []
    test_fraction: Fraction = 0.2

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`."""
        folder = place.folder / self.path
        users = _users(folder / "train")
        inputs, targets = self._arrays(list(users.values()))
        test_inputs, test_targets = inputs[:0], targets[:0]
        if (folder / "test").is_dir():
            test_inputs, test_targets = self._arrays(list(_users(folder / "test").values()))
        groups = np.repeat(np.arange(len(users)), [len(user.y) for user in users.values()]).astype(np.int64)
        dataset = Dataset(inputs, targets, test_inputs, test_targets, groups, tuple(users))
        return hold_out(dataset, self.test_fraction, place.rng)

    def _arrays(self, users: Sequence[_User]) -> tuple[Array, Array]:
        inputs = _array([example for user in users for example in user.x], np.float32)
        targets = _array([target for user in users for target in user.y], np.int64)
        if targets.ndim == 2 and targets.shape[1] == 1:  # LEAF's next characters are texts of one character
            targets = targets[:, 0]
        targets = targets.astype(np.int64) if np.issubdtype(targets.dtype, np.integer) else targets
        try:
            return (inputs.reshape(-1, *self.shape) if self.shape else inputs), targets
        except ValueError as exc:
            raise DataError(f"shape = {self.shape} does not fit inputs of shape {list(inputs.shape)}") from exc


def _users(folder: Path) -> dict[str, _User]:
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise DataError(f"{folder} has no .json files; expected LEAF's folders train and test")
    users: dict[str, _User] = {}
    for path in paths:
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.MsgspecError) as exc:
            raise DataError(f"{path} is not a LEAF file: {exc}") from exc
        for name in file.users:
            if name not in file.user_data or len(file.user_data[name].x) != len(file.user_data[name].y):
                raise DataError(f"{path}: the user {name!r} has different numbers of x and y; expected as many of each")
            if file.user_data[name].y:
                users[name] = file.user_data[name]
    if not users:
        raise DataError(f"no user in {folder} has examples")
    return users


def _array(values: list[Any], dtype: type[np.generic]) -> Array:
    try:
        if isinstance(values[0], str):
            return text.code_rows(values)
        array = np.asarray(values)
        is_whole = np.issubdtype(array.dtype, np.integer) and dtype is np.int64
        return array.astype(dtype if is_whole or dtype is np.float32 else np.float32)
    except (ValueError, TypeError) as exc:
        raise DataError(f"expected values that are all numbers of one shape or all texts: {exc}") from exc
