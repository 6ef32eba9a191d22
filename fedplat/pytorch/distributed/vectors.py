"""Vectors of logical ranks, and their sum: the base class of all transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from fedplat.pytorch.distributed.group import Ranks
from fedplat.pytorch.distributed.layout import VectorLayout


class Vectors(ABC):
    """A float32 vector for each logical rank, to be filled in place, and the sum of all of them.

    The sum of a column is `((v0 + v1) + v2) + ...`, in the order of logical ranks. A ring would start with another rank
    for each chunk, and the order of arrival varies. Each process sends and receives as many bytes as in a ring, `(P -
    1) / P` of a vector if each holds one. The bits of the sum depend only on the number of logical ranks: they are the
    same after workers have been lost, and in one process without workers (F35).

    All processes call each method in the same order. Views are valid until `close`.
    """

    def __init__(self, ranks: Ranks, layout: VectorLayout) -> None:
        """Store the group and the layout, which must be for as many processes as there are ranks."""
        self.ranks = ranks
        self.layout = layout

    @property
    @abstractmethod
    def slots(self) -> Sequence[torch.Tensor]:
        """This process's vectors: those of its logical ranks, or one if it has none."""

    @property
    def own(self) -> Mapping[int, torch.Tensor]:
        """The vectors of this process's logical ranks; zeros at first. Adding up overwrites them."""
        return dict(zip(self.layout.ranks_of(self.ranks.rank), self.slots, strict=False))

    @property
    def whole(self) -> torch.Tensor:
        """The vector that `all_gather` fills, in the memory of this process's first one."""
        return self.slots[0]

    @property
    def columns(self) -> torch.Tensor:
        """This process's columns of `whole`: the result of `reduce_scatter`, and the input of `all_gather`."""
        return self.whole[self.layout.columns(self.ranks.rank)]

    @abstractmethod
    def reduce_scatter(self) -> torch.Tensor:
        """Add up this process's columns, and return the view `columns`.

        Raises `RuntimeError` if a process died.
        """

    @abstractmethod
    def all_gather(self) -> torch.Tensor:
        """Fill `whole` with the `columns` of all processes, and return it.

        Raises `RuntimeError` if a process died.
        """

    def all_reduce(self) -> torch.Tensor:
        """Add up all columns, and return the view `whole`. Raises `RuntimeError` if a process died."""
        self.reduce_scatter()
        return self.all_gather()

    @abstractmethod
    def close(self) -> None:
        """Free the memory, unless there are still views of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def split_columns(columns: slice, length: int) -> Iterator[slice]:
    """Return consecutive parts of columns, of at most `length` entries."""
    return (slice(first, min(first + length, columns.stop)) for first in range(columns.start, columns.stop, length))
