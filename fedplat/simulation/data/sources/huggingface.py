"""Hugging Face `datasets` (extra "datasets"): local folders, and names on the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedplat.errors import DataError, MissingExtraError
from fedplat.extras import install_command
from fedplat.simulation.data.federation import Dataset
from fedplat.simulation.data.sources import arrow, common
from fedplat.simulation.data.sources.arrow import ColumnNames, Names
from fedplat.simulation.data.sources.images import Background, Channels, Size, decode


class HuggingFace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="huggingface"):
    """ColumnNames of the splits of a data set.

    `path` is a folder, relative to the simulation file: one that `save_to_disk` wrote, or one of files that
    `load_dataset` reads. `name` is a data set on the Hugging Face Hub, with a `config` and a `revision` if it has
    several; it is downloaded into the cache of `datasets`. `groups` names the column with the owner of each example.
    Without `test_split`, `test_fraction` of the examples are held out. A column of images is converted to `channels`
    (1: gray, 3: RGB, 0: those of the first image) and `size` ([height, width]), like those of `Images`. `scale` "unit"
    divides inputs by 255 (images by the largest pixel of their format). `inputs`, `targets` and `classes` are those of
    `TableOptions`.
    """

    path: str = ""
    inputs: Names = "image"
    targets: Names = "label"
    train_split: str = "train"
    test_split: str = "test"
    groups: str = ""
    test_fraction: common.Fraction = 0.2
    scale: common.Scale = "none"
    name: str = ""
    config: str = ""
    revision: str = ""
    channels: Channels = 0
    size: Size | None = None
    classes: list[str] = []
    dtype: common.InputType = "auto"
    background: Background = ""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.name):
            raise ValueError("path and name: expected either the path of a folder or a name on the Hugging Face Hub")

    def load(self, place: common.SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without `datasets`."""
        train, test = self._splits(place)
        where = self.name or self.path
        groups = [self.groups] if self.groups else []
        columns = ColumnNames(self.inputs, self.targets, list(dict.fromkeys([*groups, *place.columns])))
        columns = arrow.choose(columns, train.column_names, where)
        found = self._split(train, columns, f"{where}, {self.train_split}")
        others = {name: found.columns[name] for name in place.columns}
        owners = common.number_owners(found.columns[self.groups]) if self.groups else None
        found = dataclasses.replace(found, columns=others, owners=owners)
        held_out = None
        if test is not None:
            columns = arrow.choose(dataclasses.replace(columns, others=()), test.column_names, where)
            held_out = self._split(test, columns, f"{where}, {self.test_split}")
        dataset = common.make_dataset(found, held_out, self.classes, place, self.test_fraction)
        return dataclasses.replace(dataset, classes=dataset.classes or _class_names(train, self.targets))

    def _splits(self, place: common.SourcePaths) -> tuple[Any, Any | None]:
        try:
            import datasets
            from datasets.exceptions import DatasetsError
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                f"Hugging Face data needs the package datasets; install it with: {install_command('datasets')}"
            ) from exc
        where = self.name or str(place.folder / self.path)
        try:
            loaded = self._load(datasets, place.folder / self.path)
        except (OSError, ValueError, LookupError, RuntimeError, DatasetsError) as exc:
            expected = "a data set of the Hugging Face Hub" if self.name else "a folder with a data set"
            raise DataError(f"{where} cannot be loaded as {expected}: {_reason(exc)}") from exc
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded, None
        splits = {str(name): split for name, split in loaded.items()}
        if self.train_split not in splits:
            raise DataError(f"{where} has no split {self.train_split!r}; it has {', '.join(splits)}")
        if self.test_split not in (*splits, "", "test"):
            raise DataError(f"{where} has no split {self.test_split!r}; it has {', '.join(splits)}")
        return splits[self.train_split], splits.get(self.test_split)

    def _load(self, datasets: Any, folder: Path) -> Any:
        if self.name:
            return datasets.load_dataset(self.name, self.config or None, revision=self.revision or None)
        if not folder.is_dir():
            raise FileNotFoundError("there is no such folder")
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(str(folder))

    def _split(self, split: Any, columns: ColumnNames, where: str) -> common.Split:
        import datasets

        row, names = common.rows_of(where), arrow.as_list(columns.inputs)
        if not isinstance(split.features[names[0]], datasets.Image):
            table = split.select_columns(columns.names).with_format("arrow")[:]
            found = arrow.split_of(table, columns, row, dtype=self.dtype)
            _require_labels(found, bool(_class_names(split, self.targets)))
            inputs = common.as_inputs(found.inputs, self.scale, self.dtype, row)
            return dataclasses.replace(found, inputs=inputs, targets=common.as_column(found.targets))
        if len(names) > 1:
            raise DataError(f"{where}: inputs = {names}: expected one column of images")
        others = [name for name in columns.names if name != names[0]]
        table = split.select_columns(others).with_format("arrow")[:]
        found = arrow.split_of(table, dataclasses.replace(columns, inputs=[]), row)
        _require_labels(found, bool(_class_names(split, self.targets)))
        images = split.select_columns(names).cast_column(names[0], datasets.Image(decode=False)).with_format(None)
        files = (_file(example[names[0]], row(index)) for index, example in enumerate(images))
        pixels = decode(files, len(images), row, self)
        return dataclasses.replace(found, inputs=pixels, targets=common.as_column(found.targets))


def _file(image: Mapping[str, Any] | None, row: str) -> Any:
    """Return an encoded image as a path or an open file. Raises `DataError` if it is missing."""
    if image is None or (image["bytes"] is None and image["path"] is None):
        raise DataError(f"{row}: there is no image; {common.FILL_IN}")
    return image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])


def _class_names(split: Any, targets: Names) -> tuple[str, ...]:
    """Return the names of a column of class labels, whose values are numbers already."""
    import datasets

    feature = split.features[targets] if isinstance(targets, str) else None
    return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else ()


def _require_labels(split: common.Split, has_names: bool) -> None:
    """Raise `DataError` if a class label is -1, which stands for a label that is not published."""
    if has_names and len(missing := np.flatnonzero(split.targets < 0)):
        raise DataError(f"{split.row(int(missing[0]))}: there is no label (-1); use another split")


def _reason(exc: Exception) -> str:
    """Return the first line of an error, or of its cause: `datasets` wraps what reading a file raises."""
    cause = exc.__cause__ or exc
    return next(iter(str(cause).splitlines()), type(cause).__name__)
