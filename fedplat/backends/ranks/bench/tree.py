"""The binomial tree: in each step whoever has something passes it on, so that twice as many have it.

Rank r has a subtree of the ranks r to r + 2^k - 1, where 2^k is the lowest bit of r; its parent is r without that bit.
"""

from __future__ import annotations

from fedplat.backends.ranks.bench.area import Area


def broadcast(area: Area) -> None:
    """Down the tree, the largest subtree first."""
    if not area.ranks.is_first:
        area.exchange(receives=[(area.take, _parent(area))])
    for child in reversed(_children(area)):
        area.exchange(sends=[(area.take, child)])


def scatter(area: Area) -> None:
    """Each child gets the pieces of its subtree."""
    source = area.give
    if not area.ranks.is_first:
        source = area.take
        area.exchange(receives=[(source[_pieces(area, area.ranks.rank)], _parent(area))])
    for child in reversed(_children(area)):
        area.exchange(sends=[(source[_pieces(area, child)], child)])
    if area.ranks.is_first:
        area.take[area.mine] = area.give[area.mine]


def gather(area: Area) -> None:
    """Each gathers the pieces of its subtree, and sends them up."""
    for child in _children(area):
        area.exchange(receives=[(area.take[_pieces(area, child)], child)])
    if not area.ranks.is_first:
        area.exchange(sends=[(area.take[_pieces(area, area.ranks.rank)], _parent(area))])


def all_gather(area: Area) -> None:
    """Up the tree, and down again."""
    gather(area)
    broadcast(area)


def reduce(area: Area) -> None:
    """Each adds up its subtree, and sends the sum up."""
    for child in _children(area):
        area.exchange(receives=[(area.scratch, child)])
        area.take.add_(area.scratch)
    if not area.ranks.is_first:
        area.exchange(sends=[(area.take, _parent(area))])


def all_reduce(area: Area) -> None:
    """Up the tree, and down again."""
    reduce(area)
    broadcast(area)


def _span(area: Area, rank: int) -> int:
    """How many ranks a subtree may have."""
    lowest = rank & -rank
    return lowest or 1 << (area.ranks.size - 1).bit_length()


def _children(area: Area) -> list[int]:
    rank, steps = area.ranks.rank, _span(area, area.ranks.rank).bit_length() - 1
    return [rank + (1 << step) for step in range(steps) if rank + (1 << step) < area.ranks.size]


def _parent(area: Area) -> int:
    return area.ranks.rank & (area.ranks.rank - 1)


def _pieces(area: Area, rank: int) -> slice:
    last = min(rank + _span(area, rank), area.ranks.size) - 1
    return slice(area.piece(rank).start, area.piece(last).stop)
