"""What a client uploads: bytes in memory, or an update that is computed and hashed while it is sent."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedplat import wire
from fedplat.model import Difference
from fedplat.wire import digests

FAST_PART_S = 0.5
"""If a part was sent within this time, the next one is larger."""
LATENT_PART_S = 0.01
"""If a large part took longer than this to send, it may have waited for a round trip."""
_SIZES = tuple(sixteenths * wire.CHUNK_BYTES // 16 for sixteenths in (16, 13, 15, 12, 14))
"""The sizes of large parts, in turn. Equal ones over several streams would all end, and wait, at the same time."""


@dataclass(frozen=True)
class Content:
    """The bytes of an upload, as pieces of memory that must not change during it."""

    pieces: tuple[memoryview, ...]

    @classmethod
    def merge_parts(cls, parts: Iterable[bytes]) -> Content:
        """Copy many small parts into one piece."""
        whole = bytearray()
        for part in parts:
            whole += part
        return cls((memoryview(whole),))

    @property
    def upload_id(self) -> str:
        """The name of the upload until its digest is known; empty if that is its name."""
        return ""

    @property
    def size_bytes(self) -> int:
        """Total size of the pieces."""
        return sum(map(len, self.pieces))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the concatenated pieces, hexadecimal."""
        sha256 = hashlib.sha256()
        for piece in self.pieces:
            sha256.update(piece)
        return sha256.hexdigest()

    def to_bytes(self) -> bytes:
        """Concatenate the pieces."""
        return b"".join(self.pieces)

    def split(self, start: int, clock: Callable[[], float]) -> Iterator[memoryview]:
        """Yield the content from `start` on in parts, each of which is valid until the next one is drawn."""
        pace = _Pace(clock)
        for piece in self.pieces:
            while start < len(piece):
                part = piece[start : start + pace.size]
                yield from pace.send(part)
                start += len(part)
            start -= len(piece)


class _Pace:
    """The size of the next part: small ones on a slow line, larger and cheaper ones on a fast one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn = 0
        self.size = wire.UPLOAD_CHUNK_BYTES

    def send(self, part: memoryview) -> Iterator[memoryview]:
        """Yield a part, and measure how long its receiver takes."""
        began = self._clock()
        yield part
        elapsed_s = self._clock() - began
        self.size = min(2 * self.size, wire.CHUNK_BYTES) if elapsed_s < FAST_PART_S else wire.UPLOAD_CHUNK_BYTES
        if self.size == wire.CHUNK_BYTES and elapsed_s >= LATENT_PART_S:
            self._turn = (self._turn + 1) % len(_SIZES)
            self.size = _SIZES[self._turn]


class StreamedUpdate:
    """An update that is computed and hashed while it is sent. Its digest is known once all of it was computed.

    The models that it is computed from must not change until its report was accepted, since a part may be sent again.
    """

    def __init__(self, file: Difference, kind: str = "") -> None:
        """`kind` is that of the digest (`fedplat.wire.digests`)."""
        self._file = file
        self.size_bytes = file.size_bytes
        self.upload_id = kind + uuid.uuid4().hex
        self._lock = threading.Lock()  # gRPC may still read an earlier call's parts in its own thread
        self._hash = digests.UpdateHash(kind)
        self._num_hashed = 0

    @property
    def digest(self) -> str:
        """The digest of the file; what was not sent yet is computed for it."""
        if self._num_hashed < self.size_bytes:
            for _ in self.split(self.size_bytes, float):
                pass
        return self._hash.digest

    def forget_id(self) -> None:
        """Upload the update under its SHA-256 from now on, as servers before 0.2 require."""
        with self._lock:
            self.upload_id = ""
            if self._hash.kind:
                self._hash, self._num_hashed = digests.UpdateHash(), 0

    def to_bytes(self) -> bytes:
        """Return the file."""
        return b"".join(bytes(part) for part in self.split(0, float))

    def split(self, start: int, clock: Callable[[], float]) -> Iterator[memoryview]:
        """Yield the file from `start` on in parts, each of which is valid until the next one is drawn."""
        pace, scratch = _Pace(clock), np.empty(wire.CHUNK_BYTES, np.uint8)
        position = min(start, self._num_hashed)
        while position < self.size_bytes:
            part = self._file.read(position, scratch[: pace.size])
            self._add(part, position)
            position += len(part)
            if position > start:
                yield from pace.send(part[-(position - start) :])

    def _add(self, part: memoryview, start: int) -> None:
        """Hash those bytes of a part that follow the hashed ones, now, while they are in the processor's cache."""
        with self._lock:
            if start <= self._num_hashed < start + len(part):
                self._hash.update(part[self._num_hashed - start :])
                self._num_hashed = start + len(part)


Outgoing: TypeAlias = Content | StreamedUpdate
"""What an upload sends."""
