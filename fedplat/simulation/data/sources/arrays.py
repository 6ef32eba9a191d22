"""NumPy arrays: from files (`.npz`, `.npy`), or from the user's own function."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from fedplat import errors, randomness
from fedplat.config import user_code
from fedplat.simulation.data.federation import Array, Dataset, Federation, check_finite
from fedplat.simulation.data.sources.common import (
    Fraction,
    Scale,
    SourcePaths,
    Split,
    as_inputs,
    make_dataset,
    number_owners,
    read_array,
    read_arrays,
    rows_of,
)


class Npz(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="npz"):
    """Arrays of the file `path`, which is relative to the simulation file.

    `groups` names an array with the owner of each example, for the scheme "natural". With `test_inputs` = "",
    `test_fraction` of the examples are held out. `scale` "unit" divides inputs by 255 and converts them to float32.
    Texts in `targets` become classes, sorted or in the order of `classes`.
    """

    path: str
    inputs: str = "x_train"
    targets: str = "y_train"
    test_inputs: str = "x_test"
    test_targets: str = "y_test"
    groups: str = ""
    test_fraction: Fraction = 0.2
    scale: Scale = "none"
    classes: list[str] = []

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`."""
        test_names = (self.test_inputs, self.test_targets) if self.test_inputs else ()
        names = [self.inputs, self.targets, *test_names, *([self.groups] if self.groups else []), *place.columns]
        path = place.folder / self.path
        arrays = read_arrays(path, list(dict.fromkeys(names)))
        inputs = as_inputs(arrays[self.inputs], self.scale)
        row = rows_of(f"{path}: {self.inputs}")
        columns = {name: arrays[name] for name in place.columns}
        train = Split(
            inputs, arrays[self.targets], row, columns, number_owners(arrays[self.groups]) if self.groups else None
        )
        test = None
        if self.test_inputs:
            test_inputs = as_inputs(arrays[self.test_inputs], self.scale)
            test = Split(test_inputs, arrays[self.test_targets], rows_of(f"{path}: {self.test_inputs}"))
        return make_dataset(train, test, self.classes, place, self.test_fraction)


class Npy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="npy"):
    """The `.npy` files `inputs` and `targets`, which are relative to the simulation file.

    Without `test_inputs` and `test_targets`, `test_fraction` of the examples are held out. The column of a partition is
    a file, too. `scale` and `classes` are those of `npz`.
    """

    inputs: str
    targets: str
    test_inputs: str = ""
    test_targets: str = ""
    test_fraction: Fraction = 0.2
    scale: Scale = "none"
    classes: list[str] = []

    def __post_init__(self) -> None:
        if bool(self.test_inputs) != bool(self.test_targets):
            raise ValueError("test_inputs and test_targets: expected both files, or neither")

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`."""
        columns = {name: read_array(place.folder / name) for name in place.columns}
        train = self._split(place.folder / self.inputs, place.folder / self.targets, columns)
        test = None
        if self.test_inputs:
            test = self._split(place.folder / self.test_inputs, place.folder / self.test_targets, {})
        return make_dataset(train, test, self.classes, place, self.test_fraction)

    def _split(self, inputs: Path, targets: Path, columns: dict[str, Array]) -> Split:
        return Split(as_inputs(read_array(inputs), self.scale), read_array(targets), rows_of(inputs), columns)


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="function"):
    """The user's function `call`, "module:function" relative to the simulation file, with keyword `arguments`.

    It returns a `Federation` (without a table `[simulation.partition]`), a `Dataset`, or NumPy arrays
    `(inputs, targets)` or `(inputs, targets, test_inputs, test_targets)`.
    """

    call: user_code.Reference
    arguments: dict[str, bool | int | float | str] = {}

    def load(self, place: SourcePaths) -> Dataset | Federation:
        """Call the function. Raises `DataError` for a wrong result, `UserCodeError` if it is not found or fails."""
        with randomness.use_seeds(0):  # all runs have the same data, also if the function draws it
            data = user_code.call(self.call, place.folder, self.arguments)
        if isinstance(data, Dataset | Federation):
            check_finite(data)
            return data
        arrays = cast(tuple[Any, ...], data)
        if isinstance(data, tuple) and len(arrays) in (2, 4) and all(hasattr(item, "__len__") for item in arrays):
            try:
                return Dataset.from_arrays(arrays[0], arrays[1], (arrays[2], arrays[3]) if len(arrays) == 4 else None)
            except ValueError as exc:
                raise errors.DataError(f"{self.call} returned arrays that do not fit: {exc}") from exc
        raise errors.DataError(
            f"{self.call} returned a {type(data).__name__}; expected a Federation, a Dataset, or a tuple of two or "
            "four NumPy arrays (inputs, targets, test_inputs, test_targets)"
        )
