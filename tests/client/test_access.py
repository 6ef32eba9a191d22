"""How a client gains access, and what it logs or prints when access is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import msgspec
import pytest
from click.testing import CliRunner, Result

from fedplat.errors import TicketError
from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client.commands import main
from fedplat_client.errors import FencedError, RevokedError
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
FENCED = (grpc.StatusCode.PERMISSION_DENIED, "FENCED")
REVOKED = (grpc.StatusCode.PERMISSION_DENIED, "REVOKED")
LOST = (grpc.StatusCode.UNAUTHENTICATED, "SESSION_UNKNOWN")
ENDS = [(FENCED, FencedError), (REVOKED, RevokedError)]
CALLS = ("CheckIn", "Download", "Upload", "QueryUpload", "Report", "Heartbeat", "Fail")


def add_nothing(task: Task) -> TrainResult:
    return TrainResult(parameters=task.parameters, num_examples=1)


def fail(task: Task) -> TrainResult:
    raise RuntimeError("no")


@pytest.fixture
def run(fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, in a folder that has a trainer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"access_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(TRAINER)
    options = ("run", "--trainer", f"{name}:digits", "--data-dir", "data", "--log-level", "error")
    return lambda *more: CliRunner().invoke(main, [*options, *more])


TRAINER = """
from fedplat_client import TrainResult

def digits(task):
    return TrainResult(parameters=task.parameters, num_examples=1)
"""


def only_line(result: Result, status: int) -> str:
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Warning: --ticket shows")]
    assert (result.stdout, len(lines)) == ("", 1), result.output
    return lines[0] + "\n"


# --- the end of a session --------------------------------------------------------------------------------------------


@pytest.mark.fault("F30")
@pytest.mark.parametrize(("planned", "error"), ENDS, ids=["fenced", "revoked"])
@pytest.mark.parametrize("call", ["OpenSession", "CheckIn", "Download", "Upload", "Report", "Fail"])
def test_a_fenced_or_revoked_client_ends_whichever_call_reports_it(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    call: str,
    planned: tuple[grpc.StatusCode, str],
    error: type[Exception],
) -> None:
    fleet.assign(model)
    fleet.failures[call] = [planned]
    if call != "OpenSession":  # every later call gets the same answer
        fleet.failures["CheckIn"] += [] if call == "CheckIn" else [grpc.StatusCode.UNAVAILABLE, planned]
    client = make_client()
    client.add_trainer("digits", fail if call == "Fail" else add_nothing)
    with pytest.raises(error):
        client.run()


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("planned", "advice"),
    [
        (FENCED, ""),
        (REVOKED, "; to take part again, enroll as another client, with a new ticket and another data directory"),
    ],
    ids=["fenced", "revoked"],
)
def test_the_command_reports_it_in_one_line(
    fleet: FakeFleet, run: Callable[..., Result], planned: tuple[grpc.StatusCode, str], advice: str
) -> None:
    fleet.failures["CheckIn"] = [planned]
    line = only_line(run("--ticket", fleet.ticket.to_text()), 1)
    assert line == f"Error: PERMISSION_DENIED: planned for CheckIn{advice} (docs: E-{planned[1]})\n"


@pytest.mark.parametrize("call", CALLS)
def test_a_lost_session_is_replaced_without_a_word(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    call: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever call finds that the session is lost, the task is done and nothing is logged."""
    fleet.assign(model)
    fleet.failures[call] = [LOST]
    client = make_client()
    client.add_trainer("digits", fail if call == "Fail" else add_nothing)
    with caplog.at_level("WARNING", "fedplat_client.client"):
        client.run(max_tasks=1)
    assert fleet.calls.count("Fail" if call == "Fail" else "Report") >= 1
    assert fleet.calls.count("Enroll") == 1
    assert [record for record in caplog.records if record.name == "fedplat_client.client"] == []


@pytest.mark.fault("F30")
def test_a_client_that_is_started_again_keeps_its_identity(
    fleet: FakeFleet, model: model_pb2.ModelRef, run: Callable[..., Result]
) -> None:
    """Both with and without its ticket."""
    ticket = ("--ticket", fleet.ticket.to_text())
    for given in (ticket, ticket, ()):
        fleet.assign(model)
        assert run("--max-tasks", "1", *given).exit_code == 0
    assert (fleet.calls.count("Enroll"), fleet.calls.count("Report"), fleet.num_sessions) == (1, 3, 3)
    assert set(fleet.sessions.values()) == {"client-1"}


# --- tickets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--ticket", "fpt1.AAAA"], "the ticket is damaged"),
        (["--ticket", "nonsense"], "this is not a ticket of this version"),
        (["--ticket", "fpt1." + "A" * 40_000], "expected at most"),
        (["--ticket-file", "no-such-file"], "the ticket file no-such-file cannot be read"),
        (["--ticket-file", __file__], f"the ticket file {__file__}: this is not a ticket of this version"),
        (["--ticket", "{good}", "--ticket-file", "file"], "expected one of them"),
        (["--label", "a=1", "--label", "b=2", "--label", "a=2"], "--label a has the values '1' and '2'; expected one"),
        (["--ticket", "{good}", "--server", "elsewhere:1"], "but --server or --population differs"),
        (["--server", "elsewhere:1"], "--server and --population must be used together"),
        ([], "has no identity; expected one. Pass a ticket"),
    ],
)
def test_tickets_that_cannot_be_used_are_one_line(
    fleet: FakeFleet, run: Callable[..., Result], given: list[str], said: str
) -> None:
    good = fleet.ticket.to_text()
    line = only_line(run(*(part.format(good=good) for part in given)), 2)
    assert said in line
    assert good not in line
    assert fleet.calls == []


@pytest.mark.parametrize("code", ["TOKEN_UNKNOWN", "TOKEN_REFUSED"])
def test_a_ticket_that_the_server_refuses_is_one_line(fleet: FakeFleet, run: Callable[..., Result], code: str) -> None:
    status = grpc.StatusCode.UNAUTHENTICATED if code == "TOKEN_UNKNOWN" else grpc.StatusCode.PERMISSION_DENIED
    fleet.failures["Enroll"] = [(status, code)]
    line = only_line(run("--ticket", fleet.ticket.to_text()), 1)
    assert "the server does not accept this client in the population 'demo'" in line
    assert line.endswith(f"(docs: E-{code})\n")
    assert fleet.ticket.secret not in line


def test_a_client_that_is_not_enrolled_needs_a_ticket(fleet: FakeFleet, run: Callable[..., Result]) -> None:
    line = only_line(run("--server", fleet.address, "--population", "demo"), 1)
    assert "has no ticket" in line
    assert "fedplat enrollment create" in line


def test_a_server_that_is_not_the_tickets_is_named(
    fleet: FakeFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client waits, since an operator may repair the server; until then the log names the problem."""
    ticket = msgspec.structs.replace(fleet.ticket, tls=True)
    options = ClientOptions(wait=lambda _, seconds: seconds > 0)  # stops at the first failure
    client = Client.from_ticket(ticket.to_text(), data_dir=tmp_path / "new", options=options)
    client.add_trainer("digits", add_nothing)
    with caplog.at_level("WARNING"):
        client.run()
    (record,) = caplog.records
    said = record.getMessage()
    assert said.endswith(f"{fleet.address}: it uses plaintext, but TLS was expected (was it started with --insecure?)")
    assert fleet.calls == []


def test_a_ticket_of_no_use_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TicketError, match="damaged"):
        Client.from_ticket("fpt1.AAAA", data_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()
