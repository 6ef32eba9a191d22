"""Decoding of records by several threads.

msgspec builds the table of a record's fields when the record is first decoded, and publishes it before it is complete:
a second thread that decodes such a record meanwhile crashes the process (msgspec 0.22.0). So a call that decodes names
its type through `prepare_type`, or has a decoder that was created when its module was imported.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, TypeVar

import msgspec

_Type = TypeVar("_Type", bound=Any)
_prepared = set[Any]()
_lock = threading.Lock()


def prepare_type(kind: type[_Type]) -> type[_Type]:
    """Return a type that any number of threads may decode; the first call builds the tables of its records.

    Raises `TypeError` if msgspec does not support the type.
    """
    if kind not in _prepared:
        with _lock:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind


def require_known(stored: object, record: type[Any]) -> None:
    """Raise `msgspec.ValidationError` for fields that this release does not know, and so would not write again."""
    names = getattr(record, "__struct_fields__", None) or tuple(field.name for field in dataclasses.fields(record))
    if isinstance(stored, dict) and (unknown := stored.keys() - set(names)):
        raise msgspec.ValidationError(f"Object contains unknown field `{min(unknown)}`")
