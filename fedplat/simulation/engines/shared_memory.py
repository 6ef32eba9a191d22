"""Memory that a process shares with its forked children: anonymous in-memory files, divided into slots.

Only the process that created a file calls `acquire` and `release`; its children use the same slot numbers. The kernel
frees the memory when the last of these processes ends, whatever the cause.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

from fedplat.model import Bytes


class _Slots:
    """Reusable slot numbers; the last one released is reused first, because its pages exist and may be in a cache."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._descriptor = os.memfd_create("fedplat")
        self._free: list[int] = []
        self._count = 0

    def acquire(self) -> int:
        """Return a free slot; its content is undefined."""
        if self._free:
            return self._free.pop()
        self._count += 1
        os.ftruncate(self._descriptor, self._count * self._stride)
        return self._count - 1

    def release(self, slot: int) -> None:
        """Free a slot; no process may use it any more."""
        self._free.append(slot)

    def close(self) -> None:
        """Free the memory, as soon as no array refers to it."""
        os.close(self._descriptor)


class Arrays(_Slots):
    """Slots for arrays of one size, which processes map and use in place."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE)
        self._size = size_bytes
        self._mapped: dict[int, mmap.mmap] = {}

    def array(self, slot: int) -> Bytes:
        """Return the bytes of a slot."""
        if slot not in self._mapped:
            self._mapped[slot] = mmap.mmap(self._descriptor, self._stride, offset=slot * self._stride)
        return np.frombuffer(self._mapped[slot], np.uint8, self._size)

    def lend(self, slot: int) -> Bytes:
        """Return the bytes of a slot, and release the slot when nothing refers to them any more."""
        array = self.array(slot)
        weakref.finalize(array, self.release, slot).atexit = False
        return array[:]

    def close(self) -> None:
        """Free the memory, as soon as no array refers to it."""
        self._mapped.clear()
        super().close()


class Texts(_Slots):
    """Slots for bytes of any length, which are copied in and out."""

    def __init__(self) -> None:
        super().__init__(1 << 36)  # offsets in a sparse file: only written pages use memory

    def write(self, slot: int, content: bytes) -> int:
        """Replace the content of a slot; returns its size in bytes."""
        view, start = memoryview(content), slot * self._stride
        while view:
            count = os.pwrite(self._descriptor, view, start)
            view, start = view[count:], start + count
        return len(content)

    def read(self, slot: int, size: int) -> bytes:
        """Return the first `size` bytes of a slot."""
        parts: list[bytes] = []
        start = slot * self._stride
        while size:
            parts.append(os.pread(self._descriptor, size, start))
            start, size = start + len(parts[-1]), size - len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)
