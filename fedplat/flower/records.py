"""The content of Flower messages as safetensors files, and arrays that are views of such a file.

The tensors of a file are the arrays of all ArrayRecords, in order, with their own dtypes. One more tensor of bytes,
`__records__`, has the rest as MessagePack: names and order of the records, metrics, configs, and the message's type. So
a file of a message is a model file as well, and no array is serialized a second time.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from msgspec import Meta

from fedplat.decoding import prepare_type
from fedplat.errors import FlowerError, ModelError
from fedplat.model import Parameters, Schema, blocks
from fedplat.model.schema import DTYPES, FLOATING, MAX_NAME_BYTES, METADATA_KEY
from fedplat.model.schema import MESSAGE_KEY as INDEX
from fedplat.texts import quote

MAX_INDEX_BYTES = 16 * 2**20
MAX_RECORDS = 10_000
NUMPY = "numpy.ndarray"
"""The serialization of arrays that Flower's own functions make: the file format of `numpy.save`."""
_DTYPES = {dtype: dtype for dtype in DTYPES.values() if dtype.kind != "V"}


class FlatArray(Array):
    """An array of a message that shares the memory of the message's file."""

    def __init__(self, values: npt.NDArray[Any]) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.dtype, self.shape, self.stype = str(values.dtype), values.shape, NUMPY
        self._values = values

    @property
    def data(self) -> bytes:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The serialized array, made when it is needed."""
        return Array(self._values).data

    def numpy(self) -> npt.NDArray[Any]:
        """Return a view of the file's memory."""
        return self._values


def share_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
    """Return a record of arrays that shares their memory; the constructor of `ArrayRecord` would serialize them."""
    record = ArrayRecord()
    for key, values in arrays.items():
        record[key] = FlatArray(values)
    return record


_Scalar: TypeAlias = bool | int | float | str


class _ArrayEntry(msgspec.Struct, frozen=True, array_like=True):
    """An array: its key, its tensor, and the fields of one whose tensor has its serialized bytes.

    `stype` is None if the tensor has the values themselves.
    """

    key: str
    tensor: str
    stype: str | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()


class _RecordEntry(msgspec.Struct, frozen=True, array_like=True):
    """A record: its arrays, or its values. None stands for bytes, which follow in `binary`."""

    name: str
    kind: Literal["arrays", "metrics", "config"]
    arrays: tuple[_ArrayEntry, ...] = ()
    values: dict[str, _Scalar | list[_Scalar] | None] = {}
    binary: dict[str, bytes | list[bytes]] = {}

    def read_values(self) -> dict[str, Any]:
        """Return the values in their order. Raises `ValueError` if bytes are missing."""
        found = {key: self.binary.get(key) if value is None else value for key, value in self.values.items()}
        if None in found.values():
            raise ValueError("a value is missing")
        return found


class _Index(msgspec.Struct, frozen=True, array_like=True):
    records: Annotated[tuple[_RecordEntry, ...], Meta(max_length=MAX_RECORDS)]
    message_type: str = ""
    group_id: str = ""


class MessageFile(msgspec.Struct, frozen=True):
    """The content of a message, its type and its group."""

    content: RecordDict
    message_type: str = ""
    group_id: str = ""


class PackedMessage:
    """The file of a message, without a copy of its arrays: they must not change before the file is written or sent."""

    def __init__(self, content: RecordDict, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Lay the arrays out. Raises `ModelError` for arrays that no file can hold."""
        self.content = content
        self.schema = Schema.of(arrays)
        self._arrays = [np.asarray(arrays[tensor.name], order="C") for tensor in self.schema.tensors]

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        """The bytes of the file: its header, and each tensor."""
        return (memoryview(self.schema.header), *(values.data for values in self._to_bytes()))

    def find_nonfinite(self) -> str:
        """Return the name of a tensor with a NaN or an infinite number, or ""."""
        for tensor, values in zip(self.schema.tensors, self._arrays, strict=True):
            flat = values.reshape(-1)
            if tensor.dtype in FLOATING and not all(np.isfinite(flat[block]).all() for block in blocks(flat.size)):
                return tensor.name
        return ""

    def copy(self) -> PackedMessage:
        """Return the same message with arrays of its own."""
        return pack(decode(self.to_parameters()))

    def to_parameters(self) -> Parameters:
        """Return a copy of the file."""
        return Parameters(self.schema, np.concatenate(self._to_bytes()))

    def to_bytes(self) -> bytes:
        """Return a copy of the file as bytes."""
        return b"".join(self.pieces)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedMessage):
            return NotImplemented
        return self.schema == other.schema and all(map(np.array_equal, self._to_bytes(), other._to_bytes()))

    __hash__ = None  # pyright: ignore[reportAssignmentType] - it has arrays

    def _to_bytes(self) -> list[npt.NDArray[np.uint8]]:
        return [values.reshape(-1).view(np.uint8) for values in self._arrays]


def encode(message: MessageFile) -> Parameters:
    """Return the file of a message, with a copy of its arrays. Raises `FlowerError` as `pack` does."""
    return pack(message).to_parameters()


def pack(message: MessageFile) -> PackedMessage:
    """Return the file of a message. Raises `FlowerError` for values that no file can hold."""
    tensors: dict[str, npt.NDArray[Any]] = {}
    records: list[_RecordEntry] = []
    is_single = len(message.content.array_records) == 1
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            entries = tuple(_add_arrays(record, "" if is_single else f"{name}/", tensors))
            records.append(_RecordEntry(name, "arrays", arrays=entries))
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            in_bytes: dict[str, Any] = {key: value for key, value in record.items() if _has_bytes(value)}
            others: dict[str, Any] = {key: None if key in in_bytes else value for key, value in record.items()}
            records.append(_RecordEntry(name, kind, values=others, binary=in_bytes))
    try:
        index = msgspec.msgpack.encode(
            _Index(tuple(records), message.message_type, message.group_id), enc_hook=_make_plain
        )
    except (TypeError, OverflowError) as exc:
        raise FlowerError(f"a record of the message cannot be sent: {exc}") from exc
    if len(index) > MAX_INDEX_BYTES:
        raise FlowerError(
            f"the metrics and configs of the message have {len(index)} bytes; expected at most {MAX_INDEX_BYTES}: send "
            "large values as arrays"
        )
    tensors[INDEX] = np.frombuffer(index, np.uint8)
    try:
        return PackedMessage(message.content, tensors)
    except ModelError as exc:
        raise FlowerError(f"the arrays of the message cannot be sent: {exc}") from exc


def decode(file: Parameters) -> MessageFile:
    """Return the message of a file, whose arrays are views of it. Raises `FlowerError` for a file of another kind."""
    index = _read_index(file)
    content = RecordDict()
    unread = set(file) - {INDEX}
    for entry in index.records:
        try:
            if entry.name in content:
                raise ValueError("there are two of that name")
            if entry.kind == "arrays":
                content[entry.name] = _read_arrays(file, entry.arrays, unread)
            else:
                content[entry.name] = (MetricRecord if entry.kind == "metrics" else ConfigRecord)(entry.read_values())
        except (TypeError, ValueError) as exc:
            raise FlowerError(f"the record {quote(entry.name)} of the message cannot be read: {exc}") from exc
    return MessageFile(content, index.message_type, index.group_id)


def _has_bytes(value: object) -> bool:
    return isinstance(value[0] if isinstance(value, list) and value else value, bytes)


def _make_plain(value: Any) -> int | float | str | bytes:
    """Return a value of a subclass, such as a NumPy float64, as one of the class that records know."""
    match value:
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str(value)
        case bytes():
            return bytes(value)
        case _:
            raise TypeError(f"a {type(value).__name__} is no value of a record")


def _read_index(file: Parameters) -> _Index:
    found = file.get(INDEX)
    if found is None or found.dtype != np.uint8 or found.ndim != 1 or found.nbytes > MAX_INDEX_BYTES:
        raise FlowerError(f"the file is not that of a message; expected a tensor {INDEX} of bytes")
    try:
        return msgspec.msgpack.decode(found.data, type=prepare_type(_Index))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise FlowerError(f"the tensor {INDEX} of the message cannot be read") from exc


def _read_arrays(file: Parameters, entries: tuple[_ArrayEntry, ...], unread: set[str]) -> ArrayRecord:
    record = ArrayRecord()
    for entry in entries:
        if entry.tensor not in unread or entry.key in record:
            raise ValueError(f"its tensor {quote(entry.tensor)} is not in the file, or is used twice")
        unread.remove(entry.tensor)
        values = file[entry.tensor]
        if entry.stype is not None:
            if values.dtype != np.uint8 or values.ndim != 1:
                raise ValueError(f"the tensor {quote(entry.tensor)} has no bytes")
            record[entry.key] = Array(entry.dtype, tuple(entry.shape), entry.stype, values.tobytes())
        else:
            record[entry.key] = FlatArray(values)
    return record


def _add_arrays(
    record: Mapping[str, Array], prefix: str, tensors: dict[str, npt.NDArray[Any]]
) -> Iterator[_ArrayEntry]:
    for key, array in record.items():
        name = _choose_name(f"{prefix}{key}", tensors)
        values = _view(array)
        if values is not None:
            tensors[name] = values
            yield _ArrayEntry(key, name)
        else:
            tensors[name] = np.frombuffer(array.data, np.uint8)
            yield _ArrayEntry(key, name, array.stype, array.dtype, tuple(array.shape))


def _choose_name(name: str, taken: Mapping[str, object]) -> str:
    """Return a name that no other tensor has and that a file allows; the index has the array's own key."""
    if name and name not in (INDEX, METADATA_KEY) and name not in taken and len(name.encode()) <= MAX_NAME_BYTES:
        return name
    return next(other for number in itertools.count(len(taken)) if (other := f"#{number}") not in taken)


def _view(array: Array) -> npt.NDArray[Any] | None:
    """Return the values of an array without copying them; None if they can only be sent as serialized bytes."""
    if isinstance(array, FlatArray):
        return array.numpy()
    # An array of the old API has neither a dtype nor a shape of its own: its bytes are kept, and so are these fields.
    if array.stype != NUMPY or not array.dtype:
        return None
    start = io.BytesIO(array.data[:4096])
    try:
        version = np.lib.format.read_magic(start)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(start)
        if is_fortran or dtype not in _DTYPES or tuple(shape) != tuple(array.shape) or str(dtype) != array.dtype:
            return None
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(array.data, dtype, count, start.tell()).reshape(shape)
    except ValueError:
        return None
