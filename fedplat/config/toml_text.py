"""Writing of TOML: values, and changes of a file's text that keep its comments."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any, cast

from fedplat.config import toml
from fedplat.config.toml import format_value
from fedplat.errors import JobFileError

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"(\s*([^=#\[\]]+?)\s*=\s*)(.*)$")


def format_toml(value: Any, key: str = "") -> str:
    """Return a value in TOML, on one line. Raises `JobFileError`, which names the key, if TOML has no such value.

    >>> format_toml({"kind": "lognormal", "median": 1e-05, "tags": [1, True]})
    '{ kind = "lognormal", median = 1e-05, tags = [1, true] }'
    """
    match value:
        case bool():
            return str(value).lower()
        case int():
            return int.__repr__(value)  # also of subclasses, such as an enumeration
        case float():
            return float.__repr__(value)  # NumPy's float64 is one
        case str():
            # JSON's escapes are those of TOML, which also requires one for the control character DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case list() | tuple():
            return f"[{', '.join(format_toml(item, key) for item in cast(Sequence[Any], value))}]"
        case Mapping():
            pairs = [f"{format_key(str(name))} = {format_toml(item, key)}" for name, item in value.items()]
            return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
        case date() | time():
            return value.isoformat()
        case _:
            raise JobFileError(f"{key}: a file cannot have a value of type {type(value).__name__}".removeprefix(": "))


def format_key(key: str) -> str:
    """Return one part of a key in TOML, in quotation marks if necessary."""
    return key if _BARE.fullmatch(key) else format_toml(key)


def write_toml(tables: Mapping[str, Any]) -> str:
    """Return a TOML file with these contents. Raises `JobFileError` for a value that TOML does not have."""
    return "".join(_write_table(tables, ())).lstrip("\n")


def change_text(text: str, changes: Mapping[str, Any]) -> str:
    """Return the text of a TOML file with other values of dotted keys.

    Comments and order are kept where every changed value is on one line of a table with a header; otherwise the whole
    file is rendered anew.
    """
    expected = toml.loads(text)
    for key, value in changes.items():
        set_key(expected, split_key(key), value)
    changed = text
    for key, value in changes.items():
        changed = _change_line(changed, split_key(key), format_toml(value))
    try:
        if toml.loads(changed) == expected:
            return changed
    except tomllib.TOMLDecodeError:
        pass
    return write_toml(expected)


def split_key(key: str) -> list[str]:
    """Return the parts of a dotted key. Raises `tomllib.TOMLDecodeError`."""
    parts: list[str] = []
    inner: Any = toml.loads(f"{key} = 0")
    while isinstance(inner, dict):
        ((name, inner),) = cast(dict[str, Any], inner).items()
        parts.append(name)
    return parts


def set_key(tables: dict[str, Any], parts: list[str], value: Any) -> None:
    """Set the value of a key in nested tables, in place; missing tables are created.

    Raises `JobFileError` if a part of the key is not a table.
    """
    for part in parts[:-1]:
        inner = tables.setdefault(part, {})
        if not isinstance(inner, dict):
            raise JobFileError(f"{part} is {format_value(inner)} in the file, not a table")
        tables = cast(dict[str, Any], inner)
    tables[parts[-1]] = value


def _change_line(text: str, parts: list[str], value: str) -> str:
    """Replace the value of a key on its line, or add a line to its table, or a table to the end."""
    lines = text.splitlines()
    table: list[str] = []
    last: int | None = -1 if len(parts) == 1 else None  # the last line of the key's table
    for number, line in enumerate(lines):
        if header := _HEADER.match(line):
            table = _split(header[1])
        elif (found := _ASSIGNMENT.match(line)) and table + _split(found[2]) == parts:
            lines[number] = found[1] + value + _comment(found[3])
            return "\n".join(lines) + "\n"
        if table == parts[:-1] and line.strip():
            last = number
    added = f"{format_key(parts[-1])} = {value}"
    if last is not None:
        lines.insert(last + 1, added)
    else:
        lines += ["", f"[{'.'.join(map(format_key, parts[:-1]))}]", added]
    return "\n".join(lines) + "\n"


def _split(key: str) -> list[str]:
    try:
        return split_key(key)
    except tomllib.TOMLDecodeError:
        return []


def _comment(rest: str) -> str:
    """Return the comment after a value, with the space before it; empty if the line has none."""
    for at, character in enumerate(rest):
        if character != "#":
            continue
        try:
            toml.loads(f"value = {rest[:at]}")
        except tomllib.TOMLDecodeError:  # within a text
            continue
        return rest[len(rest[:at].rstrip()) :]
    return ""


def _write_table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (len(inner) < len(table) or not table):
        yield f"\n[{'.'.join(map(format_key, path))}]\n"
    for key, value in table.items():
        if key not in inner:
            yield f"{format_key(key)} = {format_toml(value, '.'.join((*path, key)))}\n"
    for key, value in inner.items():
        yield from _write_table(value, (*path, key))
