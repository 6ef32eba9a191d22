"""What one silo computes in a round: its next model, the files that silos exchange, and integers for the sums of rings.

Plain gossip is x_i ← x_i + Σ_j w_ij (x_j - x_i). CHOCO (Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, Algorithm
1) sends a compressed difference to a public copy x̂_i of the model, which all neighbours follow, and mixes the copies:
q_i = C(x_i - x̂_i), x̂_i ← x̂_i + q_i, then x_i ← x_i + gamma Σ_j w_ij (x̂_j - x̂_i). What a codec omits stays in
the difference and is sent later, so the silos agree exactly in the limit, where quantised models alone would stall.
With x̂ = x and gamma = 1 it is plain gossip.

A public copy is a chain: the copy after k steps is the sum of k decoded payloads, with the same bits everywhere. A
silo that missed steps pulls them, or the whole copy, before it confirms the edge. So lost messages delay an edge, and
never make two ends disagree about a copy, which would change the mean.

Plain gossip: the tensor "model", float32 [entries]; with a codec it is the public copy. Push-sum: "sum", float64
[entries], and "weight", float64 [1]; the model is their quotient. The mean of a ring is a model file of the job.

A silo rounds each entry times its share of the mean to steps of a quantizer. The shares add up to 1 and all entries are
within a common bound, so the sum is within the bound too, and a step is at most 2^-29 of the bound. Negative
numbers wrap around.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fedplat.codecs import Codec
from fedplat.errors import GossipError, ModelError
from fedplat.gossip.messages import MAX_ENTRY
from fedplat.model import (
    FLOATING,
    ModelFile,
    Parameters,
    Schema,
    TensorSpec,
    Vector,
    VectorBlocks,
    blocks,
    is_finite,
    limit_spreads,
)


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


Sum = npt.NDArray[np.float64]
MAX_WEIGHT = 2.0**20
"""The weights of all silos add up to their number. With a larger one, sums could exceed the range of float64."""


def make_model_file(vector: Vector) -> Parameters:
    """Return the file of a model, float32 [entries]; it shares the memory of the vector.

    Raises `GossipError` if an entry is NaN or infinite.
    """
    _check_model(vector)
    return Parameters(_model_schema(vector.size), np.ascontiguousarray(vector, np.float32).view(np.uint8))


def make_sum_file(total: Sum, weight: float) -> Parameters:
    """Return the file of a sum, float64 [entries], and its weight in push-sum.

    Raises `GossipError` unless their quotient, the model, is finite.
    """
    _check_sum(total, weight)
    file = Parameters.zeros(_sum_schema(total.size))
    file["sum"], file["weight"] = total, [weight]
    return file


def file_bytes(size: int, *, directed: bool) -> int:
    """Return the size of the file of a model of this many entries."""
    return (_sum_schema(size) if directed else _model_schema(size)).file_size_bytes


def read_model_file(path: str | os.PathLike[str], size: int) -> Vector:
    """Return the model in a file. Raises `GossipError` unless it is one of finite numbers with this many entries."""
    model = _open(path, _model_schema(size))["model"]
    _check_model(model)
    return model


def read_sum_file(path: str | os.PathLike[str], size: int) -> tuple[Sum, float]:
    """Return sum and weight in a file. Raises `GossipError` unless their quotient is a finite model of this size."""
    found = _open(path, _sum_schema(size))
    total, weight = found["sum"], float(found["weight"][0])
    _check_sum(total, weight)
    return total, weight


def replace_entries(base: Parameters, vector: Vector) -> Parameters:
    """Return a copy of a model with other floating-point entries, float32 [entries]; the others are kept.

    An entry beyond the range of its dtype becomes infinite.
    """
    model, start = base.copy(), 0
    with np.errstate(over="ignore"):
        for run in model.schema.segments:
            if run.dtype in FLOATING:
                model.segment(run)[:] = vector[start : start + run.count]
                start += run.count
    return model


def make_mean_file(initial: Parameters, mean: Vector) -> Parameters:
    """Return the model of a mean; it has the other entries of the initial model, so that all silos make the same file.

    Raises `GossipError` if an entry is beyond the range of its dtype.
    """
    model = replace_entries(initial, mean)
    if not is_finite(model.to_blocks()):
        raise GossipError("the mean has entries beyond the range of the model's dtype")
    return model


def read_mean_file(path: str | os.PathLike[str], schema: Schema) -> Vector:
    """Return the entries of a mean's model, float32 [entries]. Raises `GossipError` unless it has this schema."""
    model = _open(path, schema)
    if not model.is_finite():
        raise GossipError("the mean has NaN or infinite entries")
    return model.to_vector()


def _model_schema(size: int) -> Schema:
    return Schema((TensorSpec("model", "F32", (size,)),))


def _sum_schema(size: int) -> Schema:
    return Schema((TensorSpec("sum", "F64", (size,)), TensorSpec("weight", "F64", (1,))))


def _check_model(vector: Vector) -> None:
    if not np.isfinite(vector).all():
        raise GossipError("the model has NaN or infinite entries")


def _check_sum(total: Sum, weight: float) -> None:
    if not 0.0 < weight <= MAX_WEIGHT:
        raise GossipError(f"the weight of the sum is {weight}; expected more than 0, and at most {MAX_WEIGHT:g}")
    if not np.all(np.abs(total) <= MAX_ENTRY * weight):  # false for NaN, too
        raise GossipError("the sum has entries that are NaN, or too large for its weight")


def _open(path: str | os.PathLike[str], expected: Schema) -> Parameters:
    try:
        found = ModelFile.open(path)  # other than `Parameters.open` it accepts one header only
        if difference := found.schema.difference_from(expected):
            raise GossipError(f"the file is no model of this job: {difference}")
        return Parameters.open(path)
    except ModelError as exc:
        raise GossipError(f"the file is no model: {exc}") from exc


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


def read_integer_mean(total: Integers, bound: float, members: int) -> Vector:
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
