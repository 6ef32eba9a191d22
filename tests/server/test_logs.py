"""The log never stops the daemon, and never contains a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from fedplat_server.logs import Sink

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
    os.close(writing)
