"""Models as 32-bit integers that add up without rounding, so that all silos of a ring get the same bits.

A silo rounds each entry times its share of the mean to steps of a quantizer. The shares add up to 1 and all entries are
within a common bound, so the sum is within the bound too, and a step is at most 2^-29 of the bound. Negative
numbers wrap around.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fedplat.model import Vector, blocks

Integers = npt.NDArray[np.uint32]


def find_largest(model: Vector) -> float:
    """Return the largest magnitude of an entry; the bound of a ring is at least that of each silo. NaN if one is."""
    return float(np.max(np.abs(model))) if model.size else 0.0


def quantize_share(model: Vector, share: float, bound: float, members: int) -> Integers:
    """Return a silo's part of the mean as integers: round(share x / step), shape [entries].

    Raises `ValueError` for a share that is not from 0 to 1, and for entries that are not finite or beyond the bound.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share is {share}; expected 0 to 1")
    largest, step = find_largest(model), _step(bound, members)
    if not largest <= bound:
        raise ValueError(f"the model has an entry of magnitude {largest:g}; expected at most the bound, {bound:g}")
    quantized = np.empty(model.size, np.uint32)
    for part in blocks(model.size):
        scaled = model[part].astype(np.float64) * (share / step)
        quantized[part] = np.rint(scaled, out=scaled).astype(np.int64).astype(np.uint32)  # modulo 2^32
    return quantized


def read_mean(total: Integers, bound: float, members: int) -> Vector:
    """Return the mean from the sum of all parts modulo 2^32: float32, the same bits everywhere."""
    return (total.view(np.int32) * np.float64(_step(bound, members))).astype(np.float32)


def add_parts(parts: Iterable[Integers]) -> Integers:
    """Return the sum of parts modulo 2^32, what a ring computes without anyone having two parts."""
    first, *others = parts
    total = first.copy()
    for part in others:
        np.add(total, part, out=total)
    return total


def digest_mean(mean: Vector) -> str:
    """Return the SHA-256 of a mean, by which silos and the coordinator know that all have the same."""
    return hashlib.sha256(mean.astype("<f4", copy=False).tobytes()).hexdigest()


def _step(bound: float, members: int) -> float:
    """Return the quantizer's step: a power of two with which the sum of all parts and their rounding errors fits."""
    if not 0.0 <= bound < math.inf or not 1 <= members < 2**16:
        raise ValueError(f"the bound is {bound} of {members} silos; expected a finite one, and fewer than 65536 silos")
    _, exponent = math.frexp(bound)  # bound < 2^exponent
    return math.ldexp(1.0, max(exponent, -100) - 30)
