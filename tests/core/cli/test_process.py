"""The command as a process of its own: signals, streams, and what is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fedplat.extras import install_command
from support.cli.commands import FEDPLAT, environment, start
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.cli.story import ending, script


@pytest.mark.parametrize("server_is_gone", [False, True])
def test_ctrl_c_leaves_the_watch(server_is_gone: bool, state: State, server: FakeServer):
    job = state.add_job()
    state.add_events(*script())
    with start(server, "job", "watch", "digits", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in state.events:
            process.stdout.readline()
        if server_is_gone:
            server.stop()
            assert process.stderr.readline().startswith(f"waiting for {server.address}: ")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == f"stopped watching; the job continues. Watch it again with: fedplat job watch {job.job_id}\n"


def test_the_end_of_a_server_is_told_in_our_words_only(state: State, server: FakeServer):
    state.add_job()
    state.add_events(*script())
    with start(server, "job", "watch", "digits") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("round 1/3  abandoned")
        server.restart()
        state.add_events(ending("FAILED", "nobody came"))
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.endswith("is FAILED: nobody came\n")
    (line,) = errors.splitlines()
    assert line.startswith(f"waiting for {server.address}: ")
    assert line.endswith("; trying for 60 s")


@pytest.mark.slow
def test_no_colour_without_a_terminal(state: State, server: FakeServer):
    state.add_job("naïve ✓")
    for more in ({}, {"NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}):
        done = subprocess.run(
            [*FEDPLAT, "job", "list"],
            env={**os.environ, **environment(server), **more},
            capture_output=True,
            check=True,
        )
        assert b"\x1b" not in done.stdout
        assert done.stderr == b""
        assert (b"na\\xefve \\u2713" if "PYTHONIOENCODING" in more else "naïve ✓".encode()) in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_names_it(missing: str):
    code = f"import sys; sys.modules[{missing!r}] = None; from fedplat.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "status"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: the command fedplat needs {missing}; install it with: {install_command('cli')}\n"


def test_an_output_that_cannot_be_written_gives_one_line(state: State, server: FakeServer):
    state.add_job()
    for redirection, status, line in (
        (">/dev/full", 1, "error: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ):
        command = ["sh", "-c", f'"$@" {redirection}', "sh", *FEDPLAT, "job", "list"]
        done = subprocess.run(command, env=environment(server), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (status, line)
