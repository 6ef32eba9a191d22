"""The layout of a message's file: its index, and its arrays. This module needs no `flwr`.

The tensors of a file are the arrays of all ArrayRecords, in order, with their own dtypes. An array that no tensor can
hold, such as one of complex numbers, is a tensor of bytes: its serialization by Flower, which is the file format of
`numpy.save`. One more tensor of bytes, `__records__`, is the index.

A server reads here what a client has sent, before it counts: what an array claims to be, in the index and in the header
of its bytes, is compared with what it is.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, cast

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedplat.config.decoding import prepare_type
from fedplat.errors import FlowerError
from fedplat.model import Schema, blocks
from fedplat.model.blocks import WINDOW
from fedplat.model.schema import MESSAGE_KEY as INDEX
from fedplat.model.values import Bytes, FlatModel, Read, all_finite
from fedplat.texts import quote

MAX_INDEX_BYTES = 16 * 2**20
MAX_RECORDS = 10_000
MAX_VALUES = 100_000
"""Maximum number of keys and values in an index. Each becomes objects of some hundred bytes, whatever its size."""
NUMPY = "numpy.ndarray"
"""The serialization of arrays that Flower's own functions make: the file format of `numpy.save`."""
_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 4096
_MAX_RANK = 64
_ENTRY_TOKENS = 10
"""More than the entry of an array has in an index, with a shape of four dimensions."""
_DTYPE = re.compile(r"[<>|=](?:[biufc]\d{1,2}|[SUV]\d{1,9}|[mM]8(?:\[\d{0,9}\w{1,3}\])?)")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Scalar: TypeAlias = bool | int | float | str


class ArrayEntry(msgspec.Struct, frozen=True, array_like=True):
    """An array: its key, its tensor, and the fields of one whose tensor has its serialized bytes.

    `stype` is None if the tensor has the values themselves.
    """

    key: str
    tensor: str
    stype: str | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()


class RecordEntry(msgspec.Struct, frozen=True, array_like=True):
    """A record: its arrays, or its values. None stands for bytes, which follow in `binary`."""

    name: str
    kind: Literal["arrays", "metrics", "config"]
    arrays: tuple[ArrayEntry, ...] = ()
    values: dict[str, Scalar | list[Scalar] | None] = {}
    binary: dict[str, bytes | list[bytes]] = {}

    def read_values(self) -> dict[str, Any]:
        """Return the values in their order. Raises `ValueError` if bytes are missing."""
        found = {key: self.binary.get(key) if value is None else value for key, value in self.values.items()}
        if None in found.values():
            raise ValueError("a value is missing")
        return found


class Index(msgspec.Struct, frozen=True, array_like=True):
    """What is not an array in a message."""

    records: Annotated[tuple[RecordEntry, ...], Meta(max_length=MAX_RECORDS)]
    message_type: str = ""
    group_id: str = ""


class ArrayHeader(NamedTuple):
    """What the header of an array in the file format of `numpy.save` says; `start` is the place of its values."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    start: int

    def view(self, content: Bytes) -> npt.NDArray[Any]:
        """Return the values in the bytes of the array."""
        values = content[self.start :].view(self.dtype) if len(content) > self.start else np.empty(0, self.dtype)
        return values.reshape(self.shape, order="F" if self.is_fortran else "C")


def read_index(content: npt.NDArray[Any] | None, schema: Schema) -> Index:
    """Return the index of a file, whose entries name tensors of the file, each once. Raises `FlowerError`."""
    if content is None or content.dtype != np.uint8 or content.ndim != 1 or content.nbytes > MAX_INDEX_BYTES:
        raise FlowerError(f"the file is not that of a message; expected a tensor {INDEX} of bytes")
    if not has_few_values(content.data, len(schema.tensors)):
        raise FlowerError(f"the records of the message have more than {MAX_VALUES} keys and values, which is too many")
    try:
        index = msgspec.msgpack.decode(content.data, type=prepare_type(Index))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise FlowerError(f"the tensor {INDEX} of the message cannot be read") from exc
    unread, names = {tensor.name for tensor in schema.tensors} - {INDEX}, set[str]()
    for record in index.records:
        if record.name in names:
            raise _unreadable(record, "there are two of that name")
        names.add(record.name)
        keys = set[str]()
        for entry in record.arrays:
            if entry.tensor not in unread or entry.key in keys:
                raise _unreadable(record, f"its tensor {quote(entry.tensor)} is not in the file, or is used twice")
            unread.remove(entry.tensor)
            keys.add(entry.key)
    return index


def has_few_values(index: memoryview, num_arrays: int, most: int = MAX_VALUES) -> bool:
    """Return whether an index has few keys and values besides those of its arrays, without making objects of them."""
    position, size_bytes = 0, len(index)
    for _ in range(most + _ENTRY_TOKENS * num_arrays + 1):
        if position >= size_bytes:
            return True
        position += _measure_token(index, position)
    return False


def read_array(content: Bytes, dtype: str = "", shape: tuple[int, ...] = ()) -> npt.NDArray[Any]:
    """Return the values in the bytes of an array as a view. Raises `ValueError` as `read_header` does."""
    prefix = content[:_MAX_HEADER_BYTES].tobytes()
    return read_header(prefix, len(content), dtype, shape).view(content)


def read_header(prefix: bytes, size_bytes: int, dtype: str = "", shape: tuple[int, ...] = ()) -> ArrayHeader:
    """Return the header of an array of `size_bytes` bytes, which begin with `prefix`.

    Raises `ValueError` unless the bytes are exactly one array in the file format of `numpy.save`, with this dtype and
    shape. An array of Flower's old API claims neither of them. Arrays of Python objects are refused.
    """
    found = _parse_header(prefix)
    if found.start + found.dtype.itemsize * math.prod(found.shape) != size_bytes:
        raise ValueError(f"an array of {_describe(found)} does not have {size_bytes - found.start} bytes")
    is_bfloat16 = dtype == "bfloat16" and found.dtype == np.dtype("V2")  # as `numpy.save` writes it
    if dtype and (shape != found.shape or (dtype != str(found.dtype) and not is_bfloat16)):
        raise ValueError(f"it claims to be {quote(dtype)} of shape {list(shape)}, and has {_describe(found)}")
    return found._replace(dtype=_BFLOAT16) if is_bfloat16 else found


def check_reply(file: FlatModel, array_types: Collection[str] = ()) -> bool:
    """Return whether all numbers in the serialized arrays of a client's reply are finite.

    Memory does not grow with the file. Raises `FlowerError` for a file that is not that of a message, for arrays that
    are not what they claim to be, and for serializations besides NumPy's that are not in `array_types`.
    """
    schema = file.schema
    places = {tensor.name: position for position, tensor in enumerate(schema.tensors)}
    tensor = schema.tensors[places[INDEX]] if INDEX in places else None
    if tensor is None or tensor.dtype != "U8" or tensor.size_bytes > MAX_INDEX_BYTES:
        raise FlowerError(f"the file is not that of a message; expected a tensor {INDEX} of bytes")
    with file.reader(max(tensor.size_bytes, _MAX_HEADER_BYTES, 16 * WINDOW)) as read:
        content = read(schema.offsets[places[INDEX]], tensor.size_bytes).reshape(tensor.shape).copy()
        finite = True
        for record in read_index(content, schema).records:
            for entry in record.arrays:
                check_type(record, entry, array_types)
                if entry.stype == NUMPY:
                    place = places[entry.tensor]
                    try:
                        finite &= _is_finite_in(read, schema, place, entry)
                    except ValueError as exc:
                        raise _unreadable(record, f"the array {quote(entry.key)}: {exc}") from exc
    return finite


def check_type(record: RecordEntry, entry: ArrayEntry, array_types: Collection[str]) -> None:
    """Raise `FlowerError` for an array that is serialized otherwise than by NumPy, unless its type is allowed."""
    if entry.stype is not None and entry.stype != NUMPY and entry.stype not in array_types:
        raise _unreadable(
            record,
            f"the array {quote(entry.key)} is serialized as {quote(entry.stype)}; expected {NUMPY}, or a type that "
            "flower.array_types names",
        )


def is_array_finite(values: npt.NDArray[Any]) -> bool:
    """Return whether an array has no NaN or infinite number, in its own dtype or as float32."""
    if values.dtype.kind not in "fc" and values.dtype != _BFLOAT16:
        return True
    flat = values.reshape(-1, order="A")
    return all(_is_finite(flat[block]) for block in blocks(flat.size, WINDOW))


def _is_finite_in(read: Read, schema: Schema, place: int, entry: ArrayEntry) -> bool:
    """Return whether a serialized array is finite, window by window. Raises `ValueError` if it cannot be read."""
    tensor, start = schema.tensors[place], schema.offsets[place]
    if tensor.dtype != "U8" or len(tensor.shape) != 1:
        raise ValueError(f"the tensor {quote(entry.tensor)} has no bytes")
    prefix = read(start, min(tensor.size_bytes, _MAX_HEADER_BYTES)).tobytes()
    found = read_header(prefix, tensor.size_bytes, entry.dtype, entry.shape)
    if found.dtype.kind not in "fc" and found.dtype != _BFLOAT16:
        return True
    start, item = start + found.start, found.dtype.itemsize
    parts = blocks(math.prod(found.shape), WINDOW)
    return all(_is_finite(read(start + item * p.start, item * (p.stop - p.start)).view(found.dtype)) for p in parts)


def _is_finite(values: npt.NDArray[Any]) -> bool:
    if values.dtype.kind == "c":
        return _is_finite(np.real(values)) and _is_finite(np.imag(values))
    return all_finite(values.astype(values.dtype.newbyteorder("="), copy=False))


def _parse_header(prefix: bytes) -> ArrayHeader:
    """Return the header at the beginning of an array's bytes. NumPy's own function may read far more."""
    length_bytes = {1: 2, 2: 4, 3: 4}.get(prefix[6] if len(prefix) > 6 else 0, 0)
    start = 8 + length_bytes
    if not prefix.startswith(_MAGIC) or not length_bytes or len(prefix) < start:
        raise ValueError("it is not in the file format of numpy.save")
    end = start + int.from_bytes(prefix[8:start], "little")
    if end > len(prefix):
        raise ValueError(f"its header ends after {end} bytes; expected at most {min(len(prefix), _MAX_HEADER_BYTES)}")
    try:
        found = ast.literal_eval(prefix[start:end].decode("latin1").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise ValueError("its header is not that of numpy.save") from exc
    match found:
        case {"descr": str(descr), "fortran_order": bool(is_fortran), "shape": tuple(shape)} if _DTYPE.fullmatch(descr):
            sizes = cast(tuple[object, ...], shape)
        case _:
            raise ValueError("its header is not that of numpy.save, or it is an array of Python objects or records")
    if len(sizes) > _MAX_RANK or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError("its header has no shape")
    try:
        return ArrayHeader(np.dtype(descr), cast(tuple[int, ...], sizes), is_fortran, end)
    except TypeError as exc:
        raise ValueError(f"its header has the dtype {quote(descr)}, which NumPy does not know") from exc


def _describe(found: ArrayHeader) -> str:
    return f"{found.dtype} of shape {list(found.shape)}"


def _measure_token(index: memoryview, position: int) -> int:
    """Return the bytes of one MessagePack token; of a list or a map, those of its head (the MessagePack format)."""
    head = index[position]
    if head < 0xC0:  # small integers, and the heads of short maps, lists and texts
        return 1 + (head & 31 if head >= 0xA0 else 0)
    if (fixed := _FIXED.get(head)) is not None:
        return fixed
    if (width := _COUNTED.get(head)) is None:
        return 1
    extension = 0xC7 <= head <= 0xC9
    return 1 + width + extension + int.from_bytes(index[position + 1 : position + 1 + width], "big")


_FIXED = {0xCA: 5, 0xCB: 9, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18} | {
    base + power: 1 + 2**power for base in (0xCC, 0xD0) for power in range(4)
}
"""The bytes of tokens of a fixed size, and of the heads of long lists and maps."""
_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""The bytes in which texts, bytes and extensions have their length."""


def _unreadable(record: RecordEntry, text: object) -> FlowerError:
    return FlowerError(f"the record {quote(record.name)} of the message cannot be read: {text}")
