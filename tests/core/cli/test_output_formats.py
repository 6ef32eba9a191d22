"""The formats of results: the same for every list, and stable for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from fedplat.cli import output
from fedplat.cli.output import TextTable
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run, environment, parsed
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.cli.terminal import Terminal, screen_lines

PYTHON = [sys.executable, "-W", "error"]
HOSTILE = "x\x1b[2J\x1b]0;title\x07y\nz"
LISTS: dict[tuple[str, ...], str] = {
    ("job", "list"): "job_id",
    ("job", "rounds", "digits"): "round",
    ("job", "assignments", "digits"): "client_id",
    ("client", "assignments", "c-1"): "job_id",
    ("client", "list"): "client_id",
    ("model", "list", "digits"): "model",
    ("enrollment", "list"): "enrollment_id",
    ("operator", "list"): "name",
    ("audit",): "sequence",
}
QUICK = (("job", "list"), ("audit",))
EACH = [pytest.param(words, id=" ".join(words), marks=() if words in QUICK else pytest.mark.slow) for words in LISTS]
EMPTY = [words for words in LISTS if "digits" not in words]


@pytest.fixture
def full(state: State) -> State:
    """A server with three rows of everything, and text that would change a terminal."""
    job = state.add_job()
    for number in (1, 2, 3):
        state.add_job(f"job-{number}").reason = HOSTILE
        state.add_version(b"x", number).metrics[HOSTILE] = 1.0
        state.rounds.append(
            admin_pb2.Round(round=number, attempt=1, phase=admin_pb2.ATTEMPT_PHASE_COMMITTED, reason=HOSTILE)
        )
        state.assignments.append(
            admin_pb2.AssignmentDetails(
                job_id=job.job_id, job_name="digits", round=1, client_id="c-1", state="FAILED", text=HOSTILE
            )
        )
        state.clients.append(admin_pb2.Client(client_id=f"c-{number}", labels={"a": HOSTILE}))
        state.enrollments.append(admin_pb2.Enrollment(enrollment_id=f"e-{number}", population=HOSTILE))
        state.operators.append(admin_pb2.Operator(name=f"o-{number}", role=HOSTILE))
        state.audit.append(admin_pb2.AuditEvent(sequence=number, unix_s=1e9, subject=HOSTILE))
    return state


@pytest.mark.parametrize("words", EACH)
def test_every_list_has_every_format_and_none_has_control_characters(words: tuple[str, ...], run: Run, full: State):
    count = 4 if words == ("job", "list") else 3
    found = {form: run(*words, "-o", form) for form in ("json", "jsonl", "name", "table", "wide")}
    rows = parsed(found["json"])
    assert [json.loads(line) for line in found["jsonl"].stdout.splitlines()] == rows
    assert len(rows) == count
    names = [str(row[LISTS[words]]["version"] if LISTS[words] == "model" else row[LISTS[words]]) for row in rows]
    assert found["name"].stdout.splitlines() == names
    short, wide = (found[form].stdout.splitlines() for form in ("table", "wide"))
    assert len(short) == len(wide) == count + 1
    assert set(short[0].split()) <= set(wide[0].split())
    for result in found.values():
        assert not {"\x1b", "\x07"} & set(result.output)


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=() if words in QUICK else pytest.mark.slow) for words in EMPTY]
)
def test_an_empty_list_is_a_success(words: tuple[str, ...], run: Run):
    assert parsed(run(*words, "-o", "json")) == []
    for form in ("jsonl", "name"):
        result = run(*words, "-o", form)
        assert (result.exit_code, result.output) == (0, "")
    table = run(*words)
    assert (table.exit_code, table.stdout, table.stderr.count("\n")) == (0, "", 1)


def test_json_is_short_for_a_format(run: Run, full: State):
    expected = run("client", "list", "-o", "json").stdout
    assert run("client", "list", "--json").stdout == expected
    assert run("--json", "client", "list", "-o", "json").stdout == expected
    assert len(run("audit", "--json").stdout.splitlines()) == 3
    for words in (("client", "list", "--json", "-o", "name"), ("--json", "audit", "-o", "json")):
        both = run(*words)
        assert both.exit_code == 2
        assert "--json is short for --output" in both.stderr
    wrong = run("client", "list", "-o", "yaml")
    assert wrong.exit_code == 2
    assert "'yaml' is not one of 'table', 'wide', 'json', 'jsonl', 'name'" in wrong.stderr


@pytest.mark.slow
def test_what_is_shown_has_every_format(run: Run, full: State, server: FakeServer):
    job = next(iter(full.jobs.values()))
    shown = {("job", "show", "digits"): job.job_id, ("client", "show", "c-1"): "c-1", ("status",): server.address}
    for words, name in shown.items():
        assert run(*words, "-o", "name").stdout == f"{name}\n"
        assert run(*words, "-o", "json").stdout == run(*words, "-o", "jsonl").stdout == run(*words, "--json").stdout
        assert run(*words, "-o", "wide").stdout == run(*words).stdout


ROWS = [("j-0123456789abcdef", "digits", "17", "three of eleven clients wait"), ("j-1", "ä", "4", "")]
NAMES = ("JOB", "NAME", "#ROUND", "REASON")


@pytest.mark.parametrize(
    ("width", "cuts", "expected"),
    [
        (
            200,
            True,
            """
JOB                 NAME    ROUND  REASON
j-0123456789abcdef  digits     17  three of eleven clients wait
j-1                 ä           4""",
        ),
        (
            51,
            True,
            """
JOB                 NAME    ROUND  REASON
j-0123456789abcdef  digits     17  three of eleven…
j-1                 ä           4""",
        ),
        (
            54,
            False,
            """
JOB                 NAME    ROUND  REASON
j-0123456789abcdef  digits     17  three of eleven
                                   clients wait
j-1                 ä           4""",
        ),
        (
            30,
            False,
            """
JOB                 NAME
  ROUND  REASON
j-0123456789abcdef  digits
     17  three of eleven
         clients wait
j-1                 ä
      4""",
        ),
    ],
)
def test_a_wide_table_folds_by_columns(width: int, cuts: bool, expected: str):
    table = TextTable(NAMES, width, cuts=cuts)
    lines = table.format(ROWS)
    assert [*table.head(), *lines] == expected.strip("\n").splitlines()


@pytest.mark.parametrize("width", range(1, 60, 7))
def test_folding_ends_and_keeps_every_word(width: int):
    text = "one two-three 日本語 " + "x" * 70 + "  four"
    folded = output.fold(text, max(2, width), "    ")
    assert "".join("".join(folded).split()) == "".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_no_line_is_wider_than_it(columns: int, full: State, server: FakeServer):
    def lines(*words: str) -> Iterator[str]:
        command = ["-c", f"from fedplat.cli import main; import sys; sys.argv[1:] = {list(words)!r}; main()"]
        with Terminal([*PYTHON, *command], environment(server), columns=columns) as terminal:
            assert terminal.finish() == 0
            yield from screen_lines(terminal.text)

    for words in (("client", "list", "-o", "wide"), ("job", "assignments", "digits")):
        for line in lines(*words):
            assert len(line) <= columns
