"""Vectors in memory that all processes of a host share.

The memory is that of anonymous files (memfd), which the other processes open through /proc: it is freed when the last
process that has mapped it ends, even by a crash, and does not depend on the size of a container's /dev/shm.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from typing_extensions import override

from fedplat.config.decoding import prepare_type
from fedplat.model import BLOCK, WINDOW, Vector
from fedplat.pytorch.distributed import group, vectors

PAGE_ENTRIES = mmap.PAGESIZE // 4
"""Entries of a page; each vector starts on a page boundary."""


class SharedFile(msgspec.Struct, frozen=True):
    """A process's file, for the processes of the same host; without `host`, the process has no file."""

    host: str = ""
    pid: int = 0
    descriptor: int = -1
    device: int = 0
    inode: int = 0


class SharedMemoryVectors(vectors.Vectors):
    """Vectors that each process reads in the memory of the others, without sending or copying before the addition."""

    def __init__(self, ranks: group.Ranks, layout: vectors.VectorLayout, files: Sequence[mmap.mmap]) -> None:
        """`files` are those of all processes, in the order of ranks."""
        super().__init__(ranks, layout)
        self._files = [_split(file, layout.slots(process), layout.size) for process, file in enumerate(files)]
        self._slots = [torch.from_numpy(vector) for vector in self._files[ranks.rank]]

    @property
    @override
    def slots(self) -> Sequence[torch.Tensor]:
        return self._slots

    @override
    def reduce_scatter(self) -> torch.Tensor:
        self.ranks.barrier()
        self._add()
        self.ranks.barrier()
        return self.columns

    @override
    def all_gather(self) -> torch.Tensor:
        self.ranks.barrier()
        self._copy()
        self.ranks.barrier()
        return self.whole

    @override
    def all_reduce(self) -> torch.Tensor:
        self.ranks.barrier()
        self._add()
        self.ranks.barrier()
        self._copy()
        self.ranks.barrier()
        return self.whole

    @override
    def close(self) -> None:
        self._files.clear()
        self._slots.clear()

    def _copy(self) -> None:
        """Copy the others' columns of `whole`, which no process writes at the same time."""
        whole = self._files[self.ranks.rank][0]
        for process, (theirs, *_) in enumerate(self._files):
            if process != self.ranks.rank:
                columns = self.layout.columns(process)
                np.copyto(whole[columns], theirs[columns])

    def _add(self) -> None:
        """Add up this process's columns into `whole`; no other process reads them there."""
        layout = self.layout
        terms = [self._files[process][slot] for process, slot in map(layout.slot, range(layout.logical))]
        total = self._files[self.ranks.rank][0]
        columns = layout.columns(self.ranks.rank)
        with np.errstate(over="ignore", invalid="ignore"):  # callers check the sum
            if len(terms) == 1:
                if total is not terms[0]:
                    np.copyto(total[columns], terms[0][columns])
            elif len(terms) == 2:
                for part in vectors.split_columns(columns, WINDOW):
                    np.add(terms[0][part], terms[1][part], out=total[part])
            else:
                _add_many(terms, total, columns)


def share(ranks: group.Ranks, layout: vectors.VectorLayout) -> SharedMemoryVectors | None:
    """Return zeros in shared memory; None, in every process, if one of them cannot map the memory of another.

    All processes have to call it.
    """
    descriptor = None
    if ranks.device.type == "cpu" and hasattr(os, "memfd_create"):
        descriptor = _create(4 * PAGE_ENTRIES * layout.slots(ranks.rank) * _num_pages(layout.size))
    try:
        offered = _offer(ranks, descriptor)
        files = _map_all(offered, ranks.rank, descriptor)
        # Also a barrier: afterwards all have mapped the file, and the descriptor is no longer needed.
        has_mapped = ranks.all_gather(b"" if files is None else b"\1")
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return SharedMemoryVectors(ranks, layout, files) if files is not None and all(has_mapped) else None


def share_vector(ranks: group.Ranks, size: int) -> torch.Tensor | None:
    """Return one float32 vector of zeros that all processes read and write, without locks.

    None, in every process, if one of them cannot map it. All processes have to call it.
    """
    descriptor = None
    if ranks.device.type == "cpu" and hasattr(os, "memfd_create"):
        # The other processes' files only show that they are on the same host.
        descriptor = _create(4 * PAGE_ENTRIES * (_num_pages(size) if ranks.is_first else 1))
    try:
        offered = _offer(ranks, descriptor)
        file = None
        if descriptor is not None and _are_on_one_host(offered):
            with contextlib.suppress(OSError):  # such as that of another user's process
                file = mmap.mmap(descriptor, 0) if ranks.is_first else _map(offered[0], writable=True)
        has_mapped = ranks.all_gather(b"" if file is None else b"\1")
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if file is None or not all(has_mapped):
        return None
    return torch.from_numpy(np.frombuffer(file, np.float32)[:size])


def _add_many(terms: Sequence[Vector], total: Vector, columns: slice) -> None:
    # `total` may be one of the terms, so it must not be overwritten before that term is added.
    scratch = np.empty(BLOCK, np.float32)
    for part in vectors.split_columns(columns, BLOCK):
        block = scratch[: part.stop - part.start]
        np.add(terms[0][part], terms[1][part], out=block)
        for term in terms[2:-1]:
            np.add(block, term[part], out=block)
        np.add(block, terms[-1][part], out=total[part])


def _create(size: int) -> int | None:
    """Create a file of zeros; return None if the system refuses, since the other processes must be informed."""
    try:
        descriptor = os.memfd_create("fedplat")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _describe(descriptor: int | None) -> SharedFile:
    if descriptor is None:
        return SharedFile()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc
        return SharedFile()
    status = os.fstat(descriptor)
    return SharedFile(f"{boot} {namespace}", os.getpid(), descriptor, status.st_dev, status.st_ino)


def _offer(ranks: group.Ranks, descriptor: int | None) -> list[SharedFile]:
    """Return the files of all processes, in the order of ranks."""
    contents = ranks.all_gather(msgspec.msgpack.encode(_describe(descriptor)))
    return [msgspec.msgpack.decode(each, type=prepare_type(SharedFile)) for each in contents]


def _are_on_one_host(offered: Sequence[SharedFile]) -> bool:
    return all(offer.host and offer.host == offered[0].host for offer in offered)


def _map_all(offered: Sequence[SharedFile], rank: int, descriptor: int | None) -> list[mmap.mmap] | None:
    """Map the files of all processes; return None if one of them cannot be opened here."""
    if descriptor is None or not _are_on_one_host(offered):
        return None
    try:
        return [
            mmap.mmap(descriptor, os.fstat(descriptor).st_size) if process == rank else _map(offer)
            for process, offer in enumerate(offered)
        ]
    except OSError:  # such as those of another user's process
        return None


def _map(offer: SharedFile, *, writable: bool = False) -> mmap.mmap:
    """Map another process's file."""
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (offer.device, offer.inode):
            raise FileNotFoundError(f"{path} is not the file that was offered")
        return mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(descriptor)


def _num_pages(size: int) -> int:
    return max(1, -(-size // PAGE_ENTRIES))


def _split(file: mmap.mmap, count: int, size: int) -> list[Vector]:
    stride = PAGE_ENTRIES * _num_pages(size)
    content = np.frombuffer(file, np.float32)
    return [content[first : first + size] for first in range(0, count * stride, stride)]
