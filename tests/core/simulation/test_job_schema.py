"""The JSON Schema of job files: it is complete, takes all examples, and finds mistakes where they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedplat.cli.app import app
from fedplat.cli.new import TEMPLATES, create
from fedplat.job import reference
from fedplat.simulation.scenario import schema
from support.cli.runner import CliRunner
from support.processes import BIN, ROOT

FILE = ROOT / "docs" / "schema" / schema.FILE_NAME
SCHEMA: dict[str, Any] = schema.make_schema()
EXAMPLES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("examples", "docker")
    for path in (ROOT / folder).rglob("*.toml")
    if path.name != "pyproject.toml" and not path.name.endswith("-sweep.toml")
)
JOB = """\
#:schema ./job.schema.json
name = "digits"
population = "demo"
trainer = "digits"
rounds = 20
model.initial = "model:initial"
selection = { goal = 8, over_selection = 1 }
"""


def lint(path: Path) -> list[tuple[int, str]]:
    """The line and the message of each mistake that Tombi, which editors use, finds without a network."""
    command = [str(BIN / "tombi"), "lint", "--offline", "--no-cache", "--error-on-warnings"]
    command += ["--diagnostics-format", "github", path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    found = re.findall(r"^::\w+ file=.*?,line=(\d+),.*?::.*?: (.*)$", done.stderr, flags=re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return [(int(line), message) for line, message in found]


def lint_text(text: str, folder: Path) -> list[tuple[int, str]]:
    (folder / schema.FILE_NAME).write_text(FILE.read_text())
    (folder / "job.toml").write_text(text)
    return lint(folder / "job.toml")


def test_the_committed_schema_is_that_of_the_records() -> None:
    done = CliRunner().invoke(app, ["job", "schema"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["$id"] == "urn:fedplat:schema:job"
    assert FILE.read_text("utf-8") == done.stdout, "run make job-schema"


def test_it_does_not_depend_on_what_was_imported_before() -> None:
    """Kinds of plugins are defined by the modules that are imported."""
    code = "from fedplat.simulation.scenario import schema; print(schema.format_schema(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == FILE.read_text("utf-8")


def test_every_reference_has_a_definition() -> None:
    names = set(re.findall(r'"#/\$defs/(\w+)"', FILE.read_text()))
    assert names == set(SCHEMA["$defs"])
    assert "x-kind" not in FILE.read_text()


def test_every_key_of_every_record_is_in_it_with_its_meaning() -> None:
    records = {record.__name__: record for record in schema.find_records()}
    tables = {record.__name__: SCHEMA["$defs"].get(record.__name__, SCHEMA) for record in records.values()}
    assert len(records) > 60
    for name, record in records.items():
        keys: dict[str, Any] = tables[name]["properties"]
        sentences = reference.describe_fields(record)
        for field in msgspec.structs.fields(record):
            assert keys[field.encode_name].get("description") == sentences.get(field.name), f"{name}.{field.name}"
    assert SCHEMA["properties"]["rounds"]["description"].startswith("Number of committed rounds")


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_takes_the_examples(name: str) -> None:
    first = (ROOT / name).read_text().splitlines()[0]
    assert (ROOT / name).parent.joinpath(first.removeprefix("#:schema ")).resolve() == FILE
    assert lint(ROOT / name) == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_it_takes_the_job_of_a_new_project(template: str, tmp_path: Path) -> None:
    create(tmp_path / "tumors", "tumors", template)
    assert (tmp_path / "tumors" / "job.toml").read_text().startswith(f"#:schema ./{schema.FILE_NAME}\n")
    assert lint(tmp_path / "tumors" / "job.toml") == []


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("20", '"twenty"', 5, "expected a value of type Integer"),
        ("20", "0", 5, "must be ≥ 1"),
        ('"demo"', '"two words"', 3, "does not match the pattern"),
        ("goal = 8", "goals = 8", 7, '"goals" is not allowed'),
        ('trainer = "digits"\n', "", 1, '"trainer" is required'),
        ("$", "rouns = 3", 8, '"rouns" is not allowed'),
        ("$", 'durability = "disk"', 8, 'one of ["memory", "spool"]'),
        ("$", 'aggregation = { rule = "fedadam", lerning_rate = 1 }', 8, '"lerning_rate" is not allowed'),
        ("$", 'compression.uplink = { codec = "eden", bits = "one" }', 8, "expected a value of type Integer"),
        ("$", 'mode = { kind = "bufered" }', 8, "must be one of"),
        ("$", '[simulation]\nengine = "loop"\nsedd = 1', 10, '"sedd" is not allowed'),
        ("$", '[simulation]\ndata = { source = "mnist", folder = 1 }', 9, '"folder" is not allowed'),
    ],
)
def test_mistakes_are_found_where_they_are(old: str, new: str, line: int, words: str, tmp_path: Path) -> None:
    text = JOB + new if old == "$" else JOB.replace(old, new, 1)
    found = lint_text(text, tmp_path)
    assert any(at == line and words in message for at, message in found), found


@pytest.mark.parametrize(
    "lines",
    [
        'aggregation = { rule = "my_rule.py:MyRule", strength = 2 }',
        'selection = { goal = 8, sampling = { policy = "own", share = 0.5 } }',
        '[simulation]\nengine = "my_engine.py:Engine"\ndata = { source = "own", path = "x" }',
        "[simulation.model]\nmodule = 'model:build'",
        "[simulation.fleet]\nnum_clients = 5",
        "[config]\nanything = true\nrate = 1e-3",
    ],
)
def test_what_a_schema_cannot_know_is_accepted(lines: str, tmp_path: Path) -> None:
    start = JOB.replace("selection = { goal = 8, over_selection = 1 }\n", "") if "selection" in lines else JOB
    assert lint_text(start + lines, tmp_path) == []
