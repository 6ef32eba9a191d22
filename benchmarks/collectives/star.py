"""The naive implementation: rank 0 sends to each, or receives from each."""

from __future__ import annotations

from collectives.exchange import exchange
from fedplat.pytorch.distributed.bench.measure import Buffers


def broadcast(buffers: Buffers) -> None:
    """Send the whole vector from rank 0 to each."""
    if buffers.ranks.is_first:
        exchange(sends=[(buffers.take, rank) for rank in _other_ranks(buffers)])
    else:
        exchange(receives=[(buffers.take, 0)])


def scatter(buffers: Buffers) -> None:
    """Send each its piece from rank 0."""
    if buffers.ranks.is_first:
        buffers.take[buffers.mine] = buffers.give[buffers.mine]
        exchange(sends=[(buffers.give[buffers.piece(rank)], rank) for rank in _other_ranks(buffers)])
    else:
        exchange(receives=[(buffers.take[buffers.mine], 0)])


def gather(buffers: Buffers) -> None:
    """Send all pieces to rank 0."""
    if buffers.ranks.is_first:
        exchange(receives=[(buffers.take[buffers.piece(rank)], rank) for rank in _other_ranks(buffers)])
    else:
        exchange(sends=[(buffers.give[buffers.mine], 0)])


def all_gather(buffers: Buffers) -> None:
    """Gather on rank 0, and send everything to each."""
    gather(buffers)
    broadcast(buffers)


def reduce(buffers: Buffers) -> None:
    """Receive one vector after the other on rank 0, and add it."""
    if not buffers.ranks.is_first:
        exchange(sends=[(buffers.take, 0)])
        return
    for rank in _other_ranks(buffers):
        exchange(receives=[(buffers.scratch, rank)])
        buffers.take.add_(buffers.scratch)


def reduce_scatter(buffers: Buffers) -> None:
    """Add up on rank 0, and send each its piece."""
    reduce(buffers)
    if buffers.ranks.is_first:
        exchange(sends=[(buffers.take[buffers.piece(rank)], rank) for rank in _other_ranks(buffers)])
    else:
        exchange(receives=[(buffers.take[buffers.mine], 0)])


def all_reduce(buffers: Buffers) -> None:
    """Add up on rank 0, and send the sum to each."""
    reduce(buffers)
    broadcast(buffers)


def _other_ranks(buffers: Buffers) -> range:
    return range(1, buffers.ranks.size)
