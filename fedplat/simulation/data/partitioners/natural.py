"""Natural: the data itself has an owner for each example (a speaker, a writer, a hospital)."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Dataset, Part
from fedplat.simulation.data.partitioners.common import BasePartition, SomeExamples, group


class Natural(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="natural"):
    """Every owner with at least `min_examples` is a client, or only `clients` of them, drawn at random.

    Examples keep their order in the data.
    """

    clients: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    min_examples: SomeExamples = 1

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client, in the order of the owners' numbers."""
        if dataset.groups is None:
            raise DataError("the data has no owners of examples; use another scheme than natural")
        all_parts = group(dataset.groups)
        parts = [part for part in all_parts if len(part) >= self.min_examples]
        if len(parts) < max(self.clients, 1):
            raise DataError(
                f"{len(parts)} of {len(all_parts)} owners have at least {self.min_examples} examples; "
                f"expected {max(self.clients, 1)} or more"
            )
        if self.clients:
            chosen = np.sort(rng.choice(len(parts), size=self.clients, replace=False))
            parts = [parts[index] for index in chosen]
        return parts
