"""Arithmetic on lists of tensors with one call each, as in PyTorch's own optimizers."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import TypeAlias

import torch

Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]


def add(targets: Tensors, values: Tensors, factor: float) -> None:
    """Add values, times a factor, to the targets in place."""
    torch._foreach_add_(targets, values, alpha=factor)


def copy(targets: Tensors, values: Tensors) -> None:
    """Copy values into the targets."""
    torch._foreach_copy_(targets, values)


def scale_tensors(values: Tensors, factor: float) -> Tensors:
    """Return the values times a factor."""
    return torch._foreach_mul(values, factor)


def add_pairs(left: Tensors, right: Tensors) -> Tensors:
    """Return the pairwise sums of two lists."""
    return torch._foreach_add(left, right)
