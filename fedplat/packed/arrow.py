"""Shards as Arrow IPC files. pyarrow is imported when a shard is read or written."""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError, MissingExtraError
from fedplat.extras import install_command
from fedplat.packed.index import ColumnType, PackedIndex, ShardFile, open_regular

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
