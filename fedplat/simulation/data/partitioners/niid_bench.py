"""The partitions of NIID-Bench (Li et al. 2022, arXiv 2102.02079, section 4.1).

The examples of each class are divided over the clients by proportions from Dirichlet(alpha). As in the benchmark's
published code, a client that already has its fair share gets no examples of later classes, and the whole partition is
drawn again until every client has `min_examples`. Clients differ in their sizes and in their labels.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import (
    MAX_DRAWS,
    BasePartition,
    Clients,
    SomeExamples,
    class_labels,
    cut,
    members,
    require,
    whole_sizes,
)


class Dirichlet(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="dirichlet"):
    """Partition by Dirichlet proportions. A small `alpha` gives each client few classes; a large one is nearly IID."""

    clients: Clients
    alpha: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 0.5
    min_examples: SomeExamples = 10

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        labels = class_labels(dataset)
        require(
            len(labels), self.clients * self.min_examples, f"{self.min_examples} for each of {self.clients} clients"
        )
        counts = np.bincount(labels)
        for _ in range(MAX_DRAWS):
            sizes = self._sizes(counts, rng)
            if sizes.sum(axis=0).min() >= self.min_examples:
                break
        else:
            raise DataError(
                f"no Dirichlet({self.alpha:g}) partition in {MAX_DRAWS} draws gave each of {self.clients} clients "
                f"{self.min_examples} examples; use a larger alpha, fewer clients or a smaller min_examples"
            )
        by_class = [cut(pool, row) for pool, row in zip(members(labels, rng), sizes, strict=True)]
        return [np.concatenate(pieces) for pieces in zip(*by_class, strict=True)]

    def _sizes(self, counts: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draw the number of examples of each class (rows) of each client (columns)."""
        sizes = np.zeros((len(counts), self.clients), np.int64)
        fair_share = counts.sum() / self.clients
        for label, count in enumerate(counts):
            shares = rng.dirichlet(np.full(self.clients, self.alpha))
            shares = shares * (sizes.sum(axis=0) < fair_share)
            if shares.sum() == 0.0:  # with a tiny alpha, clients below their fair share may all draw 0
                shares = (sizes.sum(axis=0) < fair_share).astype(np.float64)
            ends = (np.cumsum(shares / shares.sum()) * count).astype(np.int64)
            ends[-1] = count
            sizes[label] = np.diff(ends, prepend=0)
        return sizes


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


class Quantity(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="quantity"):
    """Sizes follow a distribution; labels are IID.

    `spread` is its parameter: the sigma of "lognormal", the exponent of "powerlaw" (the client of rank r has a share
    proportional to r ** -spread), the concentration of "dirichlet" (as in NIID-Bench; smaller is more unequal).
    """

    clients: Clients
    distribution: Literal["lognormal", "powerlaw", "dirichlet"] = "lognormal"
    spread: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 1.0
    min_examples: SomeExamples = 1

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        total = len(dataset.targets)
        require(total, self.clients * self.min_examples, f"{self.min_examples} for each of {self.clients} clients")
        match self.distribution:
            case "lognormal":
                logs = self.spread * rng.standard_normal(self.clients)
                shares = np.exp(logs - logs.max())
            case "powerlaw":
                shares = rng.permutation(np.arange(1.0, self.clients + 1) ** -self.spread)
            case "dirichlet":
                shares = rng.dirichlet(np.full(self.clients, self.spread))
        return cut(rng.permutation(total), whole_sizes(shares, total, self.min_examples))
