"""Packed examples: random access to them, and the packing of a dataset, which appears when it is complete."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.durable import rename_folder
from fedplat.errors import DataError
from fedplat.packed.index import (
    Array,
    ColumnType,
    PackedIndex,
    ShardFile,
    column_type,
    import_pyarrow,
    map_shard,
    open_shard,
    read_index,
    write_index,
    write_shard,
)

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


DEFAULT_SHARD_BYTES = 64 * 2**20


class PackedWriter:
    """Writes a packed dataset as a context manager; after an error in the block nothing is left.

    `folder` must not exist, or be empty. Memory for one shard is needed. A killed process leaves a folder
    `.NAME-*.tmp` beside it. Raises `DataError` for examples that do not fit the first one, `MissingExtraError` without
    pyarrow, and `OSError`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "digits"
    >>> with PackedWriter(folder) as writer:
    ...     writer.add(np.zeros((10, 28, 28), np.uint8), np.arange(10))
    >>> sorted(path.name for path in folder.iterdir())
    ['index.json', 'shard-00000.arrow']
    """

    def __init__(self, folder: str | Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        import_pyarrow()
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes is {shard_bytes}; expected at least 1")
        self._folder = Path(folder).absolute()
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise DataError(f"{self._folder} exists; expected the name of a new folder")
        self._shard_bytes, self._dataset = shard_bytes, secrets.token_hex(16)
        self._columns: dict[str, ColumnType] = {}
        self._rows: dict[str, Array] = {}
        self._filled = 0
        self._shards = list[ShardFile]()
        self.num_rows = 0

    def __enter__(self) -> Self:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self._folder.with_name(f".{self._folder.name}-{secrets.token_hex(4)}.tmp")
        self._temporary.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, inputs: Array, targets: Array) -> None:
        """Add examples: inputs [n, ...] and targets [n, ...]."""
        arrays = {"inputs": np.asarray(inputs), "targets": np.asarray(targets)}
        if 0 in (arrays["inputs"].ndim, arrays["targets"].ndim) or len(inputs) != len(targets):
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise DataError(f"the examples are {shapes}; expected two arrays with as many rows")
        if not len(inputs):
            return
        if not self._columns:
            self._begin({name: column_type(array) for name, array in arrays.items()})
        for name, array in arrays.items():
            found, expected = f"{array.dtype.name}{list(array.shape[1:])}", str(self._columns[name])
            if found != expected:
                raise DataError(
                    f"example {self.num_rows:,}: {name} is {found}; expected {expected}, as in the first example"
                )
        start = 0
        while start < len(inputs):
            count = min(len(inputs) - start, len(self._rows["inputs"]) - self._filled)
            for name, array in arrays.items():
                self._rows[name][self._filled : self._filled + count] = array[start : start + count]
            self._filled, start, self.num_rows = self._filled + count, start + count, self.num_rows + count
            if self._filled == len(self._rows["inputs"]):
                self._write_shard()

    def _begin(self, columns: dict[str, ColumnType]) -> None:
        self._columns = columns
        rows = max(1, self._shard_bytes // sum(column.row_bytes for column in columns.values()))
        self._rows = {name: np.empty((rows, *column.shape), column.numpy_type) for name, column in columns.items()}

    def _write_shard(self) -> None:
        number = len(self._shards)
        path = self._temporary / f"shard-{number:05}.arrow"
        write_shard(path, self._dataset, number, {name: rows[: self._filled] for name, rows in self._rows.items()})
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._shards.append(ShardFile(path.name, self._filled, path.stat().st_size, digest))
        self._filled = 0

    def _finish(self) -> None:
        if self._filled:
            self._write_shard()
        if not self._shards:
            raise DataError(f"there is no example to write to {self._folder}; expected at least one")
        inputs, targets = self._columns["inputs"], self._columns["targets"]
        index = PackedIndex(dataset=self._dataset, inputs=inputs, targets=targets, shards=tuple(self._shards))
        write_index(index, self._temporary)
        rename_folder(self._temporary, self._folder)
