"""Two classes and a power law of sizes (Li et al. 2020, FedProx, arXiv 1812.06127, appendix C.1).

As in the paper's published code: client i has the classes i, i + 1 ... (mod their number), `base` examples of each,
and then a lognormal share of the rest of each class. Examples that remain after rounding are unused.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition, Clients, class_labels, cut, members


class FedProx(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="fedprox"):
    """By default the paper's MNIST: 1,000 clients, two digits each, sizes by lognormal(0, 2), close to a power law."""

    clients: Clients = 1000
    classes_per_client: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 2
    base: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 5
    sigma: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 2.0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        pools = members(class_labels(dataset), rng)
        if self.classes_per_client > len(pools):
            raise DataError(f"classes_per_client = {self.classes_per_client}: the data has {len(pools)} classes")
        parts: list[list[Part]] = [[] for _ in range(self.clients)]
        for label, pool in enumerate(pools):
            owners = [
                client for client in range(self.clients) if (label - client) % len(pools) < self.classes_per_client
            ]
            left = len(pool) - self.base * len(owners)
            if left < 0:
                raise DataError(
                    f"class {label} has {len(pool)} examples for {len(owners)} clients with {self.base} each; "
                    "use fewer clients or a smaller base"
                )
            shares = np.exp(self.sigma * rng.standard_normal(len(owners)))
            sizes = self.base + np.floor(left * shares / max(shares.sum(), 1e-300)).astype(np.int64)
            for client, piece in zip(owners, cut(pool, sizes), strict=True):
                parts[client].append(piece)
        return [np.concatenate(pieces) for pieces in parts]
