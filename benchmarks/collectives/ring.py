"""The ring: each rank sends to the next one, and receives from the one before, at the same time.

A reduce-scatter passes each piece around once, and each rank adds its own to it; an all-gather passes the sums around
once more (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Section 4).
"""

from __future__ import annotations

from collectives.exchange import exchange
from fedplat.pytorch.distributed.bench.measure import Buffers

CHUNK = 1 << 20
"""Entries of a vector that are forwarded while the next ones arrive."""


def broadcast(buffers: Buffers) -> None:
    """Pass chunk by chunk from rank 0 to the last one; each forwards one while it receives the next."""
    ranks, chunks = buffers.ranks, buffers.take.split(CHUNK)
    last = ranks.rank == ranks.size - 1
    for step in range(len(chunks) + 1):
        receives = [(chunks[step], ranks.rank - 1)] if step < len(chunks) and not ranks.is_first else []
        passed = step if ranks.is_first else step - 1
        sends = [(chunks[passed], ranks.rank + 1)] if 0 <= passed < len(chunks) and not last else []
        exchange(sends, receives)


def all_gather(buffers: Buffers) -> None:
    """Forward what arrived in the step before."""
    ranks = buffers.ranks
    for step in range(ranks.size - 1):
        sent, received = (buffers.piece((ranks.rank - step - back) % ranks.size) for back in (0, 1))
        exchange([(buffers.take[sent], _next_rank(buffers))], [(buffers.take[received], _previous_rank(buffers))])


def all_to_all(buffers: Buffers) -> None:
    """Send to the k-th next rank in step k."""
    ranks = buffers.ranks
    buffers.take[buffers.mine] = buffers.give[buffers.mine]
    for step in range(1, ranks.size):
        to, of = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        exchange([(buffers.give[buffers.piece(to)], to)], [(buffers.take[buffers.piece(of)], of)])


def reduce(buffers: Buffers) -> None:
    """Pass chunk by chunk from the last rank to rank 0; each adds its own."""
    ranks = buffers.ranks
    last = ranks.rank == ranks.size - 1
    chunks, scratch = buffers.take.split(CHUNK), buffers.scratch.split(CHUNK)
    for step in range(len(chunks) + 1):
        receives = [(scratch[step], ranks.rank + 1)] if step < len(chunks) and not last else []
        passed = step if last else step - 1
        sends = [(chunks[passed], ranks.rank - 1)] if 0 <= passed < len(chunks) and not ranks.is_first else []
        exchange(sends, receives)
        if receives:
            chunks[step].add_(scratch[step])


def reduce_scatter(buffers: Buffers) -> None:
    """Add the own piece to the one that arrived, and forward it; n - 1 steps give each rank the sum of its piece."""
    ranks = buffers.ranks
    for step in range(ranks.size - 1):
        sent, received = (buffers.piece((ranks.rank - step - back) % ranks.size) for back in (1, 2))
        exchange([(buffers.take[sent], _next_rank(buffers))], [(buffers.scratch[received], _previous_rank(buffers))])
        buffers.take[received].add_(buffers.scratch[received])


def all_reduce(buffers: Buffers) -> None:
    """Reduce-scatter, then all-gather."""
    reduce_scatter(buffers)
    all_gather(buffers)


def _next_rank(buffers: Buffers) -> int:
    return (buffers.ranks.rank + 1) % buffers.ranks.size


def _previous_rank(buffers: Buffers) -> int:
    return (buffers.ranks.rank - 1) % buffers.ranks.size
