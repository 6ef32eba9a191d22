"""Natural partitions: the data itself has an owner for each example, or a column that names it."""

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


class Column(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="column"):
    """Every value of `column` with at least `min_examples` is a client; clients are sorted by value.

    If there are more than `max_clients` (0: no limit), that many are drawn at random. Examples keep their order in the
    data. Names of clients are their values.
    """

    column: Annotated[str, msgspec.Meta(min_length=1)]
    min_examples: SomeExamples = 1
    max_clients: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the source reads for the partition."""
        return (self.column,)

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client, in the order of the values."""
        if self.column not in dataset.columns:
            found = f"it has {', '.join(dataset.columns)}" if dataset.columns else "its source reads no columns"
            owners = "" if dataset.groups is None else '; for the owners of the data use scheme = "natural"'
            raise DataError(f"column = {self.column!r}: the data has no such column; {found}{owners}")
        values = group(dataset.columns[self.column])
        parts = [part for part in values if len(part) >= self.min_examples]
        if not parts:
            raise DataError(
                f"column = {self.column!r}: none of {len(values)} values has {self.min_examples} examples; use a "
                "smaller min_examples"
            )
        if 0 < self.max_clients < len(parts):
            chosen = np.sort(rng.choice(len(parts), size=self.max_clients, replace=False))
            parts = [parts[index] for index in chosen]
        return parts
