"""Messages from and to records, bounded and checked, and those that carry a piece of a file, without copies.

A union of tagged records is a message with one alternative (`oneof`) for each, named by its tag. So a check of the
protocol sees every field, and the annotations of the records are what a receiver accepts.

`Chunk`, and all messages of an upload except the first, have a single bytes field: a tag, a length and the bytes
(https://protobuf.dev/programming-guides/encoding/#length-types). Writing them here takes one copy, and reading none;
the generated classes take three and two, which is a third of gRPC's own cost for the bytes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from fedplat.config.decoding import prepare_type
from fedplat.wire.v1 import fleet_pb2, model_pb2

MAX_ENTRIES = 1000
"""Maximum number of entries of a list or a map in a message."""
_TAG = "type"
_Message = TypeVar("_Message", bound=Message)
_Record = TypeVar("_Record", bound=msgspec.Struct)


def to_message(kind: type[_Message], record: msgspec.Struct) -> _Message:
    """Return a record as a message. Only the record's own fields may have tagged records."""
    fields: dict[str, Any] = msgspec.to_builtins(record, builtin_types=(bytes,))
    for name, value in fields.items():
        if isinstance(value, dict) and _TAG in value:
            fields[name] = {value.pop(_TAG): value}
    return kind(**fields)


def to_record(message: Message, kind: type[_Record], max_bytes: int) -> _Record:
    """Return a message as a record. Raises `ValueError` if it is too large, or not what the record's fields may be."""
    if (size := message.ByteSize()) > max_bytes:
        raise ValueError(f"it has {size} bytes; expected at most {max_bytes}")
    return msgspec.convert(_read_fields(message), type=prepare_type(kind))


class _Field(NamedTuple):
    """A field of a message; `is_alternative`: of those in a `oneof`, at most one is set."""

    name: str
    has_presence: bool
    is_repeated: bool
    is_map: bool
    is_message: bool
    is_alternative: bool


@functools.lru_cache(maxsize=256)
def _list_fields(descriptor: Descriptor) -> list[_Field]:
    found: list[_Field] = []
    for field in descriptor.fields:
        inner, oneof = field.message_type, field.containing_oneof
        is_map = inner is not None and inner.GetOptions().map_entry
        is_alternative = oneof is not None and not oneof.name.startswith("_")  # protobuf has "_x" for an optional x
        found.append(
            _Field(field.name, field.has_presence, field.is_repeated, is_map, inner is not None, is_alternative)
        )
    return found


def _read_fields(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in _list_fields(message.DESCRIPTOR):
        if field.has_presence and not message.HasField(field.name):
            continue
        value = _read_value(field, getattr(message, field.name))
        if field.is_alternative:
            return {_TAG: field.name, **value}
        found[field.name] = value
    return found


def _read_value(field: _Field, value: Any) -> Any:
    if field.is_repeated and len(value) > MAX_ENTRIES:
        raise ValueError(f"{field.name} has {len(value)} entries; expected at most {MAX_ENTRIES}")
    if field.is_map:
        return {name: _check_finite(field, each) for name, each in value.items()}
    if field.is_repeated:
        return [_read_fields(each) if field.is_message else each for each in value]
    return _read_fields(value) if field.is_message else _check_finite(field, value)


def _check_finite(field: _Field, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field.name} is {value}; expected a finite number")
    return value


Bytes: TypeAlias = bytes | bytearray | memoryview

CHUNK: Final = model_pb2.Chunk.DESCRIPTOR.fields_by_name["data"].number
"""Field number of `Chunk.data`."""
UPLOAD: Final = fleet_pb2.UploadRequest.DESCRIPTOR.fields_by_name["data"].number
"""Field number of `UploadRequest.data`."""
_POSITION: Final = fleet_pb2.UploadRequest.DESCRIPTOR.fields_by_name["position"].number

_VARINT, _LENGTH_DELIMITED = 0, 2
_MAX_VARINT = 10
"""Maximum bytes of an encoded number of 64 bits."""


def frame_field(field: int, *parts: Bytes) -> bytes:
    """Encode a message whose only field is data, which is given in parts.

    >>> frame_field(CHUNK, b"ab", b"c") == model_pb2.Chunk(data=b"abc").SerializeToString()
    True
    """
    return b"".join((_frame_head(field, sum(map(len, parts))), *parts))


def frame_part(position: int, data: Bytes) -> bytes:
    """Encode data of an upload with their position in the file.

    >>> message = fleet_pb2.UploadRequest.FromString(frame_part(1000, b"abc"))
    >>> message.position, message.data
    (1000, b'abc')
    """
    head = bytes([_POSITION << 3 | _VARINT]) + _encode_number(position)
    return b"".join((head, _frame_head(UPLOAD, len(data)), data))


def unframe_field(field: int, message: Bytes) -> memoryview | None:
    """Return the bytes of a message with this field only; None for any other, which must be parsed by protobuf.

    >>> bytes(unframe_field(CHUNK, frame_field(CHUNK, b"abc")))
    b'abc'
    >>> unframe_field(UPLOAD, frame_field(CHUNK, b"abc"))
    """
    if not message or message[0] != field << 3 | _LENGTH_DELIMITED or (read := _read_number(message, 1)) is None:
        return None
    length, start = read
    return memoryview(message)[start:] if start + length == len(message) else None


def unframe_part(message: bytes) -> tuple[int, memoryview] | None:
    """Return the position and the bytes of a message of `frame_part`; None for any other.

    >>> position, data = unframe_part(frame_part(1000, b"abc"))
    >>> position, bytes(data)
    (1000, b'abc')
    >>> unframe_part(frame_field(UPLOAD, b"abc"))
    """
    if not message or message[0] != _POSITION << 3 | _VARINT or (read := _read_number(message, 1)) is None:
        return None
    position, start = read
    data = unframe_field(UPLOAD, memoryview(message)[start:])
    return (position, data) if data is not None and position < 2**64 else None


def _frame_head(field: int, size: int) -> bytes:
    return bytes([field << 3 | _LENGTH_DELIMITED]) + _encode_number(size)


def _encode_number(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_number(message: Bytes, start: int) -> tuple[int, int] | None:
    """Return the number that is encoded from `start` on, and where it ends; None if it does not end."""
    number = 0
    for position, byte in enumerate(message[start : start + _MAX_VARINT]):
        number |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return number, start + position + 1
    return None
