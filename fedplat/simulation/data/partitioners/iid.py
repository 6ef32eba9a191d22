"""IID: examples are shuffled and divided evenly (McMahan et al. 2017, arXiv 1602.05629, section 3)."""

from __future__ import annotations

import numpy as np

from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition, Clients, Examples, cut, require


class Iid(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="iid"):
    """Every client has the same number of examples (at most one more or less), drawn at random.

    `examples` is the number of each client (0: all examples, divided evenly).
    """

    clients: Clients
    examples: Examples = 0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        total = len(dataset.targets)
        if self.examples:
            require(total, self.clients * self.examples, f"{self.clients} clients with {self.examples} examples each")
            return cut(rng.permutation(total), [self.examples] * self.clients)
        require(total, self.clients, f"an IID partition over {self.clients} clients")
        return np.array_split(rng.permutation(total), self.clients)
