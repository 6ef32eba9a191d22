"""The collectives of Gloo or NCCL, by `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import distributed

from fedplat.pytorch.distributed.bench.buffers import Buffers

Operation: TypeAlias = Callable[[Buffers], object]
_library: Any = distributed
# PyTorch renamed these functions; the extra allows versions with either name.
_all_gather: Any = getattr(_library, "all_gather_single", None) or _library.all_gather_into_tensor
_reduce_scatter: Any = getattr(_library, "reduce_scatter_single", None) or _library.reduce_scatter_tensor


def _scatter(buffers: Buffers) -> None:
    pieces = list(buffers.give.chunk(buffers.ranks.size)) if buffers.ranks.is_first else None
    distributed.scatter(buffers.take[buffers.mine], pieces, 0)


def _gather(buffers: Buffers) -> None:
    pieces = list(buffers.take.chunk(buffers.ranks.size)) if buffers.ranks.is_first else None
    distributed.gather(buffers.give[buffers.mine], pieces, 0)


COLLECTIVES: Mapping[str, Operation] = {
    "broadcast": lambda buffers: _library.broadcast(buffers.take, 0),
    "scatter": _scatter,
    "gather": _gather,
    "all-gather": lambda buffers: _all_gather(buffers.take, buffers.give[buffers.mine]),
    "all-to-all": lambda buffers: _library.all_to_all_single(buffers.take, buffers.give),
    "reduce": lambda buffers: _library.reduce(buffers.take, 0),
    "reduce-scatter": lambda buffers: _reduce_scatter(buffers.take[buffers.mine], buffers.give),
    "all-reduce": lambda buffers: _library.all_reduce(buffers.take),
}
"""The collectives by name; rank 0 is the root of those that have one."""
