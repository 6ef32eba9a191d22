"""Records as messages of the protocol with the same fields, and back, bounded and checked on receipt.

A union of tagged records is a message with one alternative (`oneof`) for each, named by its tag. So a check of the
protocol sees every field, and the annotations of the records are what a receiver accepts.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from fedplat.config.decoding import prepare_type

MAX_ENTRIES = 1000
"""Maximum number of entries of a list or a map in a message."""
_TAG = "type"
_Message = TypeVar("_Message", bound=Message)
_Record = TypeVar("_Record", bound=msgspec.Struct)


def write(kind: type[_Message], record: msgspec.Struct) -> _Message:
    """Return a record as a message. Only the record's own fields may have tagged records."""
    fields: dict[str, Any] = msgspec.to_builtins(record, builtin_types=(bytes,))
    for name, value in fields.items():
        if isinstance(value, dict) and _TAG in value:
            fields[name] = {value.pop(_TAG): value}
    return kind(**fields)


def read(message: Message, kind: type[_Record], max_bytes: int) -> _Record:
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
