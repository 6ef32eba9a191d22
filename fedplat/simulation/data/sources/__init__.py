"""Sources of examples, as `[simulation.data]` of a simulation file describes.

To add one: write a frozen record with `load()`, and add one row to `SOURCES` below. No source executes or unpickles a
file; only the source `function` runs code, the user's own. Only `huggingface` with a `name` downloads a data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from fedplat.config.plugins import Kind, define
from fedplat.simulation.data.federation import Dataset, Federation
from fedplat.simulation.data.sources.arrays import Function, Npy, Npz
from fedplat.simulation.data.sources.arrow import Packed
from fedplat.simulation.data.sources.common import SourcePaths, data_folder
from fedplat.simulation.data.sources.datasets import Digits, Leaf, Mnist, Shakespeare
from fedplat.simulation.data.sources.huggingface import HuggingFace
from fedplat.simulation.data.sources.images import Images
from fedplat.simulation.data.sources.tables import Csv, Parquet


@runtime_checkable
class DataSource(Protocol):
    """The `[simulation.data]` table: the options of a source, selected by the key `source`."""

    def load(self, place: SourcePaths) -> Dataset | Federation:
        """Read the data. Raises `DataError`."""
        ...


SOURCES: Mapping[str, type[DataSource]] = {
    "mnist": Mnist,
    "shakespeare": Shakespeare,
    "digits": Digits,
    "npz": Npz,
    "npy": Npy,
    "packed": Packed,
    "csv": Csv,
    "parquet": Parquet,
    "images": Images,
    "function": Function,
    "leaf": Leaf,
    "huggingface": HuggingFace,
}
"""The options record of each source, by its name in a simulation file."""

define(Kind("sources", "source", "a data source", DataSource, ("load",), SOURCES))

__all__ = [
    "SOURCES",
    "Csv",
    "DataSource",
    "Digits",
    "Function",
    "HuggingFace",
    "Images",
    "Leaf",
    "Mnist",
    "Npy",
    "Npz",
    "Packed",
    "Parquet",
    "Shakespeare",
    "SourcePaths",
    "data_folder",
]
