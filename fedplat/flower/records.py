"""The content of Flower messages as files, and the messages around it.

`layout.py` describes the files. A file of a message is a model file as well, and no array is serialized a second time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict

from fedplat.errors import FlowerError, ModelError
from fedplat.flower import identity, layout
from fedplat.flower.layout import INDEX, NUMPY, ArrayEntry, Index, RecordEntry
from fedplat.model import Parameters, Schema
from fedplat.model.schema import DTYPES, MAX_NAME_BYTES, METADATA_KEY
from fedplat.texts import quote

_DTYPES = frozenset(DTYPES.values())


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
        """Return the key of an array with a NaN or an infinite number, or ""."""
        for record in self.content.array_records.values():
            for key, array in record.items():
                values = view_array(array)
                if values is not None and not layout.is_array_finite(values):
                    return key
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
    records: list[RecordEntry] = []
    is_single = len(message.content.array_records) == 1
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            entries = tuple(_add_arrays(record, "" if is_single else f"{name}/", tensors))
            records.append(RecordEntry(name, "arrays", arrays=entries))
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            in_bytes: dict[str, Any] = {key: value for key, value in record.items() if _has_bytes(value)}
            others: dict[str, Any] = {key: None if key in in_bytes else value for key, value in record.items()}
            records.append(RecordEntry(name, kind, values=others, binary=in_bytes))
    try:
        index = msgspec.msgpack.encode(
            Index(tuple(records), message.message_type, message.group_id), enc_hook=_make_plain
        )
    except (TypeError, OverflowError) as exc:
        raise FlowerError(f"a record of the message cannot be sent: {exc}") from exc
    if len(index) > layout.MAX_INDEX_BYTES or not layout.has_few_values(memoryview(index), len(tensors)):
        raise FlowerError(
            f"the metrics and configs of the message have {len(index)} bytes; expected at most "
            f"{layout.MAX_INDEX_BYTES}, and {layout.MAX_VALUES} keys and values: send large values as arrays"
        )
    tensors[INDEX] = np.frombuffer(index, np.uint8)
    try:
        return PackedMessage(message.content, tensors)
    except ModelError as exc:
        raise FlowerError(f"the arrays of the message cannot be sent: {exc}") from exc


def decode(file: Parameters) -> MessageFile:
    """Return the message of a file, whose arrays are views of it. Raises `FlowerError` for a file of another kind."""
    index = layout.read_index(file.get(INDEX), file.schema)
    content = RecordDict()
    for entry in index.records:
        try:
            if entry.kind == "arrays":
                content[entry.name] = _read_arrays(file, entry.arrays)
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


def _read_arrays(file: Parameters, entries: tuple[ArrayEntry, ...]) -> ArrayRecord:
    record = ArrayRecord()
    for entry in entries:
        values = file[entry.tensor]
        if entry.stype is None:
            record[entry.key] = FlatArray(values)
            continue
        if values.dtype != np.uint8 or values.ndim != 1:
            raise ValueError(f"the tensor {quote(entry.tensor)} has no bytes")
        if entry.stype == NUMPY:
            record[entry.key] = FlatArray(layout.read_array(values, entry.dtype, entry.shape))
        else:
            record[entry.key] = Array(entry.dtype, tuple(entry.shape), entry.stype, values.tobytes())
    return record


def _add_arrays(record: Mapping[str, Array], prefix: str, tensors: dict[str, npt.NDArray[Any]]) -> Iterator[ArrayEntry]:
    for key, array in record.items():
        name = _choose_name(f"{prefix}{key}", tensors)
        values = view_array(array)
        is_flat = isinstance(array, FlatArray) or (values is not None and values.flags.c_contiguous)
        if values is not None and values.dtype in _DTYPES and is_flat:
            tensors[name] = values
            yield ArrayEntry(key, name)
        else:
            tensors[name] = np.frombuffer(array.data, np.uint8)
            claimed = ("", ()) if values is None else (str(values.dtype), values.shape)
            yield ArrayEntry(key, name, array.stype, array.dtype or claimed[0], tuple(array.shape) or claimed[1])


def _choose_name(name: str, taken: Mapping[str, object]) -> str:
    """Return a name that no other tensor has and that a file allows; the index has the array's own key."""
    if name and name not in (INDEX, METADATA_KEY) and name not in taken and len(name.encode()) <= MAX_NAME_BYTES:
        return name
    return next(other for number in itertools.count(len(taken)) if (other := f"#{number}") not in taken)


def view_array(array: Array) -> npt.NDArray[Any] | None:
    """Return the values of an array without copying them; None if an app has serialized it in its own way.

    Raises `FlowerError` if it is not what it claims to be.
    """
    if isinstance(array, FlatArray):
        return array.numpy()
    if array.stype != NUMPY:
        return None
    try:
        return layout.read_array(np.frombuffer(array.data, np.uint8), array.dtype, tuple(array.shape))
    except ValueError as exc:
        raise FlowerError(f"an array of the message cannot be sent: {exc}") from exc


FAILED, LATE = 2, 4
"""The codes of error replies, as Flower counts them: a client failed, or its reply did not arrive in time."""


def make_message(file: MessageFile, node_id: int) -> Message:
    """Return the message that a node receives."""
    metadata = _make_metadata("message", identity.SERVER_NODE_ID, node_id, "", file.message_type, file.group_id)
    return Message(content=file.content, metadata=metadata)  # pyright: ignore[reportCallIssue]


def make_reply(answer: RecordDict | Error, node_id: int, message_type: str, message_id: str) -> Message:
    """Return the message that a ServerApp receives from a node, in reply to the message with this id."""
    metadata = _make_metadata(f"{message_id}-reply", node_id, identity.SERVER_NODE_ID, message_id, message_type, "")
    return Message(answer, metadata=metadata)  # pyright: ignore[reportCallIssue]


def _make_metadata(
    message_id: str, source: int, destination: int, reply_to: str, message_type: str, group_id: str
) -> Metadata:
    return Metadata(
        run_id=identity.RUN_ID,
        message_id=message_id,
        src_node_id=source,
        dst_node_id=destination,
        reply_to_message_id=reply_to,
        group_id=group_id,
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=message_type,
    )


NUM_EXAMPLES = "num-examples"
"""The metric that is the weight of a reply."""


def make_request(model: Parameters, config: Mapping[str, bool | int | float | str], message_type: str) -> Parameters:
    """Return the file of a message with a model and a configuration."""
    content = RecordDict({"arrays": share_arrays(model), "config": ConfigRecord({**config})})
    return encode(MessageFile(content, message_type))


def read_reply(content: RecordDict, name: str) -> tuple[Mapping[str, npt.NDArray[Any]] | None, dict[str, float]]:
    """Return the arrays of a reply, None if it has none, and its metrics that are numbers.

    `name` is that of the app. Raises `FlowerError` for a reply with several ArrayRecords or MetricRecords.
    """
    for kind, found in (("ArrayRecord", content.array_records), ("MetricRecord", content.metric_records)):
        if len(found) > 1:
            raise FlowerError(f"the ClientApp of {name} answered with {len(found)} {kind}s; expected one")
    arrays = next(iter(content.array_records.values()), None)
    metrics = next(iter(content.metric_records.values()), {})
    return (
        None if arrays is None else {key: array.numpy() for key, array in arrays.items()},
        {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)},
    )
