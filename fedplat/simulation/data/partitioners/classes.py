"""A fixed number of classes for each client (NIID-Bench, arXiv 2102.02079, section 4.1, "#C = k")."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition, Clients, class_labels, members


class Classes(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="classes"):
    """Every client has examples of `classes_per_client` classes, and a class is divided evenly over its clients.

    Client i has class i mod the number of classes, as in the benchmark's code, and others at random.
    """

    clients: Clients
    classes_per_client: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 2

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client; the examples of a class that no client has are unused."""
        pools = members(class_labels(dataset), rng)
        if self.classes_per_client > len(pools):
            raise DataError(f"classes_per_client = {self.classes_per_client}: the data has {len(pools)} classes")
        owners: list[list[int]] = [[] for _ in pools]
        for client in range(self.clients):
            first = client % len(pools)
            others = rng.permutation([label for label in range(len(pools)) if label != first])
            for label in (first, *others[: self.classes_per_client - 1]):
                owners[label].append(client)
        parts: list[list[Part]] = [[] for _ in range(self.clients)]
        for label, (pool, clients) in enumerate(zip(pools, owners, strict=True)):
            if len(clients) > len(pool):
                raise DataError(f"class {label} has {len(pool)} examples for {len(clients)} clients; use fewer clients")
            for client, piece in zip(clients, np.array_split(pool, max(len(clients), 1)), strict=False):
                parts[client].append(piece)
        return [np.concatenate(pieces) for pieces in parts]
