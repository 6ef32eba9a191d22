"""Hugging Face `datasets` (extra "datasets") in local folders that `Dataset.save_to_disk` wrote."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from fedplat.errors import DataError, MissingExtraError
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources.paths import Fraction, SourcePaths, hold_out, number_owners


class HuggingFace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="huggingface"):
    """Columns of the splits of `path`, which is relative to the simulation file.

    `groups` names the column with the owner of each example. If the folder is a single data set without named splits,
    or has no `test_split`, `test_fraction` of the examples are held out. `scale` "unit" divides inputs by 255.
    """

    path: str
    inputs: str = "image"
    targets: str = "label"
    train_split: str = "train"
    test_split: str = "test"
    groups: str = ""
    test_fraction: Fraction = 0.2
    scale: Literal["none", "unit"] = "none"

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without `datasets`."""
        train, test = self._splits(place)
        inputs, targets = self._arrays(train)
        test_arrays = (inputs[:0], targets[:0]) if test is None else self._arrays(test)
        groups, names = number_owners(np.asarray(self._column(train, self.groups))) if self.groups else (None, ())
        dataset = Dataset(inputs, targets, *test_arrays, groups, names)
        return hold_out(dataset, self.test_fraction, place.rng)

    def _splits(self, place: SourcePaths) -> tuple[Any, Any | None]:
        try:
            import datasets
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                "Hugging Face data needs the package datasets; install it with: pip install 'fedplat[datasets]'"
            ) from exc
        path = place.folder / self.path
        try:
            loaded = datasets.load_from_disk(str(path))
        except (FileNotFoundError, ValueError) as exc:
            raise DataError(f"{path} is not a data set that datasets' save_to_disk wrote: {exc}") from exc
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded, None
        splits = {str(name): split for name, split in loaded.items()}
        if self.train_split not in splits:
            raise DataError(f"{path} has no split {self.train_split!r}; it has {', '.join(splits)}")
        return splits[self.train_split], splits.get(self.test_split)

    def _arrays(self, split: Any) -> tuple[Array, Array]:
        inputs = _array(self._column(split, self.inputs), self.inputs)
        targets = _array(self._column(split, self.targets), self.targets)
        if self.scale == "unit":
            inputs = inputs.astype(np.float32) / np.float32(255.0)
        elif inputs.dtype == np.float64:
            inputs = inputs.astype(np.float32)
        return inputs, targets.astype(np.int64) if np.issubdtype(targets.dtype, np.integer) else targets

    def _column(self, split: Any, name: str) -> Any:
        if name not in split.column_names:
            raise DataError(f"{self.path} has no column {name!r}; it has {', '.join(split.column_names)}")
        return split.with_format("numpy")[name][:]


def _array(column: Any, name: str) -> Array:
    """Return a column as one array, images as [n, channels, height, width]. Raises `DataError` without numbers."""
    array = np.asarray(column)
    if array.dtype == object or array.dtype.kind in "US":
        raise DataError(f"the column {name!r} does not hold numbers of one shape")
    if array.dtype == np.uint8 and array.ndim == 3:
        return array[:, np.newaxis]
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[-1] in (1, 3, 4):
        return np.moveaxis(array, -1, 1)
    return array
