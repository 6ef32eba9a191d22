"""What one silo computes in a round: its next model from its own, its neighbours' and its row of W.

Plain gossip is x_i ← x_i + Σ_j w_ij (x_j - x_i). CHOCO (Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, Algorithm
1) sends a compressed difference to a public copy x̂_i of the model, which all neighbours follow, and mixes the copies:
q_i = C(x_i - x̂_i), x̂_i ← x̂_i + q_i, then x_i ← x_i + gamma Σ_j w_ij (x̂_j - x̂_i). What a codec omits stays in
the difference and is sent later, so the silos agree exactly in the limit, where quantised models alone would stall.
With x̂ = x and gamma = 1 it is plain gossip.

A public copy is a chain: the copy after k steps is the sum of k decoded payloads, with the same bits everywhere. A
silo that missed steps pulls them, or the whole copy, before it confirms the edge. So lost messages delay an edge, and
never make two ends disagree about a copy, which would change the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fedplat.codecs import Codec
from fedplat.model import Vector, VectorBlocks, blocks, limit_spreads


def mix(
    own: Vector,
    neighbours: Iterable[tuple[float, Vector]],
    copy: Vector | None = None,
    gamma: float = 1.0,
    spreads: Sequence[range] = (),
) -> Vector:
    """Return a silo's next model: own + gamma Σ w (x_j - copy), where `copy` is its own public one, by default `own`.

    Each neighbour has its weight in the silo's row and its model, or its public copy. Sums are float64, and the result
    is float32, shape [entries]; in the columns of `spreads` (`Schema.spreads`) it is at least 0, though copies that a
    codec has changed may lead below. Raises `ValueError` if a model has another size.
    """
    reference, parts = own if copy is None else copy, list(neighbours)
    for _, vector in parts:
        if vector.shape != own.shape:
            raise ValueError(f"a neighbour's model has the shape {vector.shape}; expected {own.shape}")
    mixed = own.copy()
    for part in blocks(own.size):
        step = np.zeros(part.stop - part.start)
        for weight, vector in parts:
            step += weight * (vector[part].astype(np.float64) - reference[part])
        mixed[part] = own[part] + gamma * step
    limit_spreads(mixed, spreads)
    return mixed


def combine(
    own: tuple[float, Vector, float], neighbours: Iterable[tuple[float, Vector, float]]
) -> tuple[Vector, float]:
    """Return a silo's next sum and weight in push-sum, from (weight in its row, sum, weight) of itself and its senders.

    The model is the sum divided by the weight. Sums keep their type; use float64 ones where the total must not drift.
    """
    factor, vector, weight = own
    total = factor * vector.astype(np.float64)
    mass = factor * weight
    for share, other, its_weight in neighbours:
        total += share * other.astype(np.float64)
        mass += share * its_weight
    return total.astype(vector.dtype), mass


def compress(codec: Codec, model: Vector, copy: Vector, rng: np.random.Generator) -> tuple[bytes, Vector]:
    """Return the payload of a silo's difference to its public copy, and the next copy.

    Raises `CodecError` for a difference with NaN or infinite entries.
    """
    payload = b"".join(codec.encode(VectorBlocks(np.subtract(model, copy)), rng))
    return payload, follow(codec, copy, payload)


def follow(codec: Codec, copy: Vector, payload: bytes) -> Vector:
    """Return the next public copy of a neighbour from its payload. Raises `CodecError` for an invalid payload."""
    following = copy.copy()
    for part, step in zip(blocks(copy.size), codec.decode(payload, copy.size), strict=True):
        following[part] += step
    return following


def measure_quality(codec: Codec, vector: Vector, rng: np.random.Generator) -> float:
    """Return ω of a codec for a vector: 1 - ‖C(x) - x‖² / ‖x‖², in expectation what Assumption 1 of CHOCO bounds.

    1 is a codec without error. Of a zero vector it is 1.
    """
    _, error = compress(codec, vector, np.zeros_like(vector), rng)
    squared = float(np.sum(vector.astype(np.float64) ** 2))
    return 1.0 - float(np.sum((error.astype(np.float64) - vector) ** 2)) / squared if squared else 1.0


def choco_gamma(gap: float, beta: float, quality: float) -> float:
    """Return the step size of Theorem 2 of CHOCO, with which the error decreases by 1 - gap² ω / 82 a round.

    `gap` is δ, the spectral gap of W, `beta` is ‖I - W‖₂, and `quality` is ω. It holds in the worst case; in practice
    much larger steps converge as well, and faster.
    """
    return gap**2 * quality / (16 * gap + gap**2 + 4 * beta**2 + 2 * gap * beta**2 - 8 * gap * quality)


def choco_rate(gap: float, quality: float) -> float:
    """Return the factor by which the expected error of CHOCO decreases a round, at least, with `choco_gamma`."""
    return 1.0 - gap**2 * quality / 82.0
