"""zstd as an outer stage: lossless compression of the output of another codec.

Format: RFC 8878. Each chunk of the inner codec is one frame, preceded by its length (4 bytes). The size of a chunk is
bounded, so a decompression bomb is refused by its header.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import numpy as np
import zstandard

from fedplat import errors, model
from fedplat.codecs.codec import Codec, PlainSource

_LEVEL = 1
"""Higher levels look for repetitions, of which updates have none: level 3 saves 2 % at two thirds of the speed."""
_LENGTH_BYTES = 4
_FRAME_BYTES = 128
"""Bytes that the length and the frame add to an incompressible chunk, besides 1/256 of it (`ZSTD_COMPRESSBOUND`)."""
_MAX_CHUNK = 8 * model.BLOCK
"""Maximum size in bytes of a decompressed frame: no codec writes more for a block."""


def zstd(inner: Codec, item_bytes: int = 1) -> Codec:
    """Compress the chunks of a codec.

    With `item_bytes` above 1 (the size of the numbers in the chunks) the first bytes of all numbers of a chunk are
    compressed together, then the second ones, and so on: exponents are similar, mantissas are not.
    """

    def write(vector: model.Blocks, rng: np.random.Generator) -> Iterator[bytes]:
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        for chunk in inner.write(vector, rng):
            frame = compressor.compress(_split(chunk, item_bytes))
            yield len(frame).to_bytes(_LENGTH_BYTES, "little") + frame

    def max_bytes(size: int) -> int:
        most = inner.max_bytes(size)
        return most + most // 256 + _FRAME_BYTES * -(-size // model.BLOCK)

    return dataclasses.replace(inner, write=write, max_bytes=max_bytes, open=partial(_Frames, item_bytes=item_bytes))


class _Frames:
    """The chunks in frames, decompressed one at a time."""

    def __init__(self, payload: memoryview, item_bytes: int) -> None:
        self._frames = PlainSource(payload)
        self._chunk = PlainSource(memoryview(b""))
        self._item_bytes = item_bytes
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2 * _MAX_CHUNK)

    def take(self, count: int) -> memoryview | bytes:
        if count and self._chunk.at_end:
            length = int.from_bytes(self._frames.take(_LENGTH_BYTES), "little")
            self._chunk = PlainSource(memoryview(self._decompress(self._frames.take(length))))
        return self._chunk.take(count)

    def finish(self) -> None:
        self._chunk.finish()
        self._frames.finish()

    def _decompress(self, frame: memoryview) -> bytes:
        try:
            size = zstandard.get_frame_parameters(frame).content_size
            # Check before decompression, which allocates memory of the announced size.
            if not 0 < size <= _MAX_CHUNK or size % self._item_bytes:
                raise errors.CodecError(f"a frame claims {size} bytes; expected 1 to {_MAX_CHUNK}")
            chunk = self._decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise errors.CodecError(f"the payload cannot be decompressed: {exc}") from exc
        return _merge_planes(chunk, self._item_bytes)


def _split(chunk: bytes, item_bytes: int) -> bytes:
    return chunk if item_bytes == 1 else np.frombuffer(chunk, np.uint8).reshape(-1, item_bytes).T.tobytes()


def _merge_planes(chunk: bytes, item_bytes: int) -> bytes:
    return chunk if item_bytes == 1 else np.frombuffer(chunk, np.uint8).reshape(item_bytes, -1).T.tobytes()
