"""Dirichlet by client (Hsu, Qi and Brown 2019, arXiv 1909.06335, section 3).

Every client draws its own mixture of classes, Dirichlet(alpha * p) for class frequencies p, and then its examples one
by one without replacement. All clients have the same number of examples.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition, Clients, Examples, class_labels, members, require


class Hsu(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="hsu"):
    """Partition by a Dirichlet mixture per client.

    `examples` is the number of each client (0: as many as possible). A class without unused examples is
    removed from the mixtures of later clients.
    """

    clients: Clients
    alpha: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 0.5
    examples: Examples = 0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        labels = class_labels(dataset)
        size = self.examples or len(labels) // self.clients
        require(len(labels), self.clients * max(size, 1), f"{self.clients} clients with {max(size, 1)} examples each")
        pools = members(labels, rng)
        left = np.array([len(pool) for pool in pools])
        prior = left / left.sum()
        parts: list[Part] = []
        for _ in range(self.clients):
            mixture = rng.dirichlet(np.maximum(self.alpha * prior, 1e-12))
            wanted = np.zeros(len(pools), np.int64)
            while (missing := size - int(wanted.sum())) > 0:
                open_classes = np.where(left > wanted, mixture, 0.0)
                if open_classes.sum() == 0.0:  # no class of the mixture has unused examples
                    open_classes = (left - wanted).astype(np.float64)
                drawn = rng.multinomial(missing, open_classes / open_classes.sum())
                wanted = np.minimum(wanted + drawn, left)
            left -= wanted
            parts.append(np.concatenate([pool[n : n + k] for pool, n, k in zip(pools, left, wanted, strict=True)]))
        return parts
