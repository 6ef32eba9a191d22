"""Vectors in memory that all processes of a host see.

The memory is that of files without a name (memfd), which the other processes open through /proc: it goes when the last
process that has mapped it does, however that ends, and the size of a container's /dev/shm does not matter.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from fedplat.backends.ranks.group import Ranks
from fedplat.backends.ranks.layout import Layout
from fedplat.backends.ranks.vectors import Vectors, pieces
from fedplat.model import BLOCK, WINDOW, Vector

PAGE = mmap.PAGESIZE // 4
"""Entries of a page; each vector begins with one of its own."""


class Offer(msgspec.Struct, frozen=True):
    """Where a process's file can be found, by those who are on the same host; no `host` if there is none."""

    host: str = ""
    pid: int = 0
    descriptor: int = -1
    device: int = 0
    inode: int = 0


class SharedVectors(Vectors):
    """Vectors that each process reads where the others wrote them: nothing is sent, and nothing copied to be added."""

    def __init__(self, ranks: Ranks, layout: Layout, files: Sequence[mmap.mmap]) -> None:
        """`files` are those of all processes, in the order of ranks."""
        super().__init__(ranks, layout)
        self._files = [_vectors(file, layout.slots(process), layout.size) for process, file in enumerate(files)]
        self._slots = [torch.from_numpy(vector) for vector in self._files[ranks.rank]]

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        """This process's memory."""
        return self._slots

    def reduce_scatter(self) -> torch.Tensor:
        """The sum of this process's columns."""
        self.ranks.barrier()
        self._add()
        self.ranks.barrier()
        return self.columns

    def all_gather(self) -> torch.Tensor:
        """The vector that consists of every process's columns."""
        self.ranks.barrier()
        self._copy()
        self.ranks.barrier()
        return self.whole

    def all_reduce(self) -> torch.Tensor:
        """The sum of all columns."""
        self.ranks.barrier()
        self._add()
        self.ranks.barrier()
        self._copy()
        self.ranks.barrier()
        return self.whole

    def close(self) -> None:
        """Forgets the vectors; the system frees the memory when no process has a view of it any more."""
        self._files.clear()
        self._slots.clear()

    def _copy(self) -> None:
        """Copies the others' columns of `whole`, which are not changed by anybody then."""
        whole = self._files[self.ranks.rank][0]
        for process, (theirs, *_) in enumerate(self._files):
            if process != self.ranks.rank:
                columns = self.layout.columns(process)
                np.copyto(whole[columns], theirs[columns])

    def _add(self) -> None:
        """Adds up this process's columns into `whole`, which nobody else reads there."""
        layout = self.layout
        terms = [self._files[process][slot] for process, slot in map(layout.slot, range(layout.logical))]
        total = self._files[self.ranks.rank][0]
        columns = layout.columns(self.ranks.rank)
        with np.errstate(over="ignore", invalid="ignore"):  # whoever uses the sum looks at it
            if len(terms) == 1:
                if total is not terms[0]:
                    np.copyto(total[columns], terms[0][columns])
            elif len(terms) == 2:
                for part in pieces(columns, WINDOW):
                    np.add(terms[0][part], terms[1][part], out=total[part])
            else:
                _add_many(terms, total, columns)


def shared(ranks: Ranks, layout: Layout) -> SharedVectors | None:
    """Zeros in shared memory; None, in every process, if one cannot see the memory of another.

    All processes have to call it.
    """
    descriptor = None
    if ranks.device.type == "cpu" and hasattr(os, "memfd_create"):
        descriptor = _created(4 * PAGE * layout.slots(ranks.rank) * _pages(layout.size))
    try:
        offers = [
            msgspec.msgpack.decode(each, type=Offer)
            for each in ranks.gather(msgspec.msgpack.encode(_offer(descriptor)))
        ]
        files = _opened(offers, ranks.rank, descriptor)
        # Also the barrier after which nobody needs the descriptor any more: those who mapped the file keep it.
        everywhere = ranks.gather(b"" if files is None else b"\1")
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return SharedVectors(ranks, layout, files) if files is not None and all(everywhere) else None


def _add_many(terms: Sequence[Vector], total: Vector, columns: slice) -> None:
    # `total` may be one of the terms, which must not be overwritten before it was added.
    scratch = np.empty(BLOCK, np.float32)
    for part in pieces(columns, BLOCK):
        block = scratch[: part.stop - part.start]
        np.add(terms[0][part], terms[1][part], out=block)
        for term in terms[2:-1]:
            np.add(block, term[part], out=block)
        np.add(block, terms[-1][part], out=total[part])


def _created(size: int) -> int | None:
    """A file of zeros; None if the system has none to give, which the others have to hear of."""
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


def _offer(descriptor: int | None) -> Offer:
    if descriptor is None:
        return Offer()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc
        return Offer()
    status = os.fstat(descriptor)
    return Offer(f"{boot} {namespace}", os.getpid(), descriptor, status.st_dev, status.st_ino)


def _opened(offers: Sequence[Offer], rank: int, descriptor: int | None) -> list[mmap.mmap] | None:
    """Every process's file; None if one of them cannot be seen from here."""
    if descriptor is None or any(not offer.host or offer.host != offers[rank].host for offer in offers):
        return None
    try:
        return [
            mmap.mmap(descriptor, os.fstat(descriptor).st_size) if process == rank else _mapped(offer)
            for process, offer in enumerate(offers)
        ]
    except OSError:  # another user's process, say
        return None


def _mapped(offer: Offer) -> mmap.mmap:
    """Another process's file, to be read only."""
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (offer.device, offer.inode):
            raise FileNotFoundError(f"{path} is not the file that was offered")
        return mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _pages(size: int) -> int:
    return max(1, -(-size // PAGE))


def _vectors(file: mmap.mmap, count: int, size: int) -> list[Vector]:
    stride = PAGE * _pages(size)
    content = np.frombuffer(file, np.float32)
    return [content[first : first + size] for first in range(0, count * stride, stride)]
