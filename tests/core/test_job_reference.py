"""docs/job-reference.md is generated from the records of the job file, and names every key."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fedplat.config.plugins import find_kind
from fedplat.job import JobSpec, reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "job-reference.md"


def records_in(annotation: object) -> Iterator[type[msgspec.Struct]]:
    """All records that a type of a field mentions."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    if (kind := find_kind(annotation)) is not None:
        yield from kind.builtin.values()
    for part in typing.get_args(annotation):
        yield from records_in(part)


def every_record() -> set[type[msgspec.Struct]]:
    found: set[type[msgspec.Struct]] = set()
    waiting: list[type[msgspec.Struct]] = [JobSpec]
    while waiting:
        record = waiting.pop()
        if record not in found:
            found.add(record)
            waiting += [each for field in msgspec.structs.fields(record) for each in records_in(field.type)]
    return found


def test_the_page_is_what_the_records_say() -> None:
    assert PAGE.read_text("utf-8") == reference.render(), "run make job-reference"


def test_the_page_names_every_key_and_every_choice() -> None:
    text = PAGE.read_text("utf-8")
    records = every_record()
    assert len(records) > 40
    for record in records:
        for field in msgspec.structs.fields(record):
            assert f".{field.encode_name}` |" in text or f"| `{field.encode_name}` |" in text, field.encode_name
        if (tag := record.__struct_config__.tag) is not None:
            assert f'| `"{tag}"` |' in text


def test_every_key_has_one_or_more_sentences() -> None:
    for record in every_record():
        sentences = reference.describe_fields(record)
        for field in msgspec.structs.fields(record):
            assert sentences[field.name].endswith("."), f"{record.__name__}.{field.name}"
