"""Partitioners: they assign examples to clients, as `[simulation.partition]` of a simulation file describes.

Each assigns every example to at most one client, and returns the same parts for the same generator.
`docs/contributing.md` has the steps to add one.
"""

from __future__ import annotations

from fedplat.simulation.data.partitioners.classes import Classes
from fedplat.simulation.data.partitioners.dirichlet import Dirichlet
from fedplat.simulation.data.partitioners.fedprox import FedProx
from fedplat.simulation.data.partitioners.hsu import Hsu
from fedplat.simulation.data.partitioners.iid import Iid
from fedplat.simulation.data.partitioners.natural import Natural
from fedplat.simulation.data.partitioners.quantity import Quantity
from fedplat.simulation.data.partitioners.shards import Shards

Partition = Iid | Shards | Dirichlet | Hsu | Quantity | Classes | FedProx | Natural
"""The `[simulation.partition]` table; its key `scheme` selects the partitioner."""

__all__ = [
    "Classes",
    "Dirichlet",
    "FedProx",
    "Hsu",
    "Iid",
    "Natural",
    "Partition",
    "Quantity",
    "Shards",
]
