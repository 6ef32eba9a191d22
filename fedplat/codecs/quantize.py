"""Codecs by the precision of each entry: float32, bfloat16, and stochastic quantization to a few bits.

Source: Alistarh et al. 2017, "QSGD", arXiv 1610.02132, Section 3.1: an entry x of a bucket becomes ‖x‖ q / s, where q
is one of the two integers next to s x / ‖x‖, chosen with the probabilities that make q unbiased. The norm is the
largest magnitude, and buckets have 512 entries (Section 5). So the error of an entry is at most its bucket's largest
magnitude / s, with s = 127 for 8 bits and 7 for 4.

Source: Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training", arXiv 1905.12322, Section 3. The
relative error of an entry is at most 2⁻⁸ (of a denormal, the absolute error 2⁻¹³⁴).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.codecs.codec import Codec, Source, read_array, zstd
from fedplat.errors import CodecError
from fedplat.model import BLOCK, Blocks, Vector, blocks

BUCKET = 512


class Quantize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="codec", tag="quantize"):
    """Options of stochastic quantization: `bits` bits per parameter, and 1/16 for the scales."""

    bits: Literal[8, 4] = 8
    """Bits per parameter; the scales use 1/16 more."""
    zstd: bool = False
    """True if the payload is compressed with zstd."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits!r}; expected 8 or 4")

    def build(self) -> Codec:
        """Return the codec with these options."""
        codec = quantize(self.bits)
        return zstd(codec) if self.zstd else codec


def quantize(bits: int) -> Codec:
    """Return the codec for stochastic quantization to 2^bits - 1 levels, which are symmetric and include zero."""
    levels = np.float32(2 ** (bits - 1) - 1)

    def write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
        for block in vector:
            buckets = _buckets(block)
            largest = np.abs(buckets).max(axis=1)
            # Do not multiply by levels / largest: it is infinite if the largest magnitude is denormal.
            values = buckets / np.where(largest > 0, largest, 1)[:, None]
            values *= levels
            # Adding a uniform number from 0 to 1 and rounding down is stochastic rounding.
            values += _uniform(rng, values.size).reshape(values.shape)
            np.floor(values, out=values)
            values += levels
            codes = values.astype(np.uint8).reshape(-1)[: block.size]
            yield largest.astype("<f4").tobytes() + pack(codes, bits)

    def read(source: Source, size: int) -> Iterator[Vector]:
        for block in blocks(size):
            count = block.stop - block.start
            largest = read_array(source, "<f4", -(-count // BUCKET)).astype(np.float32)
            if not (np.isfinite(largest) & (largest >= 0)).all():
                raise CodecError("the payload has a scale that is negative, NaN or infinite")
            codes = unpack(source, count, bits)
            if codes.max() > 2 * levels:
                raise CodecError(f"the payload has a number above {int(2 * levels)}")
            values = codes.astype(np.float32)
            values -= levels
            values /= levels  # at most 1, so no product overflows
            buckets = _buckets(values)
            buckets *= largest[:, None]
            yield buckets.reshape(-1)[:count]

    return Codec(write=write, read=read, max_bytes=lambda size: _num_bytes(size, bits))


def _num_bytes(size: int, bits: int) -> int:
    whole, rest = divmod(size, BLOCK)
    return sum(
        number * (4 * -(-count // BUCKET) + packed_bytes(count, bits)) for number, count in ((whole, BLOCK), (1, rest))
    )


def _buckets(values: Vector) -> npt.NDArray[np.float32]:
    """Return the values in rows of one bucket each, padded with zeros; a view if no padding is needed."""
    if missing := -values.size % BUCKET:
        values = np.concatenate([values, np.zeros(missing, np.float32)])
    return values.reshape(-1, BUCKET)


def _uniform(rng: np.random.Generator, count: int) -> Vector:
    """Draw numbers above 0 and below 1, in steps of 2⁻¹⁶: three times as fast as with 24 bits each."""
    draws = rng.integers(0, 2**64, -(-count // 4), dtype=np.uint64).astype("<u8", copy=False)
    values = draws.view("<u2")[:count].astype(np.float32)
    values += np.float32(0.5)
    values *= np.float32(2.0**-16)
    return values


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="codec", tag="none"):
    """Options of the codec without compression: 32 bits per parameter."""

    zstd: bool = False
    """True if the payload is compressed with zstd: about 28 bits, since the exponents of an update are similar."""

    def build(self) -> Codec:
        """Return the codec with these options."""
        codec = Codec(write=_write_plain, read=_read_plain, max_bytes=lambda size: 4 * size)
        return zstd(codec, item_bytes=4) if self.zstd else codec


def _write_plain(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    return (block.astype("<f4", copy=False).tobytes() for block in vector)


def _read_plain(source: Source, size: int) -> Iterator[Vector]:
    for block in blocks(size):
        values = read_array(source, "<f4", block.stop - block.start).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise CodecError("the payload has NaN or infinite entries")
        yield values


_LARGEST = np.uint32(0x7F7F)
_MAGNITUDE = np.uint32(0x7FFF)


class Bf16(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="codec", tag="bf16"):
    """Options of bfloat16: 16 bits per parameter."""

    zstd: bool = False
    """True if the payload is compressed with zstd: about 12 bits, since the exponents of an update are similar."""

    def build(self) -> Codec:
        """Return the codec with these options."""
        # No error feedback: the rounding error (2⁻⁹ of an entry) does not justify a vector on every client's disk.
        codec = Codec(write=_write_bf16, read=_read_bf16, max_bytes=lambda size: 2 * size)
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


def _write_bf16(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    return (to_bf16(block).tobytes() for block in vector)


def _read_bf16(source: Source, size: int) -> Iterator[Vector]:
    scratch = np.empty(min(BLOCK, size), np.float32)
    for block in blocks(size):
        count = block.stop - block.start
        yield from_bf16(read_array(source, "<u2", count), scratch[:count])


Codes = npt.NDArray[np.uint8]


def packed_bytes(count: int, bits: int) -> int:
    """Return the size in bytes of `count` packed numbers."""
    return count if bits == 8 else -(-count // 8) * bits


def pack(codes: Codes, bits: int) -> bytes:
    """Pack contiguous numbers below 2^bits, 1 to 8 bits each; the last group of eight is padded with zeros."""
    if bits == 8:
        return codes.tobytes()
    if missing := -codes.size % 8:
        codes = np.concatenate([codes, np.zeros(missing, np.uint8)])
    # Eight numbers are one 64-bit word, packed by shifts and masks: no loop over numbers, no strided access.
    words = codes.view("<u8")
    packed = np.zeros(words.size, "<u8")
    for place, mask in _groups(bits):
        packed |= (words >> np.uint64((8 - bits) * place)) & mask
    return packed.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()


def unpack(source: Source, count: int, bits: int) -> Codes:
    """Unpack the next `count` numbers of a payload. Raises `CodecError` unless the padding is zeros."""
    content = np.frombuffer(source.take(packed_bytes(count, bits)), np.uint8)
    if bits == 8:
        return content
    padded = np.zeros((content.size // bits, 8), np.uint8)
    padded[:, :bits] = content.reshape(-1, bits)
    packed = padded.reshape(-1).view("<u8")
    words = np.zeros(packed.size, "<u8")
    for place, mask in _groups(bits):
        words |= (packed & mask) << np.uint64((8 - bits) * place)
    codes = words.view(np.uint8)
    if codes[count:].any():
        raise CodecError("the payload has padding bits that are not 0")
    return codes[:count]


def _groups(bits: int) -> list[tuple[int, np.uint64]]:
    return [(place, np.uint64((2**bits - 1) << (bits * place))) for place in range(8)]
