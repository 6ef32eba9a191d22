"""Sums of the vectors of logical ranks: the choice of a transport, and messages between pairs of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
from torch import distributed
from typing_extensions import override

from fedplat.model import WINDOW
from fedplat.pytorch.distributed.group import Ranks
from fedplat.pytorch.distributed.shared_memory import share
from fedplat.pytorch.distributed.vectors import VectorLayout, Vectors, split_columns

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


MESSAGE_LENGTH = 4 * WINDOW
"""Entries of a message: 4 MB; two messages per logical rank are in memory while columns are added up."""


class P2PVectors(Vectors):
    """Vectors in the memory of their own process, on any device.

    Each process sends the others their columns of its vectors in place, a window at a time, and adds up one window
    while the next one is in transit. In addition to the vectors, there are two windows for each logical rank.
    """

    def __init__(self, ranks: Ranks, layout: VectorLayout, length: int = MESSAGE_LENGTH) -> None:
        """Allocate the vectors; all processes have to pass the same arguments."""
        super().__init__(ranks, layout)
        self._length = length
        self._slots = [
            torch.zeros(layout.size, dtype=torch.float32, device=ranks.device) for _ in range(layout.slots(ranks.rank))
        ]
        ranks.connect()

    @property
    @override
    def slots(self) -> Sequence[torch.Tensor]:
        return self._slots

    @override
    def reduce_scatter(self) -> torch.Tensor:
        layout, mine = self.layout, self.ranks.rank
        windows = [list(split_columns(layout.columns(process), self._length)) for process in range(layout.processes)]
        longest = max((part.stop - part.start for part in windows[mine]), default=0)
        others = layout.logical - len(layout.ranks_of(mine))
        staged = torch.empty((2, others, longest), dtype=torch.float32, device=self.ranks.device)
        pending: list[tuple[slice, list[torch.Tensor], list[distributed.Work]]] = []
        for step, parts in enumerate(zip_longest(*windows)):
            part = parts[mine]
            terms = self._terms(part, staged[step % 2]) if part else []
            works = _start([*self._receives(terms), *self._sends(parts)])
            if pending:
                self._add(*pending.pop())
            pending.append((part or slice(0, 0), terms, works))
        if pending:
            self._add(*pending.pop())
        return self.columns

    @override
    def all_gather(self) -> torch.Tensor:
        layout, mine = self.layout, self.ranks.rank
        windows = [split_columns(layout.columns(process), self._length) for process in range(layout.processes)]
        others = [process for process in range(layout.processes) if process != mine]
        before: list[distributed.Work] = []
        for parts in zip_longest(*windows):
            receives = [self._receive(self.whole[part], q) for q in others if (part := parts[q])]
            sends = [self._send(self.whole[part], q) for q in others if (part := parts[mine])]
            works = _start([*receives, *sends])
            _wait(before)
            before = works
        _wait(before)
        return self.whole

    @override
    def close(self) -> None:
        self._slots.clear()

    def _terms(self, part: slice, staged: torch.Tensor) -> list[torch.Tensor]:
        """Return a window of every logical rank's vector, in their order: own vectors, or buffers for the others."""
        rows = iter(staged)
        own = self.own
        return [
            own[logical][part] if logical in own else next(rows)[: part.stop - part.start]
            for logical in range(self.layout.logical)
        ]

    def _receives(self, terms: Sequence[torch.Tensor]) -> list[distributed.P2POp]:
        homes = [self.layout.slot(logical)[0] for logical in range(self.layout.logical)]
        return [
            self._receive(term, home)
            for term, home in zip(terms, homes, strict=False)  # no terms after the end of this process's columns
            if home != self.ranks.rank
        ]

    def _sends(self, parts: Sequence[slice | None]) -> list[distributed.P2POp]:
        return [
            self._send(vector[part], process)
            for process, part in enumerate(parts)
            if part is not None and process != self.ranks.rank
            for vector in self.own.values()
        ]

    def _add(self, part: slice, terms: Sequence[torch.Tensor], works: Iterable[distributed.Work]) -> None:
        _wait(works)
        if not terms:
            return
        total = terms[0]
        for term in terms[1:-1]:  # not into `whole`, which may be one of the terms
            total = total + term
        if len(terms) > 1:
            torch.add(total, terms[-1], out=self.whole[part])
        else:
            self.whole[part].copy_(total)

    def _send(self, values: torch.Tensor, process: int) -> distributed.P2POp:
        return distributed.P2POp(distributed.isend, values, self._peer(process), self.ranks.group)

    def _receive(self, values: torch.Tensor, process: int) -> distributed.P2POp:
        return distributed.P2POp(distributed.irecv, values, self._peer(process), self.ranks.group)

    def _peer(self, process: int) -> int:
        group: Any = self.ranks.group
        return process if group is None else distributed.get_global_rank(group, process)


def _start(operations: list[distributed.P2POp]) -> list[distributed.Work]:
    return distributed.batch_isend_irecv(operations) if operations else []


def _wait(works: Iterable[distributed.Work]) -> None:
    for work in works:
        work.wait()
