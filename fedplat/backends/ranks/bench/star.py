"""The naive way: rank 0 sends to each, or receives from each."""

from __future__ import annotations

from fedplat.backends.ranks.bench.area import Area


def broadcast(area: Area) -> None:
    """Rank 0 sends the whole vector to each."""
    if area.ranks.is_first:
        area.exchange(sends=[(area.take, rank) for rank in _others(area)])
    else:
        area.exchange(receives=[(area.take, 0)])


def scatter(area: Area) -> None:
    """Rank 0 sends each its piece."""
    if area.ranks.is_first:
        area.take[area.mine] = area.give[area.mine]
        area.exchange(sends=[(area.give[area.piece(rank)], rank) for rank in _others(area)])
    else:
        area.exchange(receives=[(area.take[area.mine], 0)])


def gather(area: Area) -> None:
    """Each sends its piece to rank 0."""
    if area.ranks.is_first:
        area.exchange(receives=[(area.take[area.piece(rank)], rank) for rank in _others(area)])
    else:
        area.exchange(sends=[(area.give[area.mine], 0)])


def all_gather(area: Area) -> None:
    """Rank 0 gathers, and sends all of it to each."""
    gather(area)
    broadcast(area)


def reduce(area: Area) -> None:
    """Rank 0 receives one vector after the other, and adds it."""
    if not area.ranks.is_first:
        area.exchange(sends=[(area.take, 0)])
        return
    for rank in _others(area):
        area.exchange(receives=[(area.scratch, rank)])
        area.take.add_(area.scratch)


def reduce_scatter(area: Area) -> None:
    """Rank 0 adds up, and sends each its piece."""
    reduce(area)
    if area.ranks.is_first:
        area.exchange(sends=[(area.take[area.piece(rank)], rank) for rank in _others(area)])
    else:
        area.exchange(receives=[(area.take[area.mine], 0)])


def all_reduce(area: Area) -> None:
    """Rank 0 adds up, and sends the sum to each."""
    reduce(area)
    broadcast(area)


def _others(area: Area) -> range:
    return range(1, area.ranks.size)
