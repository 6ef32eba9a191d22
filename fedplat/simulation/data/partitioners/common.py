"""Functions that partitioners share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Dataset, Part

Clients = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Examples = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
SomeExamples = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")
MAX_DRAWS = 10_000
"""The number of draws of a random split after which a client with too few examples is an error."""


class BasePartition(msgspec.Struct, frozen=True, kw_only=True):
    """The base of options records of partitioners; `seed` replaces the seed of the simulation (None: it does not)."""

    seed: int | None = None


def class_labels(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Return the class of each example, from 0 in the order of the labels. Raises `DataError` without classes."""
    targets = dataset.targets
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
        raise DataError(
            f"targets are {targets.dtype}{list(targets.shape)}; a partition by label needs one integer per example"
        )
    return np.unique(targets, return_inverse=True)[1].astype(np.int64)


def members(labels: npt.NDArray[np.int64], rng: np.random.Generator) -> list[Part]:
    """Return the examples of each class, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(int(labels.max()) + 1)]


def group(values: npt.NDArray[Any]) -> list[Part]:
    """Return the examples of each value, in the order of the values; examples keep their order.

    Texts that are all numbers are in the order of these: 4, 30, 100; equal ones (7, 007) in that of the texts.
    """
    names, codes = np.unique(values, return_inverse=True)
    if names.dtype.kind == "U" and all(map(_NUMBER.fullmatch, names.tolist())):
        ranked = sorted(range(len(names)), key=lambda index: (Decimal(names[index]), names[index]))
        codes = np.argsort(ranked)[codes]
    order = np.argsort(codes, kind="stable").astype(np.int64)
    _, starts = np.unique(codes[order], return_index=True)
    return np.split(order, starts[1:])


def cut(indices: Part, sizes: npt.NDArray[np.int64] | Sequence[int]) -> list[Part]:
    """Return consecutive pieces of `indices` of the given sizes, and drop the rest."""
    ends = np.cumsum(sizes)
    return [indices[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def require(num_examples: int, needed: int, what: str) -> None:
    """Raise `DataError` if there are fewer examples than a partition needs."""
    if num_examples < needed:
        raise DataError(f"{what} needs at least {needed} examples; there are {num_examples}")


def whole_sizes(shares: npt.NDArray[np.float64], total: int, minimum: int) -> npt.NDArray[np.int64]:
    """Return integers proportional to `shares` that add up to `total`, each at least `minimum`.

    Each client gets the minimum first, then its share of the rest, rounded by the largest-remainder method.
    """
    exact = shares / shares.sum() * (total - minimum * len(shares))
    sizes = np.floor(exact).astype(np.int64)
    left = total - minimum * len(shares) - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1
    return sizes + minimum
