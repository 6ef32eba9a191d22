"""Packing of examples. A dataset appears under its name when it is complete; until then it is a temporary folder."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from fedplat.durable import rename_folder
from fedplat.errors import DataError
from fedplat.packed.arrow import Array, import_pyarrow, write_shard
from fedplat.packed.index import ColumnType, PackedIndex, ShardFile, column_type, write_index

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
