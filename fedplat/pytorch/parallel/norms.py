"""The norm of a gradient whose parts are on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from fedplat.pytorch.parallel.mesh import Layout


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, layout: Layout) -> float:
    """Scale the gradients so that their total L2 norm is at most `max_norm`; return the norm. All ranks call it.

    The squares of each rank's values are divided by the number of ranks that have the same values, and added up over
    all ranks; so no rank needs a whole tensor.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    squares = 0.0
    for gradient in gradients:
        squares += float(_local(gradient).double().square().sum().item()) / _copies(gradient, layout)
    total = torch.tensor([squares], dtype=torch.float64)
    distributed.all_reduce(total, group=layout.ranks.group)
    norm = math.sqrt(total.item())
    if (scale := max_norm / (norm + 1e-6)) < 1:  # as `nn.utils.clip_grad_norm_` does
        for gradient in gradients:
            _local(gradient).mul_(scale)
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: torch.Tensor, layout: Layout) -> int:
    """Return the number of ranks that have the same values as this one."""
    ranks = layout.ranks.size if layout.mesh is None else layout.ranks.size // layout.parallel.pipeline
    if not isinstance(tensor, DTensor):
        return ranks
    sizes = tensor.device_mesh.shape
    # Not `is_shard()`: it is False where tensor ranks and sharded ranks cut the same dimension (`_StridedShard`).
    return ranks // math.prod(
        size for size, place in zip(sizes, tensor.placements, strict=True) if not place.is_replicate()
    )
