"""Plugins as objects: records that hold options records as their fields, made in Python without a file.

They are adopted (`fedplat.config.plugins.adopt`), so that a record that was made from objects equals one that was read
from a file, and can be written to one.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from fedplat.config.plugins import Kind, Plugins, adopt, find_kind, find_records, name_of
from fedplat.errors import PluginError


def adopt_fields(record: Struct, prefix: str = "") -> None:
    """Adopt the plugins among the fields of a new record and of the records in it, in place.

    So a record that is made from objects equals one that was read from a file. The name of a class in an importable
    module is its reference, `module:class`. Raises `PluginError`, whose message begins with the key of the field.
    """
    for field, kind in _kinds_of_fields(type(record)).items():
        value: object = getattr(record, field)
        adopted = _adopt_values(value, kind, f"{prefix}{field}")
        if adopted is not value:
            msgspec.structs.force_setattr(record, field, adopted)
    for field in record.__struct_fields__:
        if isinstance(inner := getattr(record, field), Struct):
            adopt_fields(inner, f"{prefix}{field}.")


def plugins_in(value: object) -> Plugins:
    """Return the adopted plugins among the fields of a record, or of several, as names that a file may use."""
    given: dict[tuple[str, str], type[Struct]] = {}
    for record in find_records(value):
        for field, kind in _kinds_of_fields(type(record)).items():
            held: object = getattr(record, field)
            for each in cast(Sequence[object], held) if isinstance(held, tuple | list) else (held,):
                if isinstance(each, Struct) and type(each) not in kind.builtin.values():
                    given[kind.name, name_of(each)] = type(each)
    return Plugins(given)


@functools.lru_cache(1000)
def _kinds_of_fields(record: type[Struct]) -> Mapping[str, Kind]:
    """Return the kind of each field that holds records of a kind, or a list of them."""
    found: dict[str, Kind] = {}
    for field in msgspec.structs.fields(record):
        pending: list[object] = [field.type]
        while pending:
            each = pending.pop()
            if (kind := find_kind(each)) is not None:
                found[field.name] = kind
            pending += get_args(each) if get_origin(each) is not Literal else ()
    return found


def _adopt_values(value: object, kind: Kind, key: str) -> object:
    if isinstance(value, tuple | list):
        items = cast(Sequence[object], value)
        adopted = [_adopt_values(each, kind, f"{key}[{number}]") for number, each in enumerate(items)]
        return value if all(map(operator.is_, adopted, items)) else type(value)(adopted)
    if value is None or isinstance(value, Mapping):  # `toml.read_record` checks those
        return value
    if kind.plain and isinstance(value, str) and value in kind.builtin:
        return kind.builtin[value]()
    if isinstance(value, type) and kind.adapt is not None:
        value = kind.check(value, value.__name__)()
    if isinstance(value, type):
        raise PluginError(f"{key} = {value.__name__}: expected an object, such as {value.__name__}(), not the class")
    if not isinstance(value, Struct):
        example = f", such as {next(iter(kind.builtin.values())).__name__}()" if kind.builtin else ""
        raise PluginError(f"{key} = {value!r:.60}: expected {kind.noun} as an object{example}")
    try:
        return adopt(value, kind.contract, _reference(type(value)))
    except PluginError as exc:
        raise PluginError(f"{key}: {exc}") from exc


def _reference(record: type) -> str:
    """Return the reference by which a file may name a class; its name if there is no other."""
    found: Any = sys.modules.get(record.__module__) if record.__module__ != "__main__" else None
    with contextlib.suppress(AttributeError):
        if found is not None and operator.attrgetter(record.__qualname__)(found) is record:
            return f"{record.__module__}:{record.__qualname__}"
    return record.__name__
