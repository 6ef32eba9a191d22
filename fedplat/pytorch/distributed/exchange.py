"""The choice of how the vectors of logical ranks are exchanged."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fedplat.pytorch.distributed.group import Ranks
from fedplat.pytorch.distributed.layout import VectorLayout
from fedplat.pytorch.distributed.p2p import P2PVectors
from fedplat.pytorch.distributed.shared_memory import share
from fedplat.pytorch.distributed.vectors import Vectors

Transport: TypeAlias = Literal["auto", "shared_memory", "p2p"]
"""Shared memory, messages between two processes, or the faster one that is available; the sums have the same bits."""


def make_vectors(ranks: Ranks, layout: VectorLayout, transport: Transport = "auto") -> Vectors:
    """Return a vector of zeros for each logical rank. All processes have to call it, with the same arguments.

    A process needs the memory of one vector for each of its logical ranks. Raises `ValueError` in all of them if the
    layout is for another number of processes, or if they cannot share memory although `transport` requires it.

    >>> with join_group() as ranks, make_vectors(ranks, VectorLayout.even(2, ranks.size, size=3)) as terms:
    ...     for logical, vector in terms.own.items(): ...         vector += logical + 1 ...     terms.all_reduce()
    tensor([3., 3., 3.])
    """
    if layout.processes != ranks.size:
        raise ValueError(f"columns for {layout.processes} processes; expected them for {ranks.size}")
    if transport != "p2p":
        if vectors := share(ranks, layout):
            return vectors
        if transport == "shared_memory":
            raise ValueError("the ranks cannot share memory: they are not on one host, or compute on GPUs")
    return P2PVectors(ranks, layout)
