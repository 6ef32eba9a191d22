"""Clipping: no single update moves the model by more than a given L2 norm.

Source: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963,
Section 3 (flat clipping): Δ ← Δ · min(1, S / ‖Δ‖).
"""

from __future__ import annotations

import dataclasses
import math

from fedplat.aggregate.algebra import Contribution, Partial, Rule, Wrapper
from fedplat.model import Blocks
from fedplat.model.blocks import ShardReduce, l2_norm, scale_vector, single_shard

# Scaled entries are rounded to float32, which can increase the norm by up to 2⁻²³ of itself; the bound must hold after
# rounding too.
_ROUNDING = 1 - 2.0**-22


def clip_by_norm(max_norm: float) -> Wrapper:
    """Scale every update with an L2 norm above `max_norm` down to it, before it is folded.

    `max_norm` is in the units of the model's entries. An update within the bound is folded unchanged, bit for bit.
    Updates are read once for their norm, and once more to be folded. Raises `ValueError` for a bound that is not
    positive and finite, and in `fold` for an update with NaN or infinite entries, which has no norm to bound.
    """
    if not (max_norm > 0 and math.isfinite(max_norm)):
        raise ValueError(f"max_norm is {max_norm}; expected a finite number above 0")

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            return inner.fold(
                partial, clip_to_norm(update, finite_norm(update, partial.reduce_shards), max_norm), contribution
            )

        return dataclasses.replace(inner, fold=fold)

    return wrap


def finite_norm(update: Blocks, reduce_shards: ShardReduce = single_shard) -> float:
    """Return the L2 norm of an update. Raises `ValueError` if it is not finite."""
    norm = l2_norm(update, reduce_shards)
    if not math.isfinite(norm):
        raise ValueError("the update has NaN or infinite entries and cannot be clipped")
    return norm


def clip_to_norm(update: Blocks, norm: float, max_norm: float) -> Blocks:
    """Return an update of L2 norm `norm`, scaled down to a norm of at most `max_norm`."""
    return update if norm <= max_norm else scale_vector(update, max_norm / norm * _ROUNDING)
