"""Random access to packed examples."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError
from fedplat.packed.arrow import Array, import_pyarrow, map_shard, open_shard
from fedplat.packed.index import PackedIndex, read_index

ArrayPair: TypeAlias = tuple[Array, Array]
MAX_MAPPED = 256
"""Shards that a process keeps mapped: each one takes a file descriptor."""


class PackedReader:
    """A packed dataset, read by index. Raises `DataError` that names a file, and `MissingExtraError` without pyarrow.

    Shards are mapped when an example of theirs is first read, in each process anew. Any number of threads may read.
    While a dataset is in use, its files must not be truncated: the kernel would end the process (SIGBUS).
    """

    def __init__(self, folder: str | Path) -> None:
        import_pyarrow()  # an absent package is reported here, not in a worker process
        self.folder = Path(folder).absolute()
        self.index: PackedIndex = read_index(self.folder)
        self._ends = np.cumsum([shard.rows for shard in self.index.shards], dtype=np.int64)
        self._mapped = _MappedShards(self.folder, self.index)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "dataset": self.index.dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the dataset in another process. Raises `DataError` if another one was packed there meanwhile."""
        self.__init__(state["folder"])
        if self.index.dataset != state["dataset"]:
            raise DataError(f"{self.folder} is another dataset than before; expected that packed data never changes")

    def read(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> ArrayPair:
        """Return the inputs [n, ...] and targets [n, ...] of some examples, as copies, in the order of `indices`.

        Negative indices count from the end. Raises `IndexError`.
        """
        rows = np.asarray(indices, np.int64)
        if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"the indices {rows.min()} to {rows.max()} are not all in a dataset of {len(self):,}")
        rows = np.where(rows < 0, rows + len(self), rows)
        mapped = self._mapped.in_this_process()
        numbers = np.searchsorted(self._ends, rows, side="right")
        pair = tuple(
            np.empty((len(rows), *column.shape), column.numpy_type)
            for column in (self.index.inputs, self.index.targets)
        )
        # Each shard once, and its rows in the order of the file.
        order = np.lexsort((rows, numbers))
        bounds = np.flatnonzero(np.diff(numbers[order])) + 1
        for part in np.split(order, bounds) if rows.size else ():
            number = int(numbers[part[0]])
            first = self._ends[number] - self.index.shards[number].rows
            for result, column in zip(pair, mapped[number], strict=True):
                result[part] = column[rows[part] - first]
        return pair[0], pair[1]

    def verify(self, after_shard: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Read every byte, and compare it with the index. Raises `DataError` for the first file that differs.

        `after_shard` is called with the number of shards done and their total.
        """
        for number, shard in enumerate(self.index.shards):
            path = self.folder / shard.file
            with open_shard(path, shard) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != shard.sha256:
                raise DataError(f"{path} is damaged: its SHA-256 is not that of the index; restore the file")
            map_shard(self.folder, self.index, number)
            after_shard(number + 1, len(self.index.shards))


class _MappedShards:
    """The shards that were used last."""

    def __init__(self, folder: Path, index: PackedIndex) -> None:
        self._folder, self._index = folder, index
        self._clear()

    def _clear(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._shards = OrderedDict[int, ArrayPair]()

    def in_this_process(self) -> _MappedShards:
        """Return the shards of this process: another thread may have held the lock when the process was forked."""
        if self._process != os.getpid():
            self._clear()
        return self

    def __getitem__(self, number: int) -> ArrayPair:
        with self._lock:
            if number not in self._shards:
                self._shards[number] = map_shard(self._folder, self._index, number)
            self._shards.move_to_end(number)
            if len(self._shards) > MAX_MAPPED:
                self._shards.popitem(last=False)
            return self._shards[number]
