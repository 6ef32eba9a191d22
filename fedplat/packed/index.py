"""The index of a packed dataset, and its shards: Arrow IPC files. pyarrow is imported when one is read or written."""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat import system
from fedplat.config.decoding import prepare_type
from fedplat.errors import DataError, MissingExtraError
from fedplat.extras import install_command

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
    descriptor = os.open(path, os.O_RDONLY | system.O_NONBLOCK | system.O_BINARY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{path} is not a regular file; expected {expected}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


Array = npt.NDArray[Any]
_MAGIC = b"ARROW1\0\0"


def import_pyarrow() -> Any:
    """Import pyarrow. Raises `MissingExtraError`."""
    try:
        import pyarrow
    except ModuleNotFoundError as exc:
        raise MissingExtraError(f"packed data needs pyarrow; install it with: {install_command('tables')}") from exc
    return pyarrow


def write_shard(path: Path, dataset: str, number: int, columns: dict[str, Array]) -> None:
    """Write arrays [rows, ...] as the shard with this number. Raises `OSError`."""
    pyarrow = import_pyarrow()
    arrays = {name: _to_arrow(pyarrow, array) for name, array in columns.items()}
    schema = pyarrow.schema(
        [pyarrow.field(name, array.type, nullable=False) for name, array in arrays.items()],
        metadata=_metadata(dataset, number),
    )
    batch = pyarrow.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)


def map_shard(folder: Path, index: PackedIndex, number: int) -> tuple[Array, Array]:
    """Map a shard into memory; return its inputs and targets, [rows, ...] and read-only.

    Raises `DataError` that names the file, if it is missing or not what the index describes.
    """
    pyarrow, shard = import_pyarrow(), index.shards[number]
    path = folder / shard.file
    try:
        with open_shard(path, shard) as file:
            content = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        schema, message = _read_messages(pyarrow, path, content)
        _check_schema(pyarrow, path, schema, index, number)
        # Arrow would decompress it into new memory, of a size that the file names.
        if _is_compressed(pyarrow, message):
            raise DataError(
                f"{path} is compressed, or of an old version of Arrow; expected a shard as fedplat data pack writes it"
            )
        batch = pyarrow.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        if batch.num_rows != shard.rows:
            raise DataError(f"{path} has {batch.num_rows:,} examples; expected {shard.rows:,}, as in the index")
        return tuple(
            _to_numpy(path, batch.column(name), column, shard.rows)
            for name, column in (("inputs", index.inputs), ("targets", index.targets))
        )  # pyright: ignore[reportReturnType]
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, MemoryError, struct.error) as exc:
        raise DataError(f"{path} is damaged: {_first_line(exc)}; pack the data again, or restore the file") from exc


def open_shard(path: Path, shard: ShardFile) -> io.BufferedReader:
    """Open a shard. Raises `DataError` if it is missing, or if its size is not that of the index."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; expected every file that the index names: restore it") from None
    except OSError as exc:
        raise DataError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if (size := os.fstat(file.fileno()).st_size) != shard.size_bytes:
        file.close()
        raise DataError(
            f"{path} has {size:,} bytes; expected {shard.size_bytes:,}, as in the index: the file was truncated or "
            "replaced, restore it"
        )
    return file


def _read_messages(pyarrow: Any, path: Path, content: Any) -> tuple[Any, Any]:
    """Return the schema and the message of the only record batch, whose body is part of `content`.

    A reader of the file would follow its footer and decompress at once. The messages stand in order before the footer.
    """
    if content[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"{path} is not an Arrow IPC file; pack the data again, or restore the file")
    reader = pyarrow.ipc.MessageReader.open_stream(content[len(_MAGIC) :])
    messages = list(itertools.islice(reader, 3))
    if len(messages) != 2:
        found = {0: "no schema", 1: "no record batch"}.get(len(messages), "more than one record batch")
        raise DataError(f"{path} has {found}; expected a schema and one record batch: pack the data again")
    if (kinds := [message.type for message in messages]) != ["schema", "record batch"]:  # pyarrow crashes on others
        raise DataError(f"{path} has messages of the types {kinds}; expected a schema and one record batch: restore it")
    return pyarrow.ipc.read_schema(messages[0]), messages[1]


def _is_compressed(pyarrow: Any, message: Any) -> bool:
    """Return whether a record batch is, or may be, compressed. Raises `struct.error` for damaged metadata.

    pyarrow does not tell, so this reads the metadata, a FlatBuffers `Message`: its field 2 is the `RecordBatch`, of
    which field 3 is the compression (https://github.com/apache/arrow/blob/main/format/Message.fbs). Before version 5 of
    the metadata, compression stood elsewhere, too.
    """
    if message.metadata_version != pyarrow.ipc.MetadataVersion.V5:
        return True
    metadata = message.metadata
    header = _find_field(metadata, struct.unpack_from("<I", metadata)[0], 2)
    if header is None:
        return False
    return _find_field(metadata, header + struct.unpack_from("<I", metadata, header)[0], 3) is not None


def _find_field(metadata: Any, table: int, field: int) -> int | None:
    """Return the position of a field of a FlatBuffers table; None if the table lacks it."""
    # A table begins with the distance to its vtable, which has its own length, that of the table, and field offsets.
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    if not 0 <= vtable < len(metadata):
        raise struct.error("a table of its metadata lies outside")
    length = struct.unpack_from("<H", metadata, vtable)[0]
    place = 4 + 2 * field
    offset = struct.unpack_from("<H", metadata, vtable + place)[0] if place < length else 0
    return table + offset if offset else None


def _to_arrow(pyarrow: Any, array: Array) -> Any:
    # From bytes: `pyarrow.array` and `to_numpy` import pandas, `flatten` pyarrow.compute, which takes a second.
    content = pyarrow.py_buffer(np.ascontiguousarray(array))
    flat = pyarrow.Array.from_buffers(pyarrow.from_numpy_dtype(array.dtype), array.size, [None, content])
    if array.ndim == 1:
        return flat
    tensor = pyarrow.fixed_shape_tensor(flat.type, array.shape[1:])
    rows = pyarrow.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))
    return pyarrow.ExtensionArray.from_storage(tensor, rows)


def _arrow_type(pyarrow: Any, column: ColumnType) -> Any:
    number = pyarrow.from_numpy_dtype(column.numpy_type)
    return pyarrow.fixed_shape_tensor(number, column.shape) if column.shape else number


def _metadata(dataset: str, number: int) -> dict[bytes, bytes]:
    return {b"fedplat.dataset": dataset.encode(), b"fedplat.shard": b"%d" % number}


def _check_schema(pyarrow: Any, path: Path, schema: Any, index: PackedIndex, number: int) -> None:
    found = cast("dict[bytes, bytes]", schema.metadata or {})
    if found != _metadata(index.dataset, number):
        dataset = found.get(b"fedplat.dataset", b"an unknown dataset").decode(errors="replace")[:40]
        place = found.get(b"fedplat.shard", b"unknown").decode(errors="replace")[:20]
        raise DataError(
            f"{path} is not a shard of this dataset: it is shard {place} of {dataset}; expected shard {number} of "
            f"{index.dataset}: restore the file"
        )
    columns = {"inputs": index.inputs, "targets": index.targets}
    fields = [pyarrow.field(name, _arrow_type(pyarrow, column), nullable=False) for name, column in columns.items()]
    if not schema.equals(pyarrow.schema(fields), check_metadata=False):
        described = ", ".join(f"{field.name}: {field.type}" for field in list(schema)[:4])
        expected = ", ".join(f"{name}: {column}" for name, column in columns.items())
        raise DataError(f"{path} has the columns {described[:300]}; expected {expected}, as in the index")


def _to_numpy(path: Path, array: Any, column: ColumnType, rows: int) -> Array:
    """Return a column as a view of the mapped file, which stays mapped as long as the view is used."""
    values: Any = array.storage.values if column.shape else array
    if missing := max(array.null_count, values.null_count):
        raise DataError(f"{path} has {missing:,} missing values; expected none: pack the data again")
    if (content := values.buffers()[1]) is None:
        raise DataError(f"{path} has no values; pack the data again, or restore the file")
    count, offset = rows * math.prod(column.shape), values.offset * column.numpy_type.itemsize
    numbers = np.frombuffer(content, column.numpy_type, count, offset)
    return numbers.reshape(rows, *column.shape)


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]
