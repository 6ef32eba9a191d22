"""The definition of a codec: a frozen record of pure functions between a float32 vector and the bytes of a payload.

- `write(vector, rng)` yields the payload, one chunk for each block of the vector;
- `read(source, size)` yields the blocks again, from untrusted chunks;
- `max_bytes(size)` returns the maximum size of the payload of a vector of this size;
- `open(payload)` returns the chunks of a payload (an outer stage such as zstd decompresses them here).

A payload contains neither the name of its codec nor the length of the vector: these follow from the job and the schema,
so the reader does not depend on declarations of the sender. An empty vector has an empty payload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.errors import CodecError
from fedplat.model import Blocks, Vector

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
