"""Parsing of TOML, in bounded memory, into frozen records; all mistakes are reported at once in terms of the file.

Each mistake names its key, its value, what was expected, and similar valid names. Unknown keys are errors.

`tomllib` keeps every beginning of a dotted key, so a key of n parts costs n²/2 pointers (CPython issue 149231): one key
of 30 KB takes a gigabyte. So keys are counted before they are parsed.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo
from msgspec.structs import fields as struct_fields

from fedplat.config import decoding, plugin_objects
from fedplat.config.plugins import BUILTIN, AbsentPlugin, Kind, Plugins, find_kind
from fedplat.errors import JobFileError, PluginError, UserCodeError

MAX_MISTAKES = 20
"""Maximum number of mistakes in one error; about as many fit into a server's reply."""

Record = TypeVar("Record", bound=Struct)


def read_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text into its tables. Raises `JobFileError`."""
    try:
        return loads(text)
    except (ValueError, RecursionError) as exc:  # ValueError: invalid TOML, or a number with thousands of digits
        raise JobFileError(f"the job file is not valid TOML: {exc}") from exc


def read_record(raw: Mapping[str, Any], record: type[Record], prefix: str = "", plugins: Plugins = BUILTIN) -> Record:
    """Convert a table to a record. Raises `JobFileError` with one line for each mistake.

    `prefix` precedes the keys in the message, for a table within a file. `plugins` are the names that tables may use
    besides the built-in ones.
    """
    mistakes = list(itertools.islice(_Checker(plugins).of_record(raw, record, prefix), MAX_MISTAKES))
    if mistakes:
        raise JobFileError("\n".join(mistakes))
    return plugins.convert(raw, record)


def readable_part(raw: Mapping[str, Any], record: type[Struct]) -> dict[str, Any]:
    """Return the entries of a table that a record could have: those with known keys and without any mistake."""
    types, checker = {field.encode_name: field.type for field in struct_fields(record)}, _Checker(BUILTIN)
    return {key: value for key, value in raw.items() if key in types and checker.is_valid(value, types[key])}


def read_name(name: object, kind: Kind, path: str, plugins: Plugins = BUILTIN) -> type[Struct]:
    """Return the options record that a key names; `path` is the key, for the message. Raises `JobFileError`."""
    record = None
    if isinstance(name, str):
        try:
            record = plugins.find(kind, name)
        except (PluginError, UserCodeError) as exc:
            raise JobFileError(f"{path} = {format_value(name)}: {exc}") from exc
    if record is None:
        hint = ""
        if isinstance(name, str) and ":" in name:
            hint = f"; a job cannot name code of a server or client, to which --plugin {kind.name}.NAME adds it"
        elif isinstance(name, str) and name.endswith(".py") and plugins.folder is not None:
            hint = f"; a file needs the name of its class as well: {name}:NAME"
        raise JobFileError(f"{path} = {format_value(name)}: {_one_of(plugins.names(kind), name)}{hint}")
    return record


def make_record(record: type[Record], values: Mapping[str, object], prefix: str = "") -> Record:
    """Return a record with these fields, which may hold plugins and tables, after the same checks as for a file.

    Fields with None have their default. Raises `JobFileError` with one line for each mistake.
    """
    known = {field.name: field.type for field in struct_fields(record)}
    given = {key: value for key, value in values.items() if value is not None}
    holder = msgspec.defstruct("Fields", [(key, known.get(key, Any)) for key in given], frozen=True)(**given)
    plugin_objects.adopt_fields(holder, prefix)
    return read_record(to_table(holder), record, prefix, plugin_objects.plugins_in(holder))


def normalize(record: Record, prefix: str = "") -> Record:
    """Return a record that was made from objects as if it had been read from a file, with the same checks.

    `prefix` precedes the keys in the message. Raises `JobFileError` with one line for each mistake.
    """
    return read_record(to_table(record), type(record), prefix, plugin_objects.plugins_in(record))


def to_table(record: Struct) -> dict[str, Any]:
    """Return the table from which a record can be read: its tag, and the fields that differ from their defaults."""
    tag, config = {}, record.__struct_config__
    if config.tag_field is not None:
        tag = {config.tag_field: config.tag}
    values = {field.encode_name: (field, getattr(record, field.name)) for field in struct_fields(type(record))}
    return tag | {key: _to_value(value) for key, (field, value) in values.items() if not _is_default(value, field)}


def _is_default(value: object, field: FieldInfo) -> bool:
    if field.required:
        return False
    default: object = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    try:
        return value is default or bool(value == default)
    except ValueError:  # arrays
        return False


def _to_value(value: Any) -> Any:
    match value:
        case Struct():
            return to_table(value)
        case Mapping():
            return {str(key): _to_value(item) for key, item in cast(Mapping[Any, Any], value).items()}
        case list() | tuple():
            return [_to_value(item) for item in cast(Sequence[Any], value)]
        case PurePath():
            return str(value)
        case _:
            # A NumPy scalar becomes a number of Python.
            return value.item() if getattr(value, "shape", None) == () else value


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Finds the mistakes of tables."""

    plugins: Plugins

    def of_record(self, raw: Mapping[str, Any], record: type[Struct], prefix: str) -> Iterator[str]:
        """Yield a line for each unknown, missing or invalid key; if all are valid, the error of the record's check."""
        is_valid = True
        for mistake in itertools.chain(_mistakes_of_keys(raw, record, prefix), self._of_values(raw, record, prefix)):
            is_valid = False
            yield mistake
        if is_valid:
            try:
                self.plugins.convert(raw, record)
            except msgspec.ValidationError as exc:
                # Each line of a record's own check begins with the key concerned.
                yield from (f"{prefix}{line}" for line in str(exc).splitlines())

    def is_valid(self, value: Any, annotation: Any) -> bool:
        """Return whether a value has no mistake."""
        return next(self._of_value(value, annotation, ""), None) is None

    def _of_values(self, raw: Mapping[str, Any], record: type[Struct], prefix: str) -> Iterator[str]:
        for field in struct_fields(record):
            key = field.encode_name
            if key in raw:
                yield from self._of_value(raw[key], field.type, f"{prefix}{key}")
            elif field.required:
                yield f"{prefix}{key}: this key is required and missing"

    def _of_value(self, value: Any, annotation: Any, path: str) -> Iterator[str]:
        plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        is_mapping, items = get_origin(plain) is dict, _tables_in(annotation)
        options = () if is_mapping else get_args(annotation) or (annotation,)  # the members of a union
        tables = _tables_of(options)
        if isinstance(tables, Kind) and tables.plain and isinstance(value, str):
            yield from self._of_table({tables.key: value}, tables, path, path)
        elif (tables is not None or is_mapping) and not isinstance(value, dict):
            is_plain = isinstance(tables, Kind) and tables.plain
            yield f"{path} = {format_value(value)}: expected " + (
                "a name or a table" if is_plain else f"a table, [{path}]"
            )
        elif tables is not None:
            yield from self._of_table(cast(dict[str, Any], value), tables, path)
        elif is_mapping:
            for key, item in cast(dict[str, Any], value).items():
                yield from self._of_value(item, get_args(plain)[1], f"{path}.{shown_key(key)}")
        elif items is not None and isinstance(value, list):
            for number, item in enumerate(cast(list[Any], value)):
                yield from self._of_value(item, items, f"{path}[{number}]")
        else:
            try:
                msgspec.convert(value, decoding.prepare_type(annotation), dec_hook=self.plugins.decode)
            except msgspec.ValidationError as exc:
                yield f"{path} = {format_value(value)}: {_expectation(str(exc), value, annotation)}"

    def _of_table(
        self, table: Mapping[str, Any], records: Kind | list[type[Struct]], path: str, named_at: str = ""
    ) -> Iterator[str]:
        """Yield the mistakes of a table as a record; with a tag, as the record that it names.

        `named_at` is the key of the name if that is not in the table.
        """
        prefix = f"{path}."
        if isinstance(records, Kind):
            tag, names = records.key, self.plugins.names(records)
        else:
            tag, names = records[0].__struct_config__.tag_field, [str(each.__struct_config__.tag) for each in records]
        if tag is None or (len(names) == 1 and tag not in table and not isinstance(records, Kind)):
            # The record of a table that can be no other one need not be named.
            yield from self.of_record(table, cast(list[type[Struct]], records)[0], prefix)
            return
        name = table.get(tag, records.default if isinstance(records, Kind) else "")
        if not name and tag not in table:
            yield f"{prefix}{tag}: this key is required and missing; {_one_of(names, None)}"
            return
        if isinstance(records, Kind):
            try:
                record = read_name(name, records, named_at or prefix + tag, self.plugins)
            except JobFileError as exc:
                yield str(exc)
                return
        elif isinstance(name, str) and name in names:
            record = records[names.index(name)]
        else:
            yield f"{prefix}{tag} = {format_value(name)}: {_one_of(names, name)}"
            return
        if not issubclass(record, AbsentPlugin):
            yield from self.of_record(table, record, prefix)


def _tables_of(options: Sequence[Any]) -> Kind | list[type[Struct]] | None:
    """Return the kind or the records that are among the members of a union; None if none of them is a table."""
    for option in options:
        if (kind := find_kind(option)) is not None:
            return kind
    return [option for option in options if isinstance(option, type) and issubclass(option, Struct)] or None


def _mistakes_of_keys(raw: Mapping[str, Any], record: type[Struct], prefix: str) -> Iterator[str]:
    known = {field.encode_name for field in struct_fields(record)}
    tag = record.__struct_config__.tag_field
    all_keys = f"; known keys: {', '.join(sorted(known)) or 'none'}"
    for key, value in raw.items():
        if key not in known and key != tag:
            text = f"{prefix}{shown_key(key)} = {format_value(value)}: there is no such key"
            if hint := suggest(key, known):
                yield text + hint
            else:
                yield text + all_keys
                all_keys = ""  # once in a table


def _tables_in(annotation: Any) -> Any:
    """Return the type of the items of a list of tables; None for any other type."""
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(plain) not in (list, tuple):
        return None
    items = get_args(plain)[0]
    options = get_args(items) or (items,)
    is_table = [
        find_kind(each) is not None or (isinstance(each, type) and issubclass(each, Struct)) for each in options
    ]
    return items if all(is_table) else None


_WORDS: Mapping[str, str] = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def _expectation(sentence: str, value: Any, annotation: Any) -> str:
    """Return what was expected of a value, in the terms of a job file rather than of Python."""
    if get_origin(annotation) is Literal:
        return _one_of([str(choice) for choice in get_args(annotation)], value)
    if "matching regex" in sentence:
        return "expected a name: at most 63 letters, digits, '_', '.' and '-', and a letter or a digit first"
    if "out of range" in sentence:
        return "expected a number of at most 64 bits"

    def words(match: re.Match[str]) -> str:
        names = match[1].split(" | ")
        return " or ".join(
            _WORDS.get(name, name) for name in names if name != "null" and not (name == "int" and "float" in names)
        )

    # The line already shows the actual value.
    expected = re.sub(r"`([\w| ]+)`", words, sentence.partition(", got ")[0])
    return expected[:1].lower() + expected[1:]


def _one_of(choices: Collection[str], value: Any) -> str:
    return f"expected one of {', '.join(choices)}" + (suggest(value, choices) if isinstance(value, str) else "")


def suggest(name: str, known: Collection[str]) -> str:
    """Return the end of an error message that names similar words, such as `; did you mean epochs?`, or nothing."""
    close = difflib.get_close_matches(name[:100], known, n=2, cutoff=0.6)
    return "; did you mean " + " or ".join(close) + "?" if close else ""


def shown_key(key: str) -> str:
    """Return a key in TOML notation."""
    return key if re.fullmatch(r"[\w-]{1,60}", key, re.ASCII) else format_value(key)


def format_value(value: Any) -> str:
    """Return a value in TOML notation, shortened."""
    match value:
        case dict() | list():
            return "{…}" if isinstance(value, dict) else "[…]"
        case bool():
            return str(value).lower()
        case int() if value.bit_length() > 128:
            return f"(a number of {value.bit_length()} bits)"
        case date() | time():  # a datetime is a date
            return value.isoformat()
        case _:
            text = repr(value)
            return text if len(text) <= 60 else text[:57] + "..."


MAX_PARTS = 32
"""Parts of a dotted key, such as 2 in `rounds.goal`."""
MAX_COST = 4_000_000
"""Pointers that the beginnings of all dotted keys may take, in a table with a header of `MAX_PARTS`."""
_TOKEN = re.compile(
    r"""
    (?P<text> \"{3}(?:\\.|[^\\])*?\"{3,5} | '{3}.*?'{3,5} | \"(?:\\.|[^\"\\\n])*\" | '[^'\n]*' | [A-Za-z0-9_-]+ )
    | (?P<dot> \. ) | (?P<space> [ \t]+ ) | \#[^\n]* | [^"'#.A-Za-z0-9_\ \t-]+ | .
    """,
    re.VERBOSE | re.DOTALL,
)


def loads(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises `tomllib.TOMLDecodeError` also for dotted keys that would take too much memory.

    >>> loads("a.b = 1")
    {'a': {'b': 1}}
    >>> loads("a" + 40 * ".a" + " = 1")
    Traceback (most recent call last):
      ...
    tomllib.TOMLDecodeError: a key has more than 32 parts (at line 1)
    """
    _check_keys(text)
    return tomllib.loads(text)


def _check_keys(text: str) -> None:
    """Raise `tomllib.TOMLDecodeError` for a dotted key with too many parts, or too many of them.

    Whatever has the form of a dotted key counts, also where TOML has a number.
    """
    num_parts, is_after_dot, cost = 0, False, 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "space":
            continue
        if kind == "dot":
            is_after_dot = True
        elif kind == "text" and is_after_dot and num_parts:
            num_parts, is_after_dot = num_parts + 1, False
            cost += num_parts + MAX_PARTS if num_parts > 2 else 0  # a number has two parts
            if num_parts > MAX_PARTS or cost > MAX_COST:
                line = text.count("\n", 0, token.start()) + 1
                reason = f"a key has more than {MAX_PARTS} parts" if num_parts > MAX_PARTS else "too many dotted keys"
                raise tomllib.TOMLDecodeError(f"{reason} (at line {line})")
        else:
            num_parts, is_after_dot = int(kind == "text"), False
