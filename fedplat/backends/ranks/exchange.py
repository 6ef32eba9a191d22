"""Which way the vectors of logical ranks are exchanged."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fedplat.backends.ranks.group import Ranks
from fedplat.backends.ranks.layout import Layout
from fedplat.backends.ranks.sent import SentVectors
from fedplat.backends.ranks.shared import shared
from fedplat.backends.ranks.vectors import Vectors

Way: TypeAlias = Literal["auto", "shared", "sent"]
"""Shared memory, messages, or the faster one that the group has: the bits of the sums are the same."""


def vectors(ranks: Ranks, layout: Layout, way: Way = "auto") -> Vectors:
    """A vector of zeros for each logical rank. All processes have to call it, with the same arguments.

    Memory is one vector for each logical rank of a process. Raises `ValueError` in all of them when the layout is
    that of another number of processes, or the memory has to be shared and they are not on one host or compute on GPUs.

    >>> with joined() as ranks, vectors(ranks, Layout.even(2, ranks.size, size=3)) as terms:
    ...     for logical, vector in terms.own.items():
    ...         vector += logical + 1
    ...     terms.all_reduce()
    tensor([3., 3., 3.])
    """
    if layout.processes != ranks.size:
        raise ValueError(f"columns for {layout.processes} processes; expected them for {ranks.size}")
    if way != "sent":
        if found := shared(ranks, layout):
            return found
        if way == "shared":
            raise ValueError("the ranks have no memory in common: they are not on one host, or compute on GPUs")
    return SentVectors(ranks, layout)
