"""Memory that a process shares with those that it forks: files that are nowhere but in memory, cut into slots.

`acquire` and `release` are for the process that made them. Numbers of slots mean the same in those that it forked. The
memory is gone with the last of them, however they end.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

from fedplat.model import Bytes


class _Slots:
    """Numbers that are handed out again, the one used last first: its pages are there, and perhaps in a cache."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._descriptor = os.memfd_create("fedplat")
        self._free: list[int] = []
        self._count = 0

    def acquire(self) -> int:
        """A slot that nobody uses; what is in it is undefined."""
        if self._free:
            return self._free.pop()
        self._count += 1
        os.ftruncate(self._descriptor, self._count * self._stride)
        return self._count - 1

    def release(self, slot: int) -> None:
        """Nobody reads or writes the slot any more."""
        self._free.append(slot)

    def close(self) -> None:
        """Lets go of the memory, once the last array that lies in it is gone."""
        os.close(self._descriptor)


class Arrays(_Slots):
    """Slots for arrays of one size, which processes map and work on in place."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE)
        self._size = size_bytes
        self._mapped: dict[int, mmap.mmap] = {}

    def array(self, slot: int) -> Bytes:
        """The bytes of a slot."""
        if slot not in self._mapped:
            self._mapped[slot] = mmap.mmap(self._descriptor, self._stride, offset=slot * self._stride)
        return np.frombuffer(self._mapped[slot], np.uint8, self._size)

    def lend(self, slot: int) -> Bytes:
        """The bytes of a slot, which is released when nothing refers to them any more."""
        array = self.array(slot)
        weakref.finalize(array, self.release, slot).atexit = False
        return array[:]

    def close(self) -> None:
        """Lets go of the memory, once the last array that lies in it is gone."""
        self._mapped.clear()
        super().close()


class Texts(_Slots):
    """Slots for bytes of any length, which are copied in and out."""

    def __init__(self) -> None:
        super().__init__(1 << 36)  # of addresses in the file; only what is written takes memory

    def write(self, slot: int, content: bytes) -> int:
        """Replaces what is in a slot; returns the number of bytes."""
        view, start = memoryview(content), slot * self._stride
        while view:
            count = os.pwrite(self._descriptor, view, start)
            view, start = view[count:], start + count
        return len(content)

    def read(self, slot: int, size: int) -> bytes:
        """The first bytes of a slot."""
        parts: list[bytes] = []
        start = slot * self._stride
        while size:
            parts.append(os.pread(self._descriptor, size, start))
            start, size = start + len(parts[-1]), size - len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)
