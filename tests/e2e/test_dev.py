"""The first hour of a newcomer: `fedplat-server dev`, a client with the printed line, a job, Ctrl-C, and once more."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest

from support import process_logs, processes

TRAINER = """
import pathlib
import threading

import numpy as np
from fedplat_client import TrainResult


def model():
    return {"weight": np.zeros(3, np.float32)}


def train(task):
    pause = threading.Event()
    while task.round >= 3 and not pathlib.Path("go").exists():
        pause.wait(0.05)
    return TrainResult(parameters=task.parameters, num_examples=1)
"""
JOB = """
name = "linear"
population = "demo"
trainer = "linear"
rounds = 5
model.initial = "trainer:model"
selection = { goal = 1, over_selection = 1.0 }
"""


class Terminal:
    """A user of the machine, with a home folder and no profile yet."""

    def __init__(self, home: Path) -> None:
        self.home = home
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("FEDPLAT_", "XDG_"))}
        self.environment = {
            **variables,
            **{"HOME": str(home), "PATH": f"{processes.BIN}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        }

    def run(self, command: str) -> str:
        done = subprocess.run(
            command.split(), cwd=self.home, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    @contextlib.contextmanager
    def started(self, command: str, log: str) -> Generator[subprocess.Popen[bytes]]:
        with process_logs.open_log(self.home / log) as output:
            process = subprocess.Popen(
                command.split(),
                cwd=self.home,
                env=self.environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def read(self, log: str) -> str:
        return (self.home / log).read_text()

    def round_of_job(self) -> int:
        found = re.search(r"rounds +(\d+) of 5 committed", self.run("fedplat job show linear"))
        assert found is not None
        return int(found[1])


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=processes.PATIENCE_S):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_a_newcomer_continues_after_ctrl_c(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "job.toml").write_text(JOB)
    pages = f"127.0.0.1:{processes.free_port()}"
    command = f"fedplat-server dev --listen 127.0.0.1:{processes.free_port()} --dashboard {pages}"

    def stop(server: subprocess.Popen[bytes], log: str) -> str:
        server.send_signal(signal.SIGINT)
        assert server.wait(processes.PATIENCE_S) == 0, terminal.read(log)
        said = terminal.read(log)
        assert "stopped; everything is kept for the next fedplat-server dev\n" in said
        return said

    with contextlib.ExitStack() as stack:
        with terminal.started(command, "first.log") as server:
            processes.until(lambda: "submit a job" in terminal.read("first.log"), "the server")
            assert "expires in" in terminal.run("fedplat status")  # with TLS
            address = re.compile(rf"^http://{pages}/login\?code=\S+$", re.MULTILINE)
            processes.until(lambda: address.search(terminal.read("first.log")) is not None, "the dashboard's address")
            found = address.search(terminal.read("first.log"))
            assert found is not None
            with urllib.request.urlopen(found[0], timeout=processes.PATIENCE_S) as page:
                assert "Sign in" in page.read().decode()
            second = subprocess.run(
                command.split(), cwd=tmp_path, env=terminal.environment, capture_output=True, text=True, check=False
            )
            assert (second.returncode, second.stdout) == (1, "")
            assert f"another fedplat-server uses {tmp_path / 'fedplat-data'}; stop it" in second.stderr
            printed = re.search(r"run a client +(fedplat-client .*) NAME=FILE.py:FUNCTION", terminal.read("first.log"))
            assert printed is not None
            stack.enter_context(terminal.started(f"{printed[1]} linear=trainer.py:train", "client.log"))
            terminal.run("fedplat job submit job.toml")
            processes.until(lambda: terminal.round_of_job() == 2, "two rounds")
            said = stop(server, "first.log")
        assert "made the certificate authority" in said
        with terminal.started(command, "second.log") as server:
            processes.until(lambda: "submit a job" in terminal.read("second.log"), "the server")
            assert terminal.round_of_job() == 2
            (tmp_path / "go").touch()
            terminal.run("fedplat job watch linear")  # ends with 0 when the job is completed
            said = stop(server, "second.log")
        assert "made" not in said
        assert "kept the certificate authority" in said
    terminal.run("fedplat-server verify")


@pytest.mark.slow
def test_the_dashboard_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    pages = f"127.0.0.1:{processes.free_port()}"
    command = f"fedplat-server dev --listen 127.0.0.1:{processes.free_port()} --dashboard {pages}"
    with terminal.started(command, "server.log") as server:
        processes.until(lambda: "/login?code=" in terminal.read("server.log"), "the dashboard's address")
        assert answers(f"http://{pages}/login")
        server.kill()
        processes.until(lambda: not answers(f"http://{pages}/login"), "the end of the dashboard")
