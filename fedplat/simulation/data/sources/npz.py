"""Any `.npz` file of plain arrays."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources.paths import Fraction, SourcePaths, hold_out, number_owners, read_arrays


class Npz(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="npz"):
    """Arrays of the file `path`, which is relative to the simulation file.

    `groups` names an array with the owner of each example, for the scheme "natural". With `test_inputs` = "",
    `test_fraction` of the examples are held out. `scale` "unit" divides inputs by 255 and converts them to float32.
    """

    path: str
    inputs: str = "x_train"
    targets: str = "y_train"
    test_inputs: str = "x_test"
    test_targets: str = "y_test"
    groups: str = ""
    test_fraction: Fraction = 0.2
    scale: Literal["none", "unit"] = "none"

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`."""
        test_names = (self.test_inputs, self.test_targets) if self.test_inputs else ()
        names = [self.inputs, self.targets, *test_names, *([self.groups] if self.groups else [])]
        path = place.folder / self.path
        arrays = read_arrays(path, names)
        inputs, targets = self._scale(arrays[self.inputs]), _labels(arrays[self.targets])
        test_inputs, test_targets = inputs[:0], targets[:0]
        if self.test_inputs:
            test_inputs, test_targets = self._scale(arrays[self.test_inputs]), _labels(arrays[self.test_targets])
        groups, group_names = number_owners(arrays[self.groups]) if self.groups else (None, ())
        try:
            dataset = Dataset(inputs, targets, test_inputs, test_targets, groups, group_names)
        except ValueError as exc:
            raise DataError(f"{path}: {exc}") from exc
        return hold_out(dataset, self.test_fraction, place.rng)

    def _scale(self, inputs: Array) -> Array:
        return inputs.astype(np.float32) / np.float32(255.0) if self.scale == "unit" else inputs


def _labels(targets: Array) -> Array:
    """Convert integers of any width to int64, which losses require; returns other targets unchanged."""
    return targets.astype(np.int64) if np.issubdtype(targets.dtype, np.integer) else targets
