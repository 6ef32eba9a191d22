"""The exit status of commands, each against a real failure."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator

import grpc
import pytest
from click.testing import Result

from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.cli.app import app
from fedplat.errors import ServerRefusedError
from support.cli.commands import FEDPLAT, Run
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import S, State
from support.cli.runner import CliRunner


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a socket that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_success_and_refusal(run: Run, state: State):
    state.add_job()
    assert run("job", "show", "digits").exit_code == 0
    assert run("job", "show", "other").exit_code == 1
    assert run("job", "resume", "digits").exit_code == 1
    assert run("job", "show").exit_code == 2


@pytest.mark.parametrize(
    ("status", "code", "exit_status"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "NO_OPERATOR", 4),
        (grpc.StatusCode.PERMISSION_DENIED, "ROLE_TOO_LOW", 4),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_LOGINS", 4),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", 1),
        (grpc.StatusCode.FAILED_PRECONDITION, "ILLEGAL_ACTION", 1),
        (grpc.StatusCode.UNAVAILABLE, "NO_LEADER", 5),
        (grpc.StatusCode.PERMISSION_DENIED, "", 1),  # of another program, such as a proxy
    ],
)
def test_the_servers_error_code_decides(status: grpc.StatusCode, code: str, exit_status: int, run: Run, state: State):
    state.refusal, state.refusal_code = (status, "not now"), code
    result = run("job", "list")
    assert (result.exit_code, result.stdout) == (exit_status, "")
    assert "not now" in result.stderr
    entry = f"(docs: E-{code})\n" if code and exit_status != 5 else "\n"
    assert result.stderr.endswith(entry)


def test_what_cannot_be_a_code_is_not_shown(run: Run, state: State):
    state.refusal, state.refusal_code = (grpc.StatusCode.NOT_FOUND, "no"), "NO; rm -rf ."
    assert run("job", "list").stderr == "error: no\n"


def test_a_refusal_has_the_servers_code(client: AdminClient, state: State):
    state.refusal, state.refusal_code = (grpc.StatusCode.NOT_FOUND, "no"), "NO_SUCH_JOB"
    with pytest.raises(ServerRefusedError) as caught:
        client.show_job("x")
    assert caught.value.code == "NO_SUCH_JOB"
    state.refusal_code = ""
    with pytest.raises(ServerRefusedError) as caught:
        client.show_job("x")
    assert caught.value.code == ""


def bare(**environment: str) -> Result:
    return CliRunner().invoke(app, ["status"], env={"FEDPLAT_INSECURE": "1", **environment})


def test_without_a_profile_nobody_is_logged_in(tmp_path: object, closed_port: str):
    folder = str(tmp_path)
    assert bare(HOME=folder, XDG_CONFIG_HOME=folder, FEDPLAT_TOKEN="", FEDPLAT_PROFILE="").exit_code == 4


def test_an_unreachable_server(closed_port: str, silent: str):
    assert bare(FEDPLAT_SERVER=closed_port, FEDPLAT_TOKEN="t").exit_code == 5
    with AdminClient(Profile(silent, insecure=True), timeout_s=0.2) as client:
        from fedplat.cli.session import exit_status
        from fedplat.errors import ServerUnreachableError

        with pytest.raises(ServerUnreachableError) as caught:
            client.status()
        assert exit_status(caught.value) == 5


@pytest.mark.slow
def test_a_server_that_is_not_trusted_is_not_reached(server: FakeServer):
    environment = {"FEDPLAT_SERVER": server.address, "FEDPLAT_TOKEN": "t", "FEDPLAT_INSECURE": ""}
    done = subprocess.run([*FEDPLAT, "status"], env=environment, capture_output=True, text=True)
    assert done.returncode == 5
    assert "it uses plaintext, but TLS was expected" in done.stderr


def test_a_failed_job(run: Run, state: State):
    state.add_job(status=S.JOB_STATUS_FAILED)
    assert run("job", "watch", "digits").exit_code == 1
    assert run("job", "wait", "digits", "--timeout", "0").exit_code == 1


@pytest.mark.parametrize("arguments", [["job", "show", "M\udcfcn"], ["client", "show", "M\udcfcn"]])
def test_text_of_another_encoding_is_refused_in_a_sentence(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr == "error: 'M\\xfcn' is not valid UTF-8; write it in UTF-8\n"
