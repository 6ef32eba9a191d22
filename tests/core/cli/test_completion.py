"""Completion of jobs and clients, as a real bash asks for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from click.shell_completion import ShellComplete

from fedplat.cli import session
from fedplat.cli.app import app
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import environment
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.cli.terminal import Terminal

BIN = Path(sys.executable).parent


def complete(*words: str) -> list[str]:
    """Return the completions of the last word, in this process."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Command)
    found = ShellComplete(command, {}, "fedplat", "_FEDPLAT_COMPLETE")
    return [item.value for item in found.get_completions(list(words[:-1]), words[-1])]


@pytest.fixture
def here(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.mark.usefixtures("here")
def test_jobs_and_clients(state: State):
    jobs = [state.add_job(name) for name in ("digits", "digits-2", "faces", "twice", "twice")]
    state.clients = [admin_pb2.Client(client_id=f"c-{n}", state="away") for n in (10, 11, 20)]
    assert complete("job", "show", "dig") == ["digits-2", "digits"]
    assert complete("job", "wait", "fa") == ["faces"]
    assert complete("round", "describe", "digits-") == ["digits-2"]
    assert complete("job", "show", jobs[4].job_id) == [jobs[4].job_id]
    assert complete("client", "describe", "c-1") == ["c-10", "c-11"]
    assert complete("job", "assignments", "digits", "--client", "c-2") == ["c-20"]
    assert complete("job", "sh") == ["show"]


@pytest.mark.usefixtures("here")
def test_names_of_several_jobs_are_replaced_by_ids(state: State):
    first, second = (state.add_job("twice") for _ in range(2))
    assert complete("job", "show", "") == [second.job_id, first.job_id]
    assert complete("job", "show", "twi") == []


@pytest.mark.usefixtures("here")
def test_hostile_names_are_left_out_and_the_number_is_bounded(state: State, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("support.cli.fake_admin.ROWS_OF_A_PAGE", 1000)
    state.clients = [admin_pb2.Client(client_id=name) for name in ("c-1\x1b[2J", "c-$(reboot)", "c-1 2", "c-ok")]
    assert complete("client", "show", "c-") == ["c-ok"]
    state.clients = [admin_pb2.Client(client_id=f"c-{n}") for n in range(250)]
    assert len(complete("client", "show", "c-")) == session.MAX_NAMES


def test_options_before_the_command_name_the_server(server: FakeServer, state: State, monkeypatch: pytest.MonkeyPatch):
    state.add_job()
    monkeypatch.setenv("FEDPLAT_TOKEN", "t")
    assert complete("--server", server.address, "--insecure", "job", "show", "") == ["digits"]
    assert complete("--insecure", "job", "show", "--server", server.address, "") == ["digits"]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a socket that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_without_an_answer_there_are_no_names(silent: str, closed_port: str, tmp_path: Path, capfd: object):
    assert isinstance(capfd, pytest.CaptureFixture)
    missing = str(tmp_path / "none.toml")
    assert complete("--profile", missing, "job", "show", "") == []
    assert complete("--insecure", "--server", closed_port, "--profile", missing, "job", "show", "") == []
    context = typer.Context(click.Command("x"))
    context.params.update(server=silent, insecure=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPLAT_TOKEN", "t")
        assert session.ask_server(context, lambda client: [(str(client.list_jobs()), "")], 0.2) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_real_bash_completes(server: FakeServer, state: State, tmp_path: Path, silent: str):
    state.add_job("digits")
    given = {
        **os.environ,
        **environment(server),
        "HOME": str(tmp_path),
        "SHELL": "/bin/bash",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    install = ["bash", "-c", "fedplat --install-completion; exit $?"]
    installed = subprocess.run(install, env=given, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    script = tmp_path / ".bash_completions" / "fedplat.sh"
    assert script.exists()
    ask = (
        f"source {script}; COMP_WORDS=(fedplat job show dig); COMP_CWORD=3; _fedplat_completion fedplat; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    asked = subprocess.run(["bash", "-c", ask], env=given, capture_output=True, text=True)
    assert (asked.stdout, asked.stderr) == ("digits\n", "")
    gone = subprocess.run(["bash", "-c", ask], env={**given, "FEDPLAT_SERVER": silent}, capture_output=True, text=True)
    assert (gone.stdout.strip(), gone.stderr) == ("", "")
    with Terminal(["bash", "--noprofile", "--norc", "-i"], given) as terminal:
        terminal.write(f"source {script}; PS1='rea''dy> '\n")  # so that its echo is not taken for the prompt
        terminal.read_until(lambda text: "ready> " in text)
        terminal.write("fedplat job show di\t")
        terminal.read_until(lambda text: "show digits" in text)
