"""Vectors of logical ranks: which process has which columns; their sum, also in the memory of an accelerator.

Windows of an update are copied there through two pinned buffers: one is copied while the other is filled. The product
and the sum are two operations, each rounded to float32. A fused operation would round once, and give other bits than
NumPy.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch

from fedplat.model import WINDOW, Vector
from fedplat.pytorch.distributed.group import Ranks


class Vectors(ABC):
    """A float32 vector for each logical rank, to be filled in place, and the sum of all of them.

    The sum of a column is `((v0 + v1) + v2) + ...`, in the order of logical ranks. A ring would start with another rank
    for each chunk, and the order of arrival varies. Each process sends and receives as many bytes as in a ring, `(P -
    1) / P` of a vector if each holds one. The bits of the sum depend only on the number of logical ranks: they are the
    same after workers have been lost, and in one process without workers (F35).

    All processes call each method in the same order. Views are valid until `close`.
    """

    def __init__(self, ranks: Ranks, layout: VectorLayout) -> None:
        """Store the group and the layout, which must be for as many processes as there are ranks."""
        self.ranks = ranks
        self.layout = layout

    @property
    @abstractmethod
    def slots(self) -> Sequence[torch.Tensor]:
        """This process's vectors: those of its logical ranks, or one if it has none."""

    @property
    def own(self) -> Mapping[int, torch.Tensor]:
        """The vectors of this process's logical ranks; zeros at first. Adding up overwrites them."""
        return dict(zip(self.layout.ranks_of(self.ranks.rank), self.slots, strict=False))

    @property
    def whole(self) -> torch.Tensor:
        """The vector that `all_gather` fills, in the memory of this process's first one."""
        return self.slots[0]

    @property
    def columns(self) -> torch.Tensor:
        """This process's columns of `whole`: the result of `reduce_scatter`, and the input of `all_gather`."""
        return self.whole[self.layout.columns(self.ranks.rank)]

    @abstractmethod
    def reduce_scatter(self) -> torch.Tensor:
        """Add up this process's columns, and return the view `columns`.

        Raises `RuntimeError` if a process died.
        """

    @abstractmethod
    def all_gather(self) -> torch.Tensor:
        """Fill `whole` with the `columns` of all processes, and return it.

        Raises `RuntimeError` if a process died.
        """

    def all_reduce(self) -> torch.Tensor:
        """Add up all columns, and return the view `whole`. Raises `RuntimeError` if a process died."""
        self.reduce_scatter()
        return self.all_gather()

    @abstractmethod
    def close(self) -> None:
        """Free the memory, unless there are still views of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def split_columns(columns: slice, length: int) -> Iterator[slice]:
    """Return consecutive parts of columns, of at most `length` entries."""
    return (slice(first, min(first + length, columns.stop)) for first in range(columns.start, columns.stop, length))


@dataclasses.dataclass(frozen=True)
class VectorLayout:
    """`logical` ranks with a vector each, on `len(bounds) - 1` processes; process p adds up `bounds[p]:bounds[p + 1]`.

    Logical rank l is on process l mod P: a process has several of them, or none. `bounds` go from 0 to the number of
    entries of a vector; columns may be empty.
    """

    logical: int
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.logical < 1:
            raise ValueError(f"{self.logical} logical ranks: expected 1 or more")
        if len(self.bounds) < 2 or self.bounds[0] != 0 or list(self.bounds) != sorted(self.bounds):
            raise ValueError(
                f"columns with the bounds {self.bounds}: expected 0 and one more for each process, ascending"
            )

    @classmethod
    def even(cls, logical: int, processes: int, size: int, multiple: int = WINDOW) -> VectorLayout:
        """Return a layout with columns of equal size, as far as multiples of `multiple` entries can be."""
        pieces = -(-size // multiple)
        inner = (multiple * (pieces * process // processes) for process in range(1, processes))
        return cls(logical, (0, *inner, size))

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self.bounds) - 1

    @property
    def size(self) -> int:
        """Number of entries of a vector."""
        return self.bounds[-1]

    def columns(self, process: int) -> slice:
        """Return the columns that a process adds up."""
        return slice(self.bounds[process], self.bounds[process + 1])

    def ranks_of(self, process: int) -> range:
        """Return the logical ranks of a process."""
        return range(process, self.logical, self.processes)

    def slot(self, logical: int) -> tuple[int, int]:
        """Return the process of a logical rank, and the index of its vector among those of that process."""
        return logical % self.processes, logical // self.processes

    def slots(self, process: int) -> int:
        """Return the number of vectors of a process; at least one, for the sum."""
        return max(1, len(self.ranks_of(process)))


_SPARE_BYTES = 8 * 4 * WINDOW
"""Memory besides the sum: two windows of an update, and temporary memory of PyTorch."""


def device_sum(size: int, device: torch.device, free_bytes: int | None = None) -> DeviceSum | None:
    """Return a sum of `size` zeros on an accelerator; None without one, or if it has too little memory.

    `free_bytes` is the free memory of the device; None: as the device reports it.
    """
    if device.type != "cuda" and free_bytes is None:
        return None
    if free_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info(device)
    if 4 * size + _SPARE_BYTES > free_bytes:
        return None
    try:
        return DeviceSum(torch.zeros(size, dtype=torch.float32, device=device))
    except torch.OutOfMemoryError:  # another process has allocated the memory since
        return None


class DeviceSum:
    """A `DeviceAccumulator` in a tensor. It moves to the host's memory if the device runs out of memory."""

    def __init__(self, sum_: torch.Tensor) -> None:
        """`sum_`: float32 [size], to which updates are added in place."""
        self._sum = sum_
        self._host: Vector | None = None
        on_gpu, length = sum_.device.type == "cuda", min(WINDOW, len(sum_))
        self._staged = [torch.empty(length, pin_memory=on_gpu) for _ in range(2)]
        self._windows = [torch.empty(length, device=sum_.device) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)] if on_gpu else []
        self._turn = 0

    def add(self, start: int, values: Vector, weight: float) -> None:
        """Add values times a weight to the entries from `start` on."""
        if self._host is None:
            try:
                return self._add(start, values, weight)
            except torch.OutOfMemoryError:  # nothing was added: the addition is the last operation
                self._host = self.total()
        self._host[start : start + values.size] += np.multiply(values, weight, dtype=np.float32)

    def total(self) -> Vector:
        """Return the sum, in the host's memory."""
        return self._sum.cpu().numpy().copy() if self._host is None else self._host

    def _add(self, start: int, values: Vector, weight: float) -> None:
        turn = self._turn = 1 - self._turn
        if self._done:
            self._done[turn].synchronize()  # wait for the copy of two windows ago
        staged, window = self._staged[turn][: values.size], self._windows[turn][: values.size]
        staged.numpy()[:] = values
        window.copy_(staged, non_blocking=True)
        if weight != 1:
            window.mul_(float(np.float32(weight)))
        self._sum[start : start + values.size].add_(window)
        if self._done:
            self._done[turn].record()
