"""Vectors of logical ranks, and their sum: what all ways to exchange them have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from fedplat.backends.ranks.group import Ranks
from fedplat.backends.ranks.layout import Layout


class Vectors(ABC):
    """A float32 vector for each logical rank, to be filled where it is, and the sum of all of them.

    The sum of a column is `((v0 + v1) + v2) + ...`, in the order of logical ranks and not, as in a ring, beginning
    with another rank for each chunk, nor in the order of arrival. Each process sends and receives as many bytes as in
    a ring, `(P - 1) / P` of a vector if each holds one, and the bits of the sum depend on the number of logical ranks
    alone: a pool that has lost processes, or one process without a pool, gets the same (F35).

    All processes call each method in the same order. Views are valid until `close`.
    """

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        """The layout is that of as many processes as there are ranks."""
        self.ranks = ranks
        self.layout = layout

    @property
    @abstractmethod
    def slots(self) -> Sequence[torch.Tensor]:
        """This process's memory, a vector each: those of its logical ranks, or one if it has none."""

    @property
    def own(self) -> Mapping[int, torch.Tensor]:
        """The vectors of this process's logical ranks; zeros at first. They are of no use once they were added up."""
        return dict(zip(self.layout.held(self.ranks.rank), self.slots, strict=False))

    @property
    def whole(self) -> torch.Tensor:
        """What `all_gather` fills: the memory of this process's first vector."""
        return self.slots[0]

    @property
    def columns(self) -> torch.Tensor:
        """This process's columns of `whole`: where `reduce_scatter` leaves their sum, and `all_gather` finds them."""
        return self.whole[self.layout.columns(self.ranks.rank)]

    @abstractmethod
    def reduce_scatter(self) -> torch.Tensor:
        """The sum of this process's columns, as the view `columns`.

        Raises `RuntimeError` when a process died.
        """

    @abstractmethod
    def all_gather(self) -> torch.Tensor:
        """The vector that consists of every process's `columns`, as the view `whole`.

        Raises `RuntimeError` when a process died.
        """

    def all_reduce(self) -> torch.Tensor:
        """The sum of all columns, as the view `whole`. Raises `RuntimeError` when a process died."""
        self.reduce_scatter()
        return self.all_gather()

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back, as far as nobody holds a view."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def pieces(columns: slice, length: int) -> Iterator[slice]:
    """Consecutive parts of columns, of at most `length` entries."""
    return (slice(first, min(first + length, columns.stop)) for first in range(columns.start, columns.stop, length))
