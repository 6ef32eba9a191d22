"""bfloat16: the upper half of a float32, rounded to nearest, ties to even.

Source: Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training", arXiv 1905.12322, Section 3. The
relative error of an entry is at most 2⁻⁸ (of a denormal, the absolute error 2⁻¹³⁴).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.codecs.codec import Codec, Source, read_array
from fedplat.codecs.zstd import zstd
from fedplat.errors import CodecError
from fedplat.model import BLOCK, Blocks, Vector, blocks

_LARGEST = np.uint32(0x7F7F)
_MAGNITUDE = np.uint32(0x7FFF)


class Bf16(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="codec", tag="bf16"):
    """Options of bfloat16: 16 bits per parameter."""

    zstd: bool = False
    """True if the payload is compressed with zstd: about 12 bits, since the exponents of an update are similar."""

    def build(self) -> Codec:
        """Return the codec with these options."""
        # No error feedback: the rounding error (2⁻⁹ of an entry) does not justify a vector on every client's disk.
        codec = Codec(write=_write, read=_read, max_bytes=lambda size: 2 * size)
        return zstd(codec, item_bytes=2) if self.zstd else codec


def to_bf16(values: Vector) -> npt.NDArray[np.uint16]:
    """Return the upper halves of float32 numbers, rounded; a number that would become infinite becomes the largest."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    # Ties to even: add half of the last place, minus one bit if the upper half is even, then truncate.
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    if values.size and (rounded & _MAGNITUDE).max() > _LARGEST:
        rounded = np.where((rounded & _MAGNITUDE) > _LARGEST, (rounded & np.uint32(0x8000)) | _LARGEST, rounded)
    return rounded.astype("<u2")


def from_bf16(halves: npt.NDArray[np.uint16], out: Vector) -> Vector:
    """Decode upper halves to float32 in `out`, and return it. Raises `CodecError` if a number is NaN or infinite."""
    bits = out.view(np.uint32)
    bits[:] = halves
    bits <<= np.uint32(16)
    if not np.isfinite(out).all():
        raise CodecError("the payload has NaN or infinite entries")
    return out


def _write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    return (to_bf16(block).tobytes() for block in vector)


def _read(source: Source, size: int) -> Iterator[Vector]:
    scratch = np.empty(min(BLOCK, size), np.float32)
    for block in blocks(size):
        count = block.stop - block.start
        yield from_bf16(read_array(source, "<u2", count), scratch[:count])
