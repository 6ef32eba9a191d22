"""The collectives of Gloo or NCCL, as `torch.distributed` has them."""

from __future__ import annotations

from typing import Any

from torch import distributed

from fedplat.backends.ranks.bench.area import Area

_NAMES: Any = distributed
# PyTorch renamed them; the extra allows both.
_gathered: Any = getattr(_NAMES, "all_gather_single", None) or _NAMES.all_gather_into_tensor
_scattered: Any = getattr(_NAMES, "reduce_scatter_single", None) or _NAMES.reduce_scatter_tensor


def broadcast(area: Area) -> None:
    """Of rank 0's vector."""
    distributed.broadcast(area.take, 0)


def scatter(area: Area) -> None:
    """Of rank 0's vector."""
    pieces = list(area.give.chunk(area.ranks.size)) if area.ranks.is_first else None
    distributed.scatter(area.take[area.mine], pieces, 0)


def gather(area: Area) -> None:
    """To rank 0."""
    pieces = list(area.take.chunk(area.ranks.size)) if area.ranks.is_first else None
    distributed.gather(area.give[area.mine], pieces, 0)


def all_gather(area: Area) -> None:
    """Of all pieces."""
    _gathered(area.take, area.give[area.mine])


def all_to_all(area: Area) -> None:
    """Of all pieces."""
    distributed.all_to_all_single(area.take, area.give)


def reduce(area: Area) -> None:
    """To rank 0."""
    distributed.reduce(area.take, 0)


def reduce_scatter(area: Area) -> None:
    """Of all vectors."""
    _scattered(area.take[area.mine], area.give)


def all_reduce(area: Area) -> None:
    """Of all vectors."""
    distributed.all_reduce(area.take)
