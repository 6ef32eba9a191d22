"""Bit packing of small numbers: `bits` bits for each, so eight of them in `bits` bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedplat.codecs.codec import Source
from fedplat.errors import CodecError

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
