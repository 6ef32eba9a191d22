"""The ring: each rank sends to the next one, and receives from the one before, at the same time.

A reduce-scatter passes each piece around once, and each rank adds its own to it; an all-gather passes the sums around
once more (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Section 4).
"""

from __future__ import annotations

from fedplat.backends.ranks.bench.area import Area

CHUNK = 1 << 20
"""Entries of a vector that is passed on while the next ones come."""


def broadcast(area: Area) -> None:
    """Chunk by chunk from rank 0 to the last one; each passes one on while it receives the next."""
    ranks, chunks = area.ranks, area.take.split(CHUNK)
    last = ranks.rank == ranks.size - 1
    for step in range(len(chunks) + 1):
        receives = [(chunks[step], ranks.rank - 1)] if step < len(chunks) and not ranks.is_first else []
        passed = step if ranks.is_first else step - 1
        sends = [(chunks[passed], ranks.rank + 1)] if 0 <= passed < len(chunks) and not last else []
        area.exchange(sends, receives)


def all_gather(area: Area) -> None:
    """Each passes on what it received in the step before."""
    ranks = area.ranks
    for step in range(ranks.size - 1):
        sent, received = (area.piece((ranks.rank - step - back) % ranks.size) for back in (0, 1))
        area.exchange([(area.take[sent], _next(area))], [(area.take[received], _before(area))])


def all_to_all(area: Area) -> None:
    """In step k each sends to the k-th rank after it."""
    ranks = area.ranks
    area.take[area.mine] = area.give[area.mine]
    for step in range(1, ranks.size):
        to, of = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        area.exchange([(area.give[area.piece(to)], to)], [(area.take[area.piece(of)], of)])


def reduce(area: Area) -> None:
    """Chunk by chunk from the last rank to rank 0; each adds its own."""
    ranks = area.ranks
    last = ranks.rank == ranks.size - 1
    chunks, scratch = area.take.split(CHUNK), area.scratch.split(CHUNK)
    for step in range(len(chunks) + 1):
        receives = [(scratch[step], ranks.rank + 1)] if step < len(chunks) and not last else []
        passed = step if last else step - 1
        sends = [(chunks[passed], ranks.rank - 1)] if 0 <= passed < len(chunks) and not ranks.is_first else []
        area.exchange(sends, receives)
        if receives:
            chunks[step].add_(scratch[step])


def reduce_scatter(area: Area) -> None:
    """Each adds its own to what it received, and passes it on; after n - 1 steps it has the sum of its piece."""
    ranks = area.ranks
    for step in range(ranks.size - 1):
        sent, received = (area.piece((ranks.rank - step - back) % ranks.size) for back in (1, 2))
        area.exchange([(area.take[sent], _next(area))], [(area.scratch[received], _before(area))])
        area.take[received].add_(area.scratch[received])


def all_reduce(area: Area) -> None:
    """A reduce-scatter, then an all-gather."""
    reduce_scatter(area)
    all_gather(area)


def _next(area: Area) -> int:
    return (area.ranks.rank + 1) % area.ranks.size


def _before(area: Area) -> int:
    return (area.ranks.rank - 1) % area.ranks.size
