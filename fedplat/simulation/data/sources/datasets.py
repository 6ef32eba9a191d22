"""Well-known data sets: digits, MNIST, LEAF's folders, and Shakespeare's plays.

As in LEAF (Caldas et al. 2018, arXiv 1812.01097) an example is 80 characters of one speaker's lines and the next
character; the last part of each speaker's lines is held out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from fedplat.config.decoding import prepare_type
from fedplat.errors import DataError, MissingExtraError
from fedplat.simulation.data.federation import Array, Dataset, Part
from fedplat.simulation.data.sources import common
from fedplat.simulation.data.sources.common import Fraction, SourcePaths, find_data_file, hold_out, read_arrays


class Digits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="digits"):
    """Float32 images [n, 1, 8, 8] with pixels in [0, 1]; `test_fraction` of them are held out."""

    test_fraction: Fraction = 0.2

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `MissingExtraError` without scikit-learn."""
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as exc:
            raise MissingExtraError("the digits need scikit-learn; install it with: pip install scikit-learn") from exc
        pixels, labels = load_digits(return_X_y=True)
        images = (np.asarray(pixels) / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
        return hold_out(Dataset.from_arrays(images, np.asarray(labels, np.int64)), self.test_fraction, place.rng)


_MNIST_ARRAYS = (
    "It has the uint8 arrays x_train, y_train, x_test and y_test; Keras publishes it: "
    "curl -O https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
)
_MEAN, _DEVIATION = 0.1307, 0.3081  # of the training images' pixels in [0, 1]


class Mnist(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="mnist"):
    """The file `mnist.npz` of the data folder, as float32 images [n, 1, 28, 28].

    `scale` is "unit" for pixels in [0, 1], or "standard" for mean 0 and deviation 1.
    """

    scale: Literal["unit", "standard"] = "unit"

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError` if the file is missing."""
        names = ("x_train", "y_train", "x_test", "y_test")
        arrays = read_arrays(find_data_file(place.data, "mnist.npz", _MNIST_ARRAYS), names)
        train, test = self._images(arrays["x_train"]), self._images(arrays["x_test"])
        return Dataset(train, arrays["y_train"].astype(np.int64), test, arrays["y_test"].astype(np.int64))

    def _images(self, pixels: Array) -> Array:
        images = pixels[:, np.newaxis].astype(np.float32)
        images /= np.float32(255.0)
        if self.scale == "standard":
            images -= np.float32(_MEAN)
            images /= np.float32(_DEVIATION)
        return images


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


_SHAKESPEARE_TEXT = (
    "It has the text of the plays: a line with the speaker's name and a colon, the speech, an empty line."
)
_SPEECH = re.compile(r"^([^\n:]{1,60}):\n(.+?)(?=\n\n|\n*\Z)", re.MULTILINE | re.DOTALL)


class Shakespeare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="shakespeare"):
    """Inputs are uint8 codes [n, length] (see `common.CHARACTERS`), targets the next character's code as int64 [n].

    A new example begins every `stride` characters. Speakers with fewer than `min_examples` of them are left out.
    """

    length: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 80
    stride: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    min_examples: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 20
    test_fraction: Fraction = 0.2

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError` if the file is missing, or no speaker has `min_examples`."""
        path = find_data_file(place.data, "tinyshakespeare.txt", _SHAKESPEARE_TEXT)
        speeches: dict[str, list[str]] = {}
        for speaker, speech in _SPEECH.findall(path.read_text("utf-8")):
            speeches.setdefault(speaker, []).append(speech)
        train: list[tuple[Array, Array]] = []
        test: list[tuple[Array, Array]] = []
        names: list[str] = []
        for speaker in sorted(speeches):
            inputs, targets = self._examples("\n".join(speeches[speaker]))
            if len(inputs) < self.min_examples:
                continue
            names.append(speaker)
            kept = len(inputs) - round(self.test_fraction * len(inputs))
            train.append((inputs[:kept], targets[:kept]))
            # The first held-out example begins after the last training example has ended: they do not overlap.
            begin = min(len(inputs), kept + -(-self.length // self.stride))
            test.append((inputs[begin:], targets[begin:]))
        if not names:
            raise DataError(f"no speaker in {path} has {self.min_examples} examples of {self.length} characters")
        sizes = np.array([len(inputs) for inputs, _ in train])
        return Dataset(*_concatenate(train), *_concatenate(test), _owners(sizes), tuple(names))

    def _examples(self, lines: str) -> tuple[Array, Array]:
        characters = common.character_codes(lines)
        if len(characters) <= self.length:
            return characters[:0].reshape(0, self.length), characters[:0].astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(characters, self.length + 1)[:: self.stride]
        return windows[:, :-1], windows[:, -1].astype(np.int64)


def _concatenate(pairs: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([inputs for inputs, _ in pairs]), np.concatenate([targets for _, targets in pairs])


def _owners(sizes: Array) -> Part:
    return np.repeat(np.arange(len(sizes)), sizes).astype(np.int64)
