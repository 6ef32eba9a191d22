"""Dirichlet by client (Hsu, Qi and Brown 2019, arXiv 1909.06335, section 3).

Every client draws its own mixture of classes, Dirichlet(alpha * p) around the classes' frequencies p, and then its
examples one by one without replacement. All clients have the same number of examples.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import Clients, Examples, class_labels, members, require


class Hsu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="hsu"):
    """`examples` is how many each client has; 0: as many as go round.

    A class that is used up is taken out of the mixtures of those that still choose.
    """

    clients: Clients
    alpha: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 0.5
    examples: Examples = 0
    seed: int | None = None

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """The examples of each client."""
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
                if open_classes.sum() == 0.0:  # the mixture names used-up classes alone
                    open_classes = (left - wanted).astype(np.float64)
                drawn = rng.multinomial(missing, open_classes / open_classes.sum())
                wanted = np.minimum(wanted + drawn, left)
            left -= wanted
            parts.append(np.concatenate([pool[n : n + k] for pool, n, k in zip(pools, left, wanted, strict=True)]))
        return parts
