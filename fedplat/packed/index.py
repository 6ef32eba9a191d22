"""The index of a packed dataset: its columns, and the size and digest of each shard."""

from __future__ import annotations

import io
import math
import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.config.decoding import prepare_type
from fedplat.errors import DataError

INDEX_NAME = "index.json"
_MAX_INDEX_BYTES = 64 * 2**20
MAX_ROW_BYTES = 2**30

NumberType: TypeAlias = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"
]
NUMBER_TYPES: tuple[str, ...] = NumberType.__args__
_Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROW_BYTES)]
_Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
# Only the name of a file in the same folder: an index must not lead a reader elsewhere.
_ShardName = Annotated[str, msgspec.Meta(pattern=r"^shard-[0-9]{5,9}\.arrow\Z")]


class ColumnType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The type of the numbers of a column, and the shape of one example in it; `[]` for a scalar."""

    dtype: NumberType
    shape: Annotated[tuple[_Length, ...], msgspec.Meta(max_length=16)]

    @property
    def row_bytes(self) -> int:
        """Bytes of one example."""
        return math.prod(self.shape) * self.numpy_type.itemsize

    @property
    def numpy_type(self) -> np.dtype[np.generic]:
        """The type of the numbers, in the byte order of Arrow."""
        return np.dtype(self.dtype).newbyteorder("<")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the dataset."""

    file: _ShardName
    rows: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**50)]
    sha256: _Sha256


class PackedIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file `index.json`. Each shard repeats `dataset`, a random id, so that shards of two datasets never mix."""

    format: Literal["fedplat packed"] = "fedplat packed"
    version: Literal[1] = 1
    dataset: _Hex32
    inputs: ColumnType
    targets: ColumnType
    shards: Annotated[tuple[ShardFile, ...], msgspec.Meta(min_length=1, max_length=1_000_000)]

    @property
    def num_rows(self) -> int:
        """Number of examples."""
        return sum(shard.rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)


def column_type(examples: npt.NDArray[Any]) -> ColumnType:
    """Return the type of a column with examples [n, ...]. Raises `DataError` for one that cannot be packed."""
    kind, shape = examples.dtype, examples.shape[1:]
    if kind.name not in NUMBER_TYPES:
        raise DataError(f"an example has the type {kind}, which cannot be packed; expected {', '.join(NUMBER_TYPES)}")
    size = math.prod(shape) * kind.itemsize
    if len(shape) > 16 or 0 in shape or size > MAX_ROW_BYTES:
        raise DataError(
            f"an example has the shape {list(shape)} and {size:,} bytes; expected at most 16 dimensions, none of "
            f"length 0, and at most {MAX_ROW_BYTES:,} bytes"
        )
    return msgspec.convert({"dtype": kind.name, "shape": shape}, prepare_type(ColumnType))


def write_index(index: PackedIndex, folder: Path) -> None:
    """Write the index into a folder."""
    (folder / INDEX_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")


def read_index(folder: Path) -> PackedIndex:
    """Read the index of a packed dataset. Raises `DataError` that names the file."""
    path = folder / INDEX_NAME
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not a packed dataset: it has no file {INDEX_NAME}; expected the output of fedplat data pack"
        ) from None
    except OSError as exc:
        raise DataError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if len(text) > _MAX_INDEX_BYTES:
        raise DataError(f"{path} is larger than {_MAX_INDEX_BYTES:,} bytes; expected the index of a packed dataset")
    try:
        index = msgspec.json.decode(text, type=prepare_type(PackedIndex))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise DataError(f"{path} is not the index of a packed dataset: {exc}; pack the data again") from exc
    _check(index, path)
    return index


def _check(index: PackedIndex, path: Path) -> None:
    for name, column in (("inputs", index.inputs), ("targets", index.targets)):
        if column.row_bytes > MAX_ROW_BYTES:
            raise DataError(f"{path}: {name} is {column}; expected at most {MAX_ROW_BYTES:,} bytes for an example")
    if len({shard.file for shard in index.shards}) < len(index.shards):
        raise DataError(f"{path} names a shard twice; pack the data again")
    row_bytes = index.inputs.row_bytes + index.targets.row_bytes
    for shard in index.shards:
        if shard.rows * row_bytes > shard.size_bytes:
            raise DataError(
                f"{path}: {shard.file} has {shard.rows:,} examples of {row_bytes:,} bytes in {shard.size_bytes:,} "
                "bytes; pack the data again"
            )


def open_regular(path: Path, expected: str = "a file of a packed dataset: restore it") -> io.BufferedReader:
    """Open a file for reading. Raises `DataError` if it is not a regular file, `FileNotFoundError` and `OSError`."""
    # O_NONBLOCK: a plain open of a FIFO waits for its writer. For a regular file it changes nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{path} is not a regular file; expected {expected}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
