"""The definition of a codec, and what is put around one: error feedback, zstd, and a guard for the code of plugins.

- `write(vector, rng)` yields the payload, one chunk for each block of the vector;
- `read(source, size)` yields the blocks again, from untrusted chunks;
- `max_bytes(size)` returns the maximum size of the payload of a vector of this size;
- `open(payload)` returns the chunks of a payload (an outer stage such as zstd decompresses them here).

A payload contains neither the name of its codec nor the length of the vector: these follow from the job and the schema,
so the reader does not depend on declarations of the sender. An empty vector has an empty payload.

Source: Stich et al. 2018, "Sparsified SGD with Memory", arXiv 1809.07599, Algorithm 1; Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD", arXiv 1901.09847, Algorithm 1 (EF-SGD).

Format: RFC 8878. Each chunk of the inner codec is one frame, preceded by its length (4 bytes). The size of a chunk is
bounded, so a decompression bomb is refused by its header.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard
from typing_extensions import override

from fedplat import errors, model
from fedplat.config import user_code
from fedplat.errors import CodecError, PluginError
from fedplat.model import Blocks, Vector, blocks

Payload: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""A compressed vector, which may be a file mapped into memory (`numpy.memmap`)."""


class Source(Protocol):
    """The bytes of a payload, read once from beginning to end."""

    def take(self, count: int) -> memoryview | bytes:
        """Read the next `count` bytes. Raises `CodecError` if there are fewer."""
        ...

    def finish(self) -> None:
        """Raise `CodecError` unless all bytes were read."""
        ...


class PlainSource(Source):
    """The bytes of a payload without an outer stage; `take` copies nothing."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._position = 0

    @property
    def at_end(self) -> bool:
        """True if all bytes were read."""
        return self._position == len(self._payload)

    @override
    def take(self, count: int) -> memoryview:
        end = self._position + count
        if end > len(self._payload):
            raise CodecError(f"the payload ends after {len(self._payload)} bytes; expected {end} or more")
        part = self._payload[self._position : end]
        self._position = end
        return part

    @override
    def finish(self) -> None:
        if not self.at_end:
            raise CodecError(f"the payload has {len(self._payload)} bytes; expected {self._position}")


@dataclasses.dataclass(frozen=True)
class Codec:
    """A codec; see the module's docstring for its functions.

    `needs_feedback` is true for a biased codec that omits so much that clients encode with `with_error_feedback`: they
    store the omitted part and add it to their next update.

    >>> codec = Bf16().build()
    >>> vector = VectorBlocks(np.array([1, -2.5, 1e-3], np.float32))
    >>> payload = b"".join(codec.encode(vector, np.random.default_rng(1)))
    >>> len(payload), codec.max_bytes(3)
    (6, 6)
    >>> [block.tolist() for block in codec.decode(payload, 3)]
    [[1.0, -2.5, 0.00099945068359375]]
    """

    write: Callable[[Blocks, np.random.Generator], Iterator[bytes]]
    read: Callable[[Source, int], Iterator[Vector]]
    max_bytes: Callable[[int], int]
    open: Callable[[memoryview], Source] = PlainSource
    needs_feedback: bool = False

    def encode(self, vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
        """Yield the payload in pieces of arbitrary length; the same bytes for equal vectors and generators.

        Reads the vector block by block, so memory does not grow with its size. Raises `CodecError`, at the block
        concerned, for entries that are NaN, infinite or too large for the codec.
        """
        return self.write(_Finite(vector), rng)

    def decode(self, payload: Payload, size: int) -> Blocks:
        """Decode a payload to a vector of `size` elements: finite float32, the same bits on every machine.

        The payload is untrusted, and memory does not grow with its size. Raises `CodecError` at once if it is too long,
        and while the blocks are read if it is invalid otherwise; a payload that was read to the end is valid.
        """
        content = memoryview(payload.data if isinstance(payload, np.ndarray) else payload)
        if len(content) > (limit := self.max_bytes(size)):
            raise CodecError(f"the payload has {len(content)} bytes; expected at most {limit}")
        return _Decoded(self, content, size)


def read_array(source: Source, dtype: str, count: int) -> npt.NDArray[Any]:
    """Read the next `count` numbers of a payload as a read-only array."""
    kind = np.dtype(dtype)
    return np.frombuffer(source.take(count * kind.itemsize), kind)


class _Decoded:
    def __init__(self, codec: Codec, payload: memoryview, size: int) -> None:
        self._codec, self._payload, self._size = codec, payload, size

    @property
    def size(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Vector]:
        source = self._codec.open(self._payload)
        yield from self._codec.read(source, self._size)
        source.finish()


class _Finite:
    def __init__(self, vector: Blocks) -> None:
        self._vector = vector

    @property
    def size(self) -> int:
        return self._vector.size

    def __iter__(self) -> Iterator[Vector]:
        for block in self._vector:
            if not np.isfinite(block).all():
                raise CodecError("the vector has NaN or infinite entries and cannot be compressed")
            yield block


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """A pair of pure functions for encoding with a residual.

    - `init(size)` returns the first residual, zeros;
    - `encode(residual, vector, rng)` returns the payload of vector + residual, and the next residual: that sum minus
      the decoded payload. It modifies neither argument, and raises `CodecError` as the codec does.

    >>> feedback = with_error_feedback(TopK(fraction=0.5).build())
    >>> vector = VectorBlocks(np.array([1, 3], np.float32))
    >>> payload, residual = feedback.encode(feedback.init(2), vector, np.random.default_rng(1))
    >>> residual
    array([1., 0.], dtype=float32)
    """

    init: Callable[[int], Vector]
    encode: Callable[[Vector, Blocks, np.random.Generator], tuple[bytes, Vector]]


def with_error_feedback(codec: Codec) -> ErrorFeedback:
    """Add error feedback to a codec: the sum of all decoded vectors is the sum of all vectors minus the residual.

    Besides the next residual, only the payload is in memory.
    """

    def encode(residual: Vector, vector: Blocks, rng: np.random.Generator) -> tuple[bytes, Vector]:
        if vector.size != residual.size:
            raise CodecError(f"the vector has {vector.size} entries and the residual {residual.size}")
        target = _Sum(vector, residual)
        payload = b"".join(codec.encode(target, rng))
        error = np.empty_like(residual)
        for part, exact, decoded in zip(blocks(error.size), target, codec.decode(payload, error.size), strict=True):
            np.subtract(exact, decoded, out=error[part])
        return payload, error

    return ErrorFeedback(init=lambda size: np.zeros(size, np.float32), encode=encode)


class _Sum:
    def __init__(self, left: Blocks, right: Vector) -> None:
        self._left, self._right = left, right

    @property
    def size(self) -> int:
        return self._left.size

    def __iter__(self) -> Iterator[Vector]:
        for part, block in zip(blocks(self.size), self._left, strict=True):
            with np.errstate(over="ignore"):  # the codec refuses values that are not finite
                total = block + self._right[part]
            yield total


def guard(codec: Codec, name: str) -> Codec:
    """Return a codec whose errors are `UserCodeError` and `PluginError`, apart from `CodecError`.

    Its reader yields blocks of float32 with the sizes of `blocks(size)`.
    """
    what = f'the codec "{name}"'

    def write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
        with user_code.wrap_errors(f"{what}: write()"):
            yield from codec.write(vector, rng)

    def read(source: Source, size: int) -> Iterator[Vector]:
        with user_code.wrap_errors(f"{what}: read()"):
            for part, block in itertools.zip_longest(blocks(size), codec.read(source, size)):
                expected = None if part is None else (part.stop - part.start,)
                if block is None or block.dtype != np.float32 or block.shape != expected:
                    found = "nothing" if block is None else f"{block.dtype}{list(block.shape)}"
                    wanted = "nothing more" if expected is None else f"a block of float32{list(expected)}"
                    raise PluginError(f"{what}: read() yielded {found}; expected {wanted}")
                yield block

    def max_bytes(size: int) -> int:
        with user_code.wrap_errors(f"{what}: max_bytes()"):
            most = codec.max_bytes(size)
        if type(most) is not int or most < 0:
            raise PluginError(f"{what}: max_bytes() returned {most!r}; expected a number of bytes")
        return most

    return dataclasses.replace(codec, write=write, read=read, max_bytes=max_bytes)


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
