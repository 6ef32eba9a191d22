from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from core.cli.fake_admin import FakeServer, State
from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.cli.app import app

Run = Callable[..., Result]
TOKEN = "fedplat_op_" + "t" * 43


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[FakeServer]:
    with FakeServer(state) as running:
        yield running


@pytest.fixture
def client(server: FakeServer) -> Iterator[AdminClient]:
    with AdminClient(Profile(server.address, insecure=True)) as connected:
        yield connected


@pytest.fixture
def closed_port() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def environment(server: FakeServer) -> dict[str, str]:
    return {"FEDPLAT_SERVER": server.address, "FEDPLAT_INSECURE": "1", "FEDPLAT_TOKEN": TOKEN}


@pytest.fixture
def run(server: FakeServer) -> Run:
    """Runs the command in this process; the environment names the fake server, which has no TLS."""
    runner = CliRunner()

    def invoke(*args: str) -> Result:
        result = runner.invoke(app, list(args), env=environment(server))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def parsed(result: Result) -> Any:
    """The JSON of a command that succeeded: one line, and nothing else on either stream."""
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)
