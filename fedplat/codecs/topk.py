"""Top-k: the entries of the largest magnitude and their indices; all other entries become 0. Biased.

Sources: Lin et al. 2018, "Deep Gradient Compression", arXiv 1712.01887, Section 3.1; Stich et al. 2018, "Sparsified SGD
with Memory", arXiv 1809.07599, Definition 2.1: the error is at most (1 - k/d) ‖x‖². The omitted entries must be stored
and sent later (`with_error_feedback`).

The k entries are selected over the whole vector, as in a radix sort: two passes count the upper and the lower halves of
the magnitudes, so the vector is not copied. In each block the gaps between indices have a geometric distribution, for
which a Rice code (Golomb 1966) is within 0.1 bits of the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.codecs.codec import Codec, Source, read_array, zstd
from fedplat.codecs.quantize import from_bf16, pack, to_bf16, unpack
from fedplat.errors import CodecError
from fedplat.model import BLOCK, Blocks, Vector, blocks

Indices = npt.NDArray[np.integer[Any]]
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_HEADER_BYTES = 8


class TopK(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="codec", tag="topk"):
    """Options of top-k.

    The payload has about `fraction` (24 + log2(1 / fraction)) bits per parameter; fp32 adds 16 bits for each value.
    """

    fraction: Annotated[float, msgspec.Meta(ge=0.001, le=1)] = 0.01
    """The fraction of the entries that is sent, at least one entry."""
    values: Literal["bf16", "fp32"] = "bf16"
    """The type of the sent values."""
    zstd: bool = False
    """True if the payload is compressed with zstd."""

    def __post_init__(self) -> None:
        if not 0.001 <= self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction!r}; expected 0.001 to 1")
        if self.values not in ("bf16", "fp32"):
            raise ValueError(f"values is {self.values!r}; expected bf16 or fp32")

    def build(self) -> Codec:
        """Return the codec with these options."""
        codec = topk(self.fraction, self.values)
        return zstd(codec) if self.zstd else codec


def topk(fraction: float, values: Literal["bf16", "fp32"]) -> Codec:
    """Return the codec for the k = ceil(fraction * size) entries of the largest magnitude; of equal ones, the first."""
    # The best Golomb parameter, as a power of two, for gaps with the mean 1 / fraction.
    bits = min(max(int(math.log2(math.log(2) / fraction)), 0), 8)
    half = values == "bf16"

    def num_kept(size: int) -> int:
        return min(math.ceil(fraction * size), size)

    def write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
        threshold, num_equal = _threshold(vector, num_kept(vector.size))
        for block in vector:
            magnitudes = block.view(np.uint32) & _MAGNITUDE
            chosen = magnitudes > threshold
            equal = np.flatnonzero(magnitudes == threshold)[:num_equal]
            num_equal -= equal.size
            chosen[equal] = True
            indices = np.flatnonzero(chosen)
            kept = block[indices]
            yield _pack_indices(indices, bits) + (to_bf16(kept).tobytes() if half else kept.astype("<f4").tobytes())

    def read(source: Source, size: int) -> Iterator[Vector]:
        missing = num_kept(size)
        scratch = np.empty(min(BLOCK, size), np.float32)
        for block in blocks(size):
            result = scratch[: block.stop - block.start]
            result[:] = 0
            indices = _unpack_indices(source, min(result.size, missing), result.size, bits)
            missing -= indices.size
            result[indices] = _values(source, indices.size, half)
            yield result
        if missing:
            raise CodecError(f"the payload has {missing} entries too few")

    def max_bytes(size: int) -> int:
        num_blocks, kept = -(-size // BLOCK), num_kept(size)
        gaps = (kept * (bits + 1) + (size >> bits)) // 8
        return gaps + kept * (2 if half else 4) + num_blocks * (_HEADER_BYTES + bits + 1)

    return Codec(write=write, read=read, max_bytes=max_bytes, needs_feedback=True)


def _threshold(vector: Blocks, count: int) -> tuple[int, int]:
    """Return the `count`-th largest magnitude, as bits, and the number of selected entries equal to it."""
    upper = np.zeros(1 << 15, np.int64)
    for block in vector:
        magnitudes = block.view(np.uint32) & _MAGNITUDE
        # bincount needs this type, and takes five times as long if it converts the numbers itself.
        upper += np.bincount((magnitudes >> np.uint32(16)).astype(np.intp), minlength=upper.size)
    top, count = _largest(upper, count)
    lower = np.zeros(1 << 16, np.int64)
    for block in vector:
        magnitudes = block.view(np.uint32) & _MAGNITUDE
        within = magnitudes[(magnitudes >> np.uint32(16)) == top]
        np.add.at(lower, within & np.uint32(0xFFFF), 1)  # few entries: avoids a second histogram of a block's size
    bottom, count = _largest(lower, count)
    return top << 16 | bottom, count


def _largest(histogram: npt.NDArray[np.int64], count: int) -> tuple[int, int]:
    """Return the bin of the `count`-th largest entry in a histogram, and its rank within that bin."""
    at_least = np.cumsum(histogram[::-1])[::-1]
    place = int(np.searchsorted(-at_least, -count, side="right")) - 1
    return place, count - int(at_least[place] - histogram[place])


def _pack_indices(indices: Indices, bits: int) -> bytes:
    """Encode increasing indices: their number, the size of the unary parts of the gaps, those parts, the remainders."""
    gaps = np.diff(indices, prepend=-1) - 1
    ends = np.cumsum((gaps >> bits) + 1)
    unary = np.zeros(int(ends[-1]) if ends.size else 0, np.bool_)
    unary[ends - 1] = True
    parts = np.packbits(unary, bitorder="little").tobytes()
    header = np.array([indices.size, len(parts)], "<u4").tobytes()
    return header + parts + (pack((gaps & ((1 << bits) - 1)).astype(np.uint8), bits) if bits else b"")


def _unpack_indices(source: Source, most: int, size: int, bits: int) -> Indices:
    """Decode the indices of a block of `size` entries: at most `most`, increasing, and in range."""
    count, num_unary = (int(number) for number in read_array(source, "<u4", 2))
    if count > most:
        raise CodecError(f"the payload has {count} entries in a block; expected at most {most}")
    if num_unary > (count + (size >> bits)) // 8 + 1:
        raise CodecError(f"the payload has {num_unary} bytes of gaps; expected fewer")
    ends = np.flatnonzero(np.unpackbits(read_array(source, "u1", num_unary), bitorder="little")) + 1
    if ends.size != count or num_unary != (-(-int(ends[-1]) // 8) if count else 0):
        raise CodecError(f"the payload has {ends.size} gaps in {num_unary} bytes; expected {count} and no byte more")
    gaps = (np.diff(ends, prepend=0) - 1) << bits
    if bits:
        gaps |= unpack(source, count, bits)
    indices = np.cumsum(gaps + 1) - 1
    if count and indices[-1] >= size:
        raise CodecError(f"the payload has an entry at {indices[-1]} of a block; expected less than {size}")
    return indices


def _values(source: Source, count: int, half: bool) -> Vector:
    if half:
        return from_bf16(read_array(source, "<u2", count), np.empty(count, np.float32))
    values = read_array(source, "<f4", count).astype(np.float32)
    if not np.isfinite(values).all():
        raise CodecError("the payload has NaN or infinite entries")
    return values
