"""The page docs/job-reference.md: every key of a job file, read from the records that validate it.

    python -m fedplat.job.reference > docs/job-reference.md

Types, bounds and defaults are those of the fields. The string below a field in the source is its meaning.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import NODEFAULT, Struct
from msgspec import inspect as types

from fedplat.config.plugins import find_kind
from fedplat.job.combinations import COMBINES, is_mode, may_combine
from fedplat.job.spec import JobSpec

_HEAD = """\
# Job file reference

This page is generated from the records that validate a job file (`make job-reference`). [jobs.md](jobs.md) explains
how the keys work together. Times are in seconds. Unknown keys are errors, and each mistake is reported with its key,
its value and the expected values. A table `[simulation]` beside these is for
[`fedplat simulate`](simulation.md#the-file).
"""


_COMBINATIONS = """
## Combinations

What is not listed may be combined, and a key that has its default with everything. `fedplat job check` has the reasons.
The values of two tables that may be combined must also fit together.

| | not together with |
|---|---|
"""


def render() -> str:
    """Return the page in Markdown."""
    job = types.type_info(JobSpec)
    assert isinstance(job, types.StructType)
    return _HEAD + "".join(f"\n{section}\n" for section in _sections(job)) + _COMBINATIONS + _list_contraries()


def _list_contraries() -> str:
    """Return a row for each part of a job, with those that must not be combined with it."""
    rows = list[str]()
    for part in COMBINES:
        contraries = [f"`{other}`" for other in COMBINES if other != part and not may_combine(part, other)]
        if is_mode(part):  # a job has one mode anyway
            contraries = [name for name in contraries if not is_mode(name.strip("`"))]
        rows.append(f"| `{part}` | {', '.join(contraries) or '-'} |\n")
    return "".join(rows)


def describe_fields(record: type[Struct]) -> dict[str, str]:
    """Return the string below each field of a record and of its base records, by the field's name."""
    found: dict[str, str] = {}
    for owner in reversed(record.__mro__):
        if issubclass(owner, Struct) and owner is not Struct:
            found |= _strings_below_fields(owner)
    return found


@functools.cache
def _strings_below_fields(record: type[Struct]) -> dict[str, str]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                found[name] = " ".join(sentence.split())
            case _:
                pass
    return found


def _sections(job: types.StructType) -> Iterator[str]:
    """Yield the section of the job, and one for each table in it, in the order of the keys."""
    waiting: list[tuple[str, Sequence[types.StructType]]] = [("", [job])]
    paths: dict[frozenset[type], str] = {}
    while waiting:
        path, records = waiting.pop(0)
        kinds = frozenset(record.cls for record in records)
        if kinds in paths:
            anchor = paths[kinds].replace(".", "").lower()  # as Markdown makes it of the heading
            yield f"## `[{path}]`\n\nThe keys are those of [`[{paths[kinds]}]`](#{anchor})."
            continue
        paths[kinds] = path
        yield _union(path, records) if records[0].tag_field else _record(path, records[0])
        below: dict[str, dict[type, types.StructType]] = {}  # records of a union may have tables of one name
        for field in (field for record in records for field in record.fields):
            found = below.setdefault(_join(path, _path_of(field)), {})
            found |= {table.cls: table for table in _tables(field.type)}
        waiting[:0] = [(key, [*tables.values()]) for key, tables in below.items() if tables]


def _path_of(field: types.Field) -> str:
    """Return the path of the tables in a field; those in a table of tables have names of their own."""
    return f"{field.encode_name}.NAME" if isinstance(field.type, types.DictType) else field.encode_name


def _record(path: str, record: types.StructType) -> str:
    """Return the section of a table that is always read as the same record."""
    head = f"## `[{path}]`" if path else "## Keys of the job"
    rows = [(f"`{_join(path, key)}`", *cells) for key, *cells in _rows(record)]
    return f"{head}\n\n{_summary(record)}\n\n{_table(('key', 'type', 'default', 'meaning'), rows)}"


def _union(path: str, records: Sequence[types.StructType]) -> str:
    """Return the section of a table in which a tag selects the record."""
    tag = str(records[0].tag_field)
    rows = [
        (f"`{_toml(record.tag)}`", *(f"`{key}`" if key else "", *cells))
        for record in records
        for key, *cells in (_rows(record) or [("", "", "", "no further keys")])
    ]
    names = ", ".join(f"`{_toml(record.tag)}`" for record in records)
    sentence = f"`{_join(path, tag)}` is one of {names}. It decides the other keys."
    return f"## `[{path}]`\n\n{sentence}\n\n{_table((f'`{tag}`', 'key', 'type', 'default', 'meaning'), rows)}"


def _rows(record: types.StructType) -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of each field. Raises `KeyError` for a field without a string below it."""
    meanings = describe_fields(record.cls)
    return [
        (field.encode_name, _type(field.type), _default(field), meanings[field.encode_name]) for field in record.fields
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _summary(record: types.StructType) -> str:
    return " ".join((inspect.getdoc(record.cls) or "").partition("\n\n")[0].split())


def _tables(info: types.Type) -> list[types.StructType]:
    """Return the records of a field that is a table, or a list of tables."""
    if isinstance(info, types.VarTupleType | types.DictType):
        return _tables(info.item_type if isinstance(info, types.VarTupleType) else info.value_type)
    options = info.types if isinstance(info, types.UnionType) else (info,)
    kinds = [find_kind(option.cls) for option in options if isinstance(option, types.CustomType)]
    records = [types.type_info(record) for kind in kinds if kind is not None for record in kind.builtin.values()]
    return [option for option in (*options, *records) if isinstance(option, types.StructType)]


def _type(info: types.Type) -> str:
    """Describe a type and its bounds in the terms of TOML."""
    match info:
        case types.VarTupleType():
            return f"list, {_length(info)} items, each: {_type(info.item_type)}"
        case types.DictType():
            return f"table, each value: {_type(info.value_type)}"
        case _ if _tables(info):
            kind = find_kind(info.cls) if isinstance(info, types.CustomType) else None
            return "name or table" if kind is not None and kind.plain else "table"
        case types.UnionType():
            return " or ".join(_type(option) for option in info.types if not isinstance(option, types.NoneType))
        case types.LiteralType():
            return " or ".join(f"`{_toml(value)}`" for value in info.values)
        case types.IntType() | types.FloatType():
            return " ".join(filter(None, ("integer" if isinstance(info, types.IntType) else "number", _range(info))))
        case types.StrType():
            return _text(info)
        case types.BoolType() | types.DateType():
            return "boolean" if isinstance(info, types.BoolType) else "date"
        case types.TupleType():
            return f"[{', '.join(_type(item) for item in info.item_types)}]"
        case _:
            raise TypeError(f"no words for {info}; add them to {__name__}")


def _text(info: types.StrType) -> str:
    if info.pattern:
        return "name"
    return f"text, {_length(info)} characters" if info.max_length else "text"


def _length(info: types.StrType | types.VarTupleType) -> str:
    return f"{info.min_length or 0} to {info.max_length:,}"


def _range(info: types.IntType | types.FloatType) -> str:
    if info.ge is not None and info.le is not None:
        return f"from {_number(info.ge)} to {_number(info.le)}"
    bounds = (("from", info.ge), ("above", info.gt), ("to", info.le), ("below", info.lt))
    return ", ".join(f"{word} {_number(bound)}" for word, bound in bounds if bound is not None)


def _default(field: types.Field) -> str:
    default: Any = field.default_factory() if field.default_factory is not NODEFAULT else field.default
    if field.required:
        return "required"
    if default is None or default == {}:
        return "none"
    if isinstance(default, Struct):
        tag = default.__struct_config__.tag
        return f"`{_toml(tag)}`" if tag is not None else "its defaults"
    return f"`{_toml(default)}`"


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return _number(value)
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return f'"{value}"'


def _number(value: float) -> str:
    is_whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e9)
    return f"{int(value):_}" if is_whole else f"{value:g}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


if __name__ == "__main__":
    print(render(), end="")
