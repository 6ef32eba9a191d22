"""The assignment of vectors, and of their columns, to the processes of a group."""

from __future__ import annotations

import dataclasses

from fedplat.model import WINDOW


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
