from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from click.testing import Result

from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.cli.app import app
from support.cli.commands import Run, environment
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.cli.runner import CliRunner


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
