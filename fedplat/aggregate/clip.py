"""Clipping: no single update moves the model by more than a given L2 norm.

Source: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963,
Section 3 (flat clipping): Δ ← Δ · min(1, S / ‖Δ‖).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from fedplat.aggregate.algebra import Contribution, Partial, Rule, Wrapper
from fedplat.model import BLOCK, Blocks, Vector

# Scaled entries are rounded to float32, which could lift the norm by up to 2⁻²³ of itself; the bound must
# hold after rounding too.
_ROUNDING = 1 - 2.0**-22


def clip_by_norm(max_norm: float) -> Wrapper:
    """Scales every update whose L2 norm is above `max_norm` down to it, before it is folded.

    `max_norm` is in the units of the model's entries. An update within the bound is folded as it is, bit for
    bit; it is read once for its norm, and once more to be folded. Raises `ValueError` for a bound that is not positive
    and finite, and, in `fold`, for an update with NaN or infinite entries, since those have no norm to bound.
    """
    if not (max_norm > 0 and math.isfinite(max_norm)):
        raise ValueError(f"max_norm is {max_norm}; expected a finite number above 0")

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            return inner.fold(partial, _clipped(update, max_norm), contribution)

        return dataclasses.replace(inner, fold=fold)

    return wrap


def l2_norm(vector: Blocks) -> float:
    """The Euclidean norm of a float32 vector, summed in float64; the same bits on every machine."""
    wide = np.empty(min(BLOCK, vector.size), np.float64)
    total = 0.0
    for block in vector:
        squares = wide[: block.size]
        squares[:] = block
        # Not np.dot: BLAS sums in an order that depends on the processor and its number of threads.
        total += float(np.square(squares, out=squares).sum())
    return math.sqrt(total)


class _Scaled:
    """A vector times a factor, computed block by block as it is read."""

    def __init__(self, vector: Blocks, factor: np.float32) -> None:
        self._vector = vector
        self._factor = factor

    @property
    def size(self) -> int:
        return self._vector.size

    def __iter__(self) -> Iterator[Vector]:
        scratch = np.empty(min(BLOCK, self.size), np.float32)
        for block in self._vector:
            yield np.multiply(block, self._factor, out=scratch[: block.size])


def _clipped(update: Blocks, max_norm: float) -> Blocks:
    norm = l2_norm(update)
    if not math.isfinite(norm):
        raise ValueError("the update has NaN or infinite entries and cannot be clipped")
    if norm <= max_norm:
        return update
    return _Scaled(update, np.float32(max_norm / norm * _ROUNDING))
