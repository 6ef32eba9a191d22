"""Dirichlet by label, as in NIID-Bench (Li et al. 2022, arXiv 2102.02079, section 4.1; Yurochkin et al. 2019).

The examples of each class are divided over the clients by proportions from Dirichlet(alpha). As in the benchmark's
published code, a client that already has its fair share gets no examples of later classes, and the whole partition is
drawn again until every client has `min_examples`. Clients differ in their sizes and in their labels.
"""

from __future__ import annotations

from typing import Annotated

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
