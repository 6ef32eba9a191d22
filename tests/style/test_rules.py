"""Each rule finds what it refuses, where it is, and nothing else. `make check` applies the rules to the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import table
from style import (
    check,
    fault_rows,
    foreign_code,
    imports_of_tests,
    names,
    parts,
    prose,
    records,
    secret_arguments,
    sizes,
)
from style.sources import Finding, Source, Sources

CORE, SERVER, CLIENT = "fedplat/a.py", "server/fedplat_server/b.py", "client/fedplat_client/c.py"
TEST, DOCS = "tests/core/test_a.py", "docs/a.md"


def test_every_rule_is_applied() -> None:
    others = {"__init__", "check", "sources"}
    modules = {path.stem for path in Path(check.__file__).parent.glob("*.py")}
    written = {name for name in modules - others if not name.startswith("test_")}
    assert {rule.__name__ for rule in check.RULES} == {f"style.{name}" for name in written}


def test_a_finding_shows_its_file_and_line() -> None:
    assert str(Finding("a.py", 3, "no")) == "a.py:3: no"


@pytest.mark.parametrize("path", [CORE, SERVER, CLIENT])
@pytest.mark.parametrize("text", ["def stored(): pass", "async def chosen(): pass", "crew = 1", "def f(aDoor): pass"])
def test_names_that_are_no_terms_are_found(path: str, text: str) -> None:
    (found,) = names.check(Sources({path: f"\n{text}\n"}))
    assert found[:2] == (path, 2)


@pytest.mark.parametrize("text", ["def seed(): pass", "@property\ndef stored(self): pass", "def is_stored(): pass"])
def test_terms_are_accepted(text: str) -> None:
    assert not [*names.check(Sources({CORE: text}))]


def test_a_public_class_of_two_modules_is_found() -> None:
    text = "class A: pass\nclass _B: pass\n"
    (found,) = names.check(Sources({CLIENT: text, SERVER: text}))
    assert (found.path, found.line) == (SERVER, 1)
    assert f"{CLIENT}:1" in found.message


@pytest.mark.parametrize(
    "phrase",
    [
        *("nobody", "Whoever", "somebody", "shall", "hears", "says what", "tells whether", "is none", "that is no key"),
        *("has not the", "of late", "by and by", "goes on", "for ever", "in vain", "would else"),
    ],
)
def test_phrases_that_are_not_plain_are_found(phrase: str) -> None:
    paths: tuple[str, ...] = (CORE, TEST, DOCS, "README.md", "Makefile", "proto/a.proto")
    found = [*prose.check(Sources(dict.fromkeys(paths, f"\n# It {phrase}\n")))]
    assert [(each.path, each.line) for each in found] == [(path, 2) for path in paths]


@pytest.mark.parametrize("text", ["goes on with it", "There Is None", "that is no longer so", "says it"])
def test_plain_phrases_are_accepted(text: str) -> None:
    assert not [*prose.check(Sources({DOCS: text, TEST: f"# {text}"}))]


def test_comments_and_docstrings_of_tests_are_read_and_data_is_not() -> None:
    text = '"""One."""\nA = "data"  # two\n"""Three,\nfour."""\ndef f() -> None:\n    """Five."""\n    g("data")\n'
    assert sorted(prose.comment_lines(Source(TEST, text))) == [
        (1, '"""One."""'),
        (2, "# two"),
        (3, '"""Three,'),
        (4, 'four."""'),
        (6, '    """Five."""'),
    ]


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ('def f():\n    """Return it."""', True),
        ('def f():\n    """The result."""', False),
        ('def f():\n    """Whether it is."""', False),
        ('class A:\n  async def f(self):\n    """What it is."""', False),
        ('class A:\n  @property\n  def f(self):\n    """The result."""', True),
        ('class A:\n  @property\n  def f(self):\n    """Whether it is."""', False),
    ],
)
def test_the_first_word_of_a_docstring(text: str, is_accepted: bool) -> None:
    assert ([*prose.check(Sources({SERVER: text}))] == []) == is_accepted


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("from support import daemons", True),
        ("from support.daemons import running", True),
        ("from fedplat_server.cli import main", True),
        ("from server.harness import running", False),
        ("import core.rounds.driver", False),
        ("from faults.test_network import silent", False),
        ("from faults import test_network", False),
        ("def f():\n    from . import test_network", False),
        ("from faults.conftest import folder", False),
    ],
)
def test_an_import_of_a_test(text: str, is_accepted: bool) -> None:
    found = [(each.path, each.line) for each in imports_of_tests.check(Sources({TEST: text, CORE: text}))]
    assert found == ([] if is_accepted else [(TEST, text.count("\n") + 1)])


@pytest.mark.parametrize(
    "path", [DOCS, CORE, "README.md", "Makefile", "docker/fedplat.service", "server/pyproject.toml"]
)
@pytest.mark.parametrize(
    "line",
    [
        "fedplat-server run --database postgresql://user:password@db/fedplat",
        "fedplat-server run \\\n  --database=postgresql://user:password@db/fedplat",
        "fedplat-client run --ticket fpt1.abc",
        'docker run -e FEDPLAT_TICKET="$TICKET" line-client:1',
        "docker run -e FEDPLAT_DATABASE=postgresql://user:password@host/name",
        "fedplat --token abc status",
        "echo fedplat_op_0123456789 > token",
    ],
)
def test_a_secret_argument_is_found(path: str, line: str) -> None:
    (found,) = secret_arguments.check(Sources({path: f"a \\\n  \\\n b\n\n{line}\n"}))
    assert (found.path, found.line) == (path, 6 if line.startswith("fedplat-server run \\") else 5)


@pytest.mark.parametrize(
    "line",
    [
        "fedplat-server run --database postgresql://user@db/fedplat",
        "fedplat-server run --database @/etc/fedplat/database",
        "fedplat-client run --ticket-file ticket",
        "docker run -e FEDPLAT_TICKET line-client:1",
        "docker run -e FEDPLAT_DATABASE=@/run/secrets/database",
    ],
)
def test_a_command_without_a_secret_is_accepted(line: str) -> None:
    assert not [*secret_arguments.check(Sources({DOCS: line}))]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "from joblib import load",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "np.load('x')",
        "reader(allow_pickle=True)",
        "reader(allow_pickle=flag)",
        "eval('1')",
        "exec(text)",
        "__import__('os')",
        "os.system('ls')",
        "from os import system",
        "subprocess.run('ls', shell=True)",
        "importlib.import_module(name)",
        "from importlib import import_module\nimport_module(name)",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_foreign_code_is_found(text: str) -> None:
    places = (CORE, SERVER, CLIENT, "examples/a.py", "benchmarks/a.py", "fedplat/wire/v1/a_pb2.py")
    found = {(each.path, each.line) for each in foreign_code.check(Sources(dict.fromkeys(places, text)), {})}
    assert found == {(place, text.count("\n") + 1) for place in places}


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "re.compile('x')",
        "subprocess.run(['ls'], shell=False)",
        "json.loads('1')",
        "ast.literal_eval(x)",
    ],
)
def test_harmless_code_is_accepted(text: str) -> None:
    assert not [*foreign_code.check(Sources({CORE: text}), {})]


@pytest.mark.parametrize(("text", "reason"), [("import json", "why"), ("import pickle", "")])
def test_an_exception_that_is_not_needed_or_has_no_reason_is_found(text: str, reason: str) -> None:
    assert [*foreign_code.check(Sources({CORE: text}), {"pickle": {CORE: reason}})]
    assert not [*foreign_code.check(Sources({CORE: "import pickle"}), {"pickle": {CORE: "why"}})]


@pytest.mark.parametrize(
    ("call", "is_accepted"),
    [
        ("msgspec.json.decode(text, type=Job)", False),
        ("msgspec.msgpack.Decoder(Job)", False),
        ("msgspec.json.Decoder(type=list[Job])", False),
        ("msgspec.convert(value, dict[str, Job])", False),
        ("msgspec.convert(value, prepare_type(Job))", True),
        ("msgspec.convert(value, decoding.prepare_type(Job))", True),
        ("msgspec.json.decode(text, type=dict[str, int])", True),
        ("msgspec.json.decode(text)", True),
        ("other.decode(text, type=Job)", True),
    ],
)
def test_a_record_whose_type_is_not_prepared(call: str, is_accepted: bool) -> None:
    text = f"class A:\n    def f(self):\n        {call}\n"
    found = [*records.check(Sources({SERVER: text, CLIENT: f"x = {call}\n", "fedplat/config/decoding.py": text}))]
    assert [(each.path, each.line) for each in found] == ([] if is_accepted else [(SERVER, 3)])


@pytest.mark.parametrize("path", [CORE, TEST, "examples/a.py"])
def test_a_long_file_is_found(path: str) -> None:
    text = "\n" * (sizes.MAX_LINES + 1)
    assert [each.path for each in sizes.check(Sources({path: text}))] == [path]
    assert not [*sizes.check(Sources({path: '"""Of 600 lines because ..."""' + text}))]
    assert not [*sizes.check(Sources({path: text[1:]}))]


@pytest.mark.parametrize(
    ("path", "num_fields", "is_accepted"),
    [
        (SERVER, 7, True),
        (SERVER, 8, False),
        (CLIENT, 8, True),
        ("server/fedplat_server/leader/parts.py", 8, True),
    ],
)
def test_a_class_with_many_parts_is_found(path: str, num_fields: int, is_accepted: bool) -> None:
    fields = "".join(f"    part_{number}: Part\n" for number in range(num_fields))
    text = f"class AParts:\n{fields}class A:\n    def __init__(self, parts: AParts, *, other: Part) -> None: ...\n"
    assert [each.line for each in parts.check(Sources({path: text}))] == ([] if is_accepted else [num_fields + 2])
    own = "    mine: Part = field(init=False)\n"
    text = f"@dataclass(eq=False)\nclass A:\n    other: Part\n{fields}{own}"
    assert [each.line for each in parts.check(Sources({path: text}))] == ([] if is_accepted else [2])


def test_a_mark_of_a_row_that_is_absent_excused_or_computed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ROWS", [table.Row("F1", "a", "b"), table.Row("F2", "c", "d", not_built="why")])
    monkeypatch.setattr(table, "NUMBERS", {"F1", "F2"})
    text = '@mark.fault("F1")\n@mark.fault("F1", "F2")\n@mark.fault("F3")\n@mark.fault(row)\ndef test_a(): pass\n'
    assert [each.line for each in fault_rows.check(Sources({TEST: text}))] == [2, 3, 4]
