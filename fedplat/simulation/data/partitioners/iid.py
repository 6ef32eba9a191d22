"""The partitions of McMahan et al. 2017 (arXiv 1602.05629, section 3): IID, and shards of sorted examples."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition, Clients, Examples, class_labels, cut, require


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


class Shards(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="shards"):
    """Examples are sorted by label and cut into equal shards, of which every client gets `shards_per_client`.

    With MNIST and 100 clients: 200 shards of 300, two for each client, so that most clients have two digits only.
    `shard_size` is the number of examples in a shard (0: as many as possible). Examples that do not fill a
    shard are unused.
    """

    clients: Clients
    shards_per_client: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 2
    shard_size: Examples = 0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        labels = class_labels(dataset)
        count = self.clients * self.shards_per_client
        size = self.shard_size or len(labels) // count
        require(len(labels), count * max(size, 1), f"{count} shards")
        shards = np.argsort(labels, kind="stable")[: count * size].reshape(count, size)
        return list(shards[rng.permutation(count)].reshape(self.clients, -1).astype(np.int64))
