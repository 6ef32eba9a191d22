"""The binomial tree: in each step every rank that has the data forwards them, so that twice as many have them.

Rank r has a subtree of the ranks r to r + 2^k - 1, where 2^k is the lowest bit of r; its parent is r without that bit.
"""

from __future__ import annotations

from collectives.exchange import exchange
from fedplat.pytorch.distributed.bench.measure import Buffers


def broadcast(buffers: Buffers) -> None:
    """Send down the tree, the largest subtree first."""
    if not buffers.ranks.is_first:
        exchange(receives=[(buffers.take, _parent(buffers))])
    for child in reversed(_children(buffers)):
        exchange(sends=[(buffers.take, child)])


def scatter(buffers: Buffers) -> None:
    """Send each child the pieces of its subtree."""
    source = buffers.give
    if not buffers.ranks.is_first:
        source = buffers.take
        exchange(receives=[(source[_pieces(buffers, buffers.ranks.rank)], _parent(buffers))])
    for child in reversed(_children(buffers)):
        exchange(sends=[(source[_pieces(buffers, child)], child)])
    if buffers.ranks.is_first:
        buffers.take[buffers.mine] = buffers.give[buffers.mine]


def gather(buffers: Buffers) -> None:
    """Gather the pieces of each subtree, and send them up."""
    for child in _children(buffers):
        exchange(receives=[(buffers.take[_pieces(buffers, child)], child)])
    if not buffers.ranks.is_first:
        exchange(sends=[(buffers.take[_pieces(buffers, buffers.ranks.rank)], _parent(buffers))])


def all_gather(buffers: Buffers) -> None:
    """Go up the tree, and down again."""
    gather(buffers)
    broadcast(buffers)


def reduce(buffers: Buffers) -> None:
    """Add up each subtree, and send the sum up."""
    for child in _children(buffers):
        exchange(receives=[(buffers.scratch, child)])
        buffers.take.add_(buffers.scratch)
    if not buffers.ranks.is_first:
        exchange(sends=[(buffers.take, _parent(buffers))])


def all_reduce(buffers: Buffers) -> None:
    """Go up the tree, and down again."""
    reduce(buffers)
    broadcast(buffers)


def _span(buffers: Buffers, rank: int) -> int:
    """Return the number of ranks that a subtree may have."""
    lowest = rank & -rank
    return lowest or 1 << (buffers.ranks.size - 1).bit_length()


def _children(buffers: Buffers) -> list[int]:
    rank, steps = buffers.ranks.rank, _span(buffers, buffers.ranks.rank).bit_length() - 1
    return [rank + (1 << step) for step in range(steps) if rank + (1 << step) < buffers.ranks.size]


def _parent(buffers: Buffers) -> int:
    return buffers.ranks.rank & (buffers.ranks.rank - 1)


def _pieces(buffers: Buffers, rank: int) -> slice:
    last = min(rank + _span(buffers, rank), buffers.ranks.size) - 1
    return slice(buffers.piece(rank).start, buffers.piece(last).stop)
