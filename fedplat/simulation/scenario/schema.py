"""The JSON Schema of job files with `[simulation]`, for editors: `fedplat job schema`.

It is made from the records that validate a file, and from the sentences below their fields. It accepts every valid
file. It cannot know the names and options of plugins, so it accepts any table with a name that is not built in; and it
does not check the rules between keys. `fedplat job check` and `fedplat simulate` check everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from fedplat.config.plugins import Kind, find_kind, kinds
from fedplat.job import JobSpec, reference
from fedplat.simulation.scenario import file, options

ID = "urn:fedplat:schema:job"
"""The identifier of the schema, in all versions of fedplat."""
FILE_NAME = "job.schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = "#/$defs/"
_KIND = "x-kind"

Schema = dict[str, Any]


def make_schema() -> Schema:
    """Return the schema of a job file."""
    records = list(find_records())
    schemas, definitions = msgspec.json.schema_components(
        records, schema_hook=_mark, ref_template=f"{_REFERENCE}{{name}}"
    )
    references = dict(zip(records, cast(tuple[dict[str, str], ...], schemas), strict=True))
    for record, target in references.items():
        _describe(definitions[_name(target)], record)
    for kind in kinds().values():
        target = references.get(cast(type[Struct], kind.builtin.get(kind.default)))
        if target is not None:  # a table without the key is the default's
            definitions[_name(target)]["required"].remove(kind.key)
    resolved = cast(dict[str, Schema], _resolve(definitions, references))
    job = resolved.pop(_name(references[JobSpec]))
    job["properties"][file.TABLE] = references[options.SimulationOptions]
    return {"$schema": _DIALECT, "$id": ID, **job, "title": "fedplat job file", "$defs": dict(sorted(resolved.items()))}


def format_schema() -> str:
    """Return the text of the schema, with a line end."""
    return msgspec.json.format(msgspec.json.encode(make_schema()), indent=2).decode() + "\n"


def find_records() -> Iterator[type[Struct]]:
    """Yield each record that a file may contain once, beginning with the whole file's."""
    waiting: list[object] = [JobSpec, options.SimulationOptions]
    found: set[object] = set()
    while waiting:
        each = waiting.pop(0)
        if each in found:
            continue
        found.add(each)
        if (kind := find_kind(each)) is not None:
            waiting += kind.builtin.values()
        elif isinstance(each, type) and issubclass(each, Struct):
            yield each
            waiting += (part for field in msgspec.structs.fields(each) for part in _parts(field.type))


def _parts(annotation: Any) -> Iterator[object]:
    """Yield a type, and those that it is composed of."""
    if annotation.__hash__ is not None:
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _parts(part)


def _mark(annotation: type) -> Schema:
    """Return a mark in place of the schema of a kind: the definitions that it refers to are not yet known."""
    kind = find_kind(annotation)
    if kind is None:
        raise NotImplementedError(f"no schema for {annotation}")
    return {_KIND: kind.name}


def _describe(definition: Schema, record: type[Struct]) -> None:
    """Add the sentences of the job-file reference; the keys of a plugin's records may have none."""
    definition["description"] = " ".join((inspect.getdoc(record) or "").partition("\n\n")[0].split())
    sentences = reference.describe_fields(record)
    for field in msgspec.structs.fields(record):
        if sentence := sentences.get(field.name):
            definition["properties"][field.encode_name]["description"] = sentence


def _resolve(value: Any, references: Mapping[type[Struct], Mapping[str, str]]) -> Any:
    """Return a schema with its marks replaced, and without null, which TOML does not have."""
    if isinstance(value, list):
        return [_resolve(item, references) for item in cast(list[Any], value) if item != {"type": "null"}]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # `Meta(ge=0)` and `Meta(ge=0.0)` are equal, so which of them a field has depends on imports
    if not isinstance(value, dict):
        return value
    schema = cast(Schema, value)
    found = {
        key: _resolve(item, references)
        for key, item in schema.items()
        if key != "discriminator" and not (key == "default" and (item is None or isinstance(item, dict)))
    }
    if found.get("type") == "object":
        found.setdefault(
            "additionalProperties", True
        )  # said in full, because editors with a strict mode warn otherwise
    if _KIND in found:
        kind = kinds()[found.pop(_KIND)]
        found |= {"anyOf": [references[cast(type[Struct], each)] for each in kind.builtin.values()] + _plugins(kind)}
    match found.get("anyOf"):
        case [{**single}]:  # what remains of a union with null
            return {key: item for key, item in found.items() if key != "anyOf"} | cast(Schema, single)
        case _:
            return found


def _plugins(kind: Kind) -> list[Schema]:
    """Return the schemas of a table that names a plugin, and of the names alone if a name may stand for a table."""
    name = {"type": "string", "minLength": 1, "not": {"enum": list(kind.builtin)}}
    plugin = {
        "description": f"A plugin: {kind.noun} of your own.",
        "type": "object",
        "properties": {kind.key: name},
        "required": [kind.key],
        "additionalProperties": True,
    }
    return [plugin, {"type": "string", "minLength": 1}] if kind.plain else [plugin]


def _name(target: Mapping[str, str]) -> str:
    return target["$ref"].removeprefix(_REFERENCE)
