"""Shards as Arrow IPC files. pyarrow is imported when a shard is read or written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError, MissingExtraError
from fedplat.packed.index import ColumnType, PackedIndex, ShardFile

Array = npt.NDArray[Any]


def import_pyarrow() -> Any:
    """Import pyarrow. Raises `MissingExtraError`."""
    try:
        import pyarrow
    except ModuleNotFoundError as exc:
        raise MissingExtraError("packed data needs pyarrow; install it with: pip install 'fedplat[tables]'") from exc
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
    check_size(path, shard)
    try:
        with pyarrow.memory_map(str(path)) as file:
            content = file.read_buffer()
        reader = pyarrow.ipc.open_file(content, options=pyarrow.ipc.IpcReadOptions(use_threads=False))
        _check_schema(pyarrow, path, reader.schema, index, number)
        if reader.num_record_batches != 1:
            raise DataError(f"{path} has {reader.num_record_batches} record batches; expected one: pack the data again")
        batch = reader.get_batch(0)
        batch.validate(full=True)
        if batch.num_rows != shard.rows:
            raise DataError(f"{path} has {batch.num_rows:,} examples; expected {shard.rows:,}, as in the index")
        return tuple(
            _to_numpy(path, content, batch.column(name), column, shard.rows)
            for name, column in (("inputs", index.inputs), ("targets", index.targets))
        )  # pyright: ignore[reportReturnType]
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as exc:
        raise DataError(f"{path} is damaged: {_first_line(exc)}; pack the data again, or restore the file") from exc


def check_size(path: Path, shard: ShardFile) -> None:
    """Raise `DataError` if a shard is missing, or if its size is not that of the index."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is missing; expected every file that the index names: restore it") from None
    except OSError as exc:
        raise DataError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if not path.is_file() or size != shard.size_bytes:
        raise DataError(
            f"{path} has {size:,} bytes; expected {shard.size_bytes:,}, as in the index: the file was truncated or "
            "replaced, restore it"
        )


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


def _to_numpy(path: Path, content: Any, array: Any, column: ColumnType, rows: int) -> Array:
    """Return a column as a view of the mapped file, which stays mapped as long as the view is used."""
    values: Any = array.storage.values if column.shape else array
    if missing := max(array.null_count, values.null_count):
        raise DataError(f"{path} has {missing:,} missing values; expected none: pack the data again")
    buffer = values.buffers()[1]
    # Arrow decompresses into new memory, of a size that the file names.
    if buffer is None or not content.address <= buffer.address <= content.address + content.size - buffer.size:
        raise DataError(f"{path} is compressed; expected a shard as fedplat data pack writes it")
    count, offset = rows * math.prod(column.shape), values.offset * column.numpy_type.itemsize
    numbers = np.frombuffer(buffer, column.numpy_type, count, offset)
    return numbers.reshape(rows, *column.shape)


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]
