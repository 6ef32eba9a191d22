"""The log never stops the daemon, and never contains a secret."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server.logs import Sink
from fedplat_server.rpc.report_intake import ReportIntake
from fedplat_server.tracing import ids
from support import daemons
from support.daemons import Site, initial_model, update_of
from support.jobs import job_file
from support.processes import ROOT

LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
OTHER_NAMES = frozenset({"job_id", "round_", "number_of_attempt", "client_id", "key", "assignment", "upload", "trace"})
"""Names of fields that stand for the job, the round, the attempt, the client or the trace in other places."""

SCRIPT = """
import asyncio, logging, sys
from fedplat_server import logs

def fail():
    credential = "very" + "-secret"
    raise ValueError("an invented bug")

sink = logs.configure("DEBUG", json=sys.argv[1] == "json")
logs.get().info("a sentence", number=3, odd=object)
logging.getLogger("somelib").warning("from a library %s", 7)
for log in (logs.get(), logging.getLogger("somelib")):
    try:
        fail()
    except ValueError:
        log.exception("it failed")
sink.finish(30.0)
"""


def lines_of(kind: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_lines_also_from_libraries() -> None:
    lines = [json.loads(line) for line in lines_of("json")]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("a sentence", "info"),
        ("from a library 7", "warning"),
        ("it failed", "error"),
        ("it failed", "error"),
    ]
    assert lines[0]["number"] == 3
    assert lines[1]["logger"] == "somelib"
    assert all("invented" in json.dumps(line["exception"]) for line in lines[2:])


@pytest.mark.parametrize("kind", ["json", "text"])
def test_tracebacks_show_no_variables(kind: str) -> None:
    text = "\n".join(lines_of(kind))
    assert text.count("an invented bug") >= 2
    assert "very-secret" not in text


@pytest.mark.fault("F37")
def test_a_reader_that_sleeps_costs_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    try:
        sink = Sink(writing, max_lines=10)
        text = "x" * 10_000 + "\n"
        for _ in range(100):
            assert sink.write(text) == len(text)  # a pipe takes 64 KiB; this must still return
        sink.finish(0.01)
        received: list[bytes] = []

        def read() -> None:
            while b"dropped" not in (part := os.read(reading, 1 << 20)):
                received.append(part)
            received.append(part)

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(60.0)
        assert not reader.is_alive()
        last = b"".join(received).decode().splitlines()[-1]
        assert "lines of the log were dropped" in last
        assert b"".join(received).count(b"x" * 10_000) + int(last.split()[0]) == 100
        assert sink.num_dropped == int(last.split()[0])
        sink.finish(60.0)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.fault("F37")
def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sink = Sink(writing)
    for _ in range(10):
        sink.write("nobody reads this\n")
    sink.finish(60.0)
    assert sink.num_dropped == 10
    os.close(writing)


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a logger in the server and the client, with its place."""
    for folder in ("server/fedplat_server", "client/fedplat_client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_fields_have_the_same_names_everywhere() -> None:
    wrong: list[str] = []
    calls = list(log_calls())
    for place, call in calls:
        names = {each.arg: each.value for each in call.keywords if each.arg is not None}
        extra = names.pop("extra", None)
        if isinstance(extra, ast.Dict):
            keys = [each.value for each in extra.keys if isinstance(each, ast.Constant)]
            names |= dict.fromkeys(map(str, keys), extra)
        wrong += [f"{place}: {name}" for name in names.keys() & OTHER_NAMES]
        # An attempt is three numbers: text such as "j-1 round 3 attempt 1" is not one that a tool could look for.
        wrong += [f"{place}: attempt is text" for name, value in names.items() if name == "attempt" and _is_text(value)]
    assert len(calls) > 50
    assert wrong == []


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Call) and ast.unparse(value.func) == "str")


def test_lines_of_attempts_get_the_ids_of_their_traces() -> None:
    key = AttemptKey("j-1", 0, 2)
    line: dict[str, Any] = {"event": "it failed", "job": "j-1", "round": 0, "attempt": 2, "trace_id": "of the call"}
    trace_id = f"{ids.trace_id(key):032x}"
    assert ids.add_ids(None, "info", line) == line | {
        "trace_id": trace_id,
        "span_id": f"{ids.attempt_span_id(key):016x}",
    }
    assert ids.add_ids(None, "info", {**line, "client": "c-1"}) == line | {
        "client": "c-1",
        "trace_id": trace_id,
        "span_id": f"{ids.assignment_span_id(AssignmentId(key, 'c-1')):016x}",
    }
    for others in ({"job": "j-1"}, {"job": "j-1", "round": 1, "attempt": "text"}, {"version": 1}):
        assert ids.add_ids(None, "info", dict(others)) == others


@pytest.mark.calm
async def test_lines_of_a_round_and_of_its_calls_name_what_they_are_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("an invented bug")

    with capture_logs([merge_contextvars, ids.add_ids]) as lines:
        async with daemons.running(folder) as site:
            job, client_id = await _play(site, monkeypatch, fail)
    (failed,) = (line for line in lines if line["event"] == "a call failed")
    names = {"job": job, "round": 1, "attempt": 1, "client": client_id}
    named = names | {
        "trace_id": f"{ids.trace_id(AttemptKey(job, 1, 1)):032x}",
        "span_id": f"{ids.assignment_span_id(AssignmentId(AttemptKey(job, 1, 1), client_id)):016x}",
    }
    assert {name: failed[name] for name in named} == named
    for line in lines:
        if line["event"].startswith("assignment "):
            assert {name: line[name] for name in named} == named
        if line["event"].startswith("attempt "):
            assert (line["job"], line["round"], line["attempt"]) == (job, 1, 1)
            assert "client" not in line
    about_calls = [line for line in lines if line["event"] == "the server is ready"]
    assert not {"client", "job", "trace_id"} & about_calls[0].keys()


async def _play(site: Site, monkeypatch: pytest.MonkeyPatch, fail: object) -> tuple[str, str]:
    """A round of one client, whose first report fails by a bug."""
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    assignment = await client.assignment()
    content = update_of(initial_model(), 1).to_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(ReportIntake, "submit_report", fail)
        with pytest.raises(aio.AioRpcError):
            await client.report_inline(assignment.token, content)
    await client.report_inline(assignment.token, content)
    await site.operator.until(job, "job", "COMPLETED")
    return job, client.client_id
