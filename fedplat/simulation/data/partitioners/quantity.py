"""Quantity skew: clients differ in their numbers of examples only (NIID-Bench, arXiv 2102.02079, section 4.3)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition, Clients, SomeExamples, cut, require, whole_sizes


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
