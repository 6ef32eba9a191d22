"""EDEN: a random rotation, then quantization to 1 to 4 bits per coordinate; unbiased. With 1 bit it is DRIVE.

Sources: Vargaftik et al. 2022, "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated
Learning", arXiv 2108.08842, Section 3 and Algorithm 1; Vargaftik et al. 2021, "DRIVE: One-bit Distributed Mean
Estimation", arXiv 2105.08339. A rotated vector y = R x of dimension d has coordinates that are approximately normal,
with variance ‖x‖² / d. They are quantized to the centroids of Lloyd and Max for the normal distribution: Q(√d y / ‖x‖).
The reader computes R⁻¹ S Q with the scale S = ‖x‖² / ⟨y, Q⟩, so that ⟨x, R⁻¹ S Q⟩ = ‖x‖² for every rotation. Hence, by
symmetry, the mean over rotations is x.

The rotation is random signs and the Hadamard transform (DRIVE, Section 6), H D / √d, preceded by another rotation of
dimension 64. With only one, the coordinates of a sparse vector, such as many updates, would not be normal: with 1 bit,
the means of entries next to one 30 times as large were found to become 0; with two rotations the error disappears.
A block of a vector is written as rows with independently rotated columns, each with its own scale.

The signs are generated from a seed in the payload by Philox (Salmon et al. 2011), a counter-based generator. NumPy
guarantees that its raw output does not change, so writer and reader agree on every machine.

Source: Pease 1968, "An Adaptation of the Fast Fourier Transform for Parallel Processing", J. ACM 15(2): every stage
adds and subtracts the two halves of its input and interleaves the results. So all stages are the same and read
contiguous memory; writes have a stride of whole rows. (The order of sums in BLAS depends on the processor.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.codecs.codec import Codec, Source, read_array, zstd
from fedplat.codecs.quantize import pack, packed_bytes, unpack
from fedplat.errors import CodecError
from fedplat.model import BLOCK, Blocks, Vector, blocks

_POSITIVE = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
"""The centroids above 0 for the normal distribution (Max 1960, "Quantizing for Minimum Distortion", Table I)."""
CENTROIDS = {
    bits: np.array([*(-value for value in reversed(positive)), *positive], np.float32)
    for bits, positive in _POSITIVE.items()
}
_MAX_DIMENSION = 1024
"""At 1024 dimensions coordinates are normal enough (the error is within 1 % of its limit), and 64 columns are fast."""
_MIN_DIMENSION = 16
_FIRST_DIMENSION = 64
_SEED_BYTES = 8


class Eden(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="codec", tag="eden"):
    """Options of EDEN: `bits` bits per parameter, and 1/32 for the scales."""

    bits: Literal[1, 2, 3, 4] = 4
    """Bits per parameter; the scales use 1/32 more."""
    zstd: bool = False
    """True if the payload is compressed with zstd."""

    def __post_init__(self) -> None:
        if self.bits not in CENTROIDS:
            raise ValueError(f"bits is {self.bits!r}; expected 1 to 4")

    def build(self) -> Codec:
        """Return the codec with these options."""
        codec = eden(self.bits)
        return zstd(codec) if self.zstd else codec


def eden(bits: int) -> Codec:
    """Return the codec of Section 3 of the paper."""
    centroids = CENTROIDS[bits]

    def write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
        seed = int(rng.integers(0, 2**64, dtype=np.uint64))
        rotations = _Rotations(seed)
        prefix = seed.to_bytes(_SEED_BYTES, "little")
        for block in vector:
            codes, scales = _quantize(block, rotations, centroids)
            yield prefix + scales.astype("<f4").tobytes() + pack(codes.reshape(-1), bits)
            prefix = b""

    def read(source: Source, size: int) -> Iterator[Vector]:
        rotations = _Rotations(int.from_bytes(source.take(_SEED_BYTES if size else 0), "little"))
        for block in blocks(size):
            count = block.stop - block.start
            dimension, num_columns = _shape(count)
            scales = read_array(source, "<f4", num_columns).astype(np.float32)
            if not ((scales >= 0) & (scales <= _largest_scale(dimension, centroids))).all():
                raise CodecError("the payload has a scale that is negative, NaN or too large")
            codes = unpack(source, dimension * num_columns, bits)
            rows = rotations.inverse(np.take(centroids, codes).reshape(dimension, num_columns))
            rows *= scales
            yield rows.reshape(-1)[:count]

    return Codec(write=write, read=read, max_bytes=lambda size: _num_bytes(size, bits))


class _Rotations:
    """The rotations of a vector's blocks, in order: R = H D' H' D without the normalizing factor."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Philox(key=seed)

    def forward(self, rows: Rows) -> Rows:
        """Return R times the rows of the next block; overwrites the rows."""
        first, second = self._flips(rows.size), self._flips(rows.size)
        _flip(rows, first)
        rows = _first_hadamard(rows)
        _flip(rows, second)
        return hadamard(rows)

    def inverse(self, rows: Rows) -> Rows:
        """Return R's transpose times the rows of the next block; overwrites the rows."""
        first, second = self._flips(rows.size), self._flips(rows.size)
        rows = hadamard(rows)
        _flip(rows, second)
        rows = _first_hadamard(rows)
        _flip(rows, first)
        return rows

    def _flips(self, count: int) -> npt.NDArray[np.uint32]:
        """Draw random sign bits of float32 numbers: the highest bit or 0, with equal probability."""
        draws = self._generator.random_raw(-(-count // 64)).astype("<u8", copy=False)
        flips = np.unpackbits(draws.view(np.uint8), count=count, bitorder="little").astype(np.uint32)
        flips <<= np.uint32(31)
        return flips


def _flip(rows: Rows, flips: npt.NDArray[np.uint32]) -> None:
    bits = rows.reshape(-1).view(np.uint32)
    bits ^= flips


def _first_hadamard(rows: Rows) -> Rows:
    return hadamard(rows.reshape(min(rows.shape[0], _FIRST_DIMENSION), -1)).reshape(rows.shape)


def _quantize(
    block: Vector, rotations: _Rotations, centroids: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return the codes [d, m] of a block, and the scale of each column: S times the factor of the rotation."""
    dimension, num_columns = _shape(block.size)
    rows = np.zeros((dimension, num_columns), np.float32)
    # An exact factor that brings the largest magnitude near 1, so that no square overflows or underflows.
    largest = max(block.max(), -block.min())
    factor = np.float32(2.0 ** min(-int(np.frexp(largest)[1]), 127))
    np.multiply(block, factor, out=rows.reshape(-1)[: block.size])
    rotated = rotations.forward(rows)
    norms = np.sqrt(np.square(rotated).sum(axis=0) / np.float32(dimension))
    normalized = rotated * np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    codes = np.zeros(rows.shape, np.uint8)
    for boundary in (centroids[1:] + centroids[:-1]) / 2:
        codes += normalized > boundary
    products = (np.take(centroids, codes) * normalized).sum(axis=0)
    scales = np.divide(norms.astype(np.float64), products, out=np.zeros(num_columns), where=norms > 0)
    scales /= min(dimension, _FIRST_DIMENSION) * float(factor)
    if (scales > _largest_scale(dimension, centroids)).any():
        raise CodecError("the vector has entries that are too large to be rotated")
    return codes, scales.astype(np.float32)


def _largest_scale(dimension: int, centroids: npt.NDArray[np.float32]) -> float:
    """Return the largest scale for which every coordinate, a sum of centroids times the scale, is finite."""
    num_summands = dimension * min(dimension, _FIRST_DIMENSION)
    return float(np.finfo(np.float32).max) / (2 * num_summands * float(centroids[-1]))


def _shape(count: int) -> tuple[int, int]:
    """Return the numbers of rows and columns for `count` entries; padding is at most an eighth, or 15 entries."""
    fitting = 2 ** max(count // 8, 1).bit_length() // 2
    dimension = min(max(fitting, _MIN_DIMENSION), _MAX_DIMENSION)
    return dimension, -(-count // dimension)


def _num_bytes(size: int, bits: int) -> int:
    total = _SEED_BYTES if size else 0
    for number, count in ((size // BLOCK, BLOCK), (1, size % BLOCK)):
        dimension, num_columns = _shape(count)
        total += number * (4 * num_columns + packed_bytes(dimension * num_columns, bits))
    return total


Rows = npt.NDArray[np.float32]


def hadamard(rows: Rows) -> Rows:
    """Return H times `rows` of shape [2^k, m]: every column is transformed, in natural order, without a factor.

    Overwrites `rows`. H is its own inverse, except for the factor 2^k.

    >>> hadamard(np.array([[1], [2]], np.float32)).ravel()
    array([ 3., -1.], dtype=float32)
    """
    dimension, num_columns = rows.shape
    half = dimension // 2
    result = np.empty_like(rows)
    for _ in range(dimension.bit_length() - 1):
        pairs = result.reshape(half, 2, num_columns)
        np.add(rows[:half], rows[half:], out=pairs[:, 0])
        np.subtract(rows[:half], rows[half:], out=pairs[:, 1])
        rows, result = result, rows
    return rows
