"""Partitioners: they assign examples to clients, as `[simulation.partition]` of a simulation file describes.

Each assigns every example to at most one client, and returns the same parts for the same generator.
`docs/contributing.md` has the steps to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from fedplat.config.plugins import Kind, by_name, define
from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition
from fedplat.simulation.data.partitioners.fedprox import FedProx
from fedplat.simulation.data.partitioners.hsu import Hsu
from fedplat.simulation.data.partitioners.iid import Iid, Shards
from fedplat.simulation.data.partitioners.natural import Column, Natural
from fedplat.simulation.data.partitioners.niid_bench import Classes, Dirichlet, Quantity


@runtime_checkable
class Partition(Protocol):
    """The `[simulation.partition]` table: the options of a partitioner, selected by the key `scheme`.

    `seed` replaces the seed of the simulation for the partition; None: it does not. A partition that reads columns of
    the data, `dataset.columns`, has their names in an attribute `columns`; sources read no others.
    """

    @property
    def seed(self) -> int | None:
        """The seed of the partition."""
        ...

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client, as indices of the data set."""
        ...


PARTITIONS: Mapping[str, type[Partition]] = by_name(
    Iid, Shards, Dirichlet, Hsu, Quantity, Classes, FedProx, Natural, Column
)
"""The options record of each built-in partitioner, by its name in a simulation file."""

define(Kind("partitions", "scheme", "a partitioner", Partition, ("split",), PARTITIONS, BasePartition))

__all__ = [
    "PARTITIONS",
    "BasePartition",
    "Classes",
    "Column",
    "Dirichlet",
    "FedProx",
    "Hsu",
    "Iid",
    "Natural",
    "Partition",
    "Quantity",
    "Shards",
]
