"""Commands try again while the server is away for a moment, and no longer than they were told."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedplat.admin import AdminClient, connection
from fedplat.admin.patience import Patience
from fedplat.admin.profile import Profile
from fedplat.cli.app import app
from fedplat.errors import ServerRefusedError, ServerUnreachableError
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run, environment_for, start
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import S, State
from support.cli.runner import CliRunner
from support.cli.story import ending, script
from support.jobs import write_job

PATIENCE_S = 60.0
JOB = write_job(
    "digits",
    trainer="digits",
    rounds=3,
    model={"initial": "initial.safetensors"},
    selection={"goal": 2, "over_selection": 1.3},
)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    model = Parameters.from_arrays({"weight": np.zeros(2, np.float32)})
    (tmp_path / "initial.safetensors").write_bytes(model.to_bytes())
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


class Clock:
    """A clock that advances only during pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def patient(clock: Clock, told: list[str], timeout_s: float = 60.0) -> Patience:
    return Patience(timeout_s, told.append, pause=clock.pause, now=lambda: clock.now)


LION = '[aggregation]\nrule = "lion"\n'
"""The plugin of a server."""


@pytest.mark.fault("F50")
@pytest.mark.parametrize("more", ["", LION])
def test_a_job_is_submitted_to_a_server_that_comes_later(
    state: State, closed_port: str, job_file: Path, more: str
) -> None:
    """Runs the command as a process; the server's port opens after the command has reported that it waits."""
    state.ends_started_jobs = True
    state.leader = {"plugins": [admin_pb2.Plugin(kind="rules", name="lion")]}
    job_file.write_text(JOB + more)
    late = FakeServer(State())  # only for the environment that a command needs
    late.stop()
    late.port = int(closed_port.rpartition(":")[2])
    with start(late, "job", "submit", str(job_file), "--follow") as process:
        assert process.stderr is not None
        waits = process.stderr.readline()
        with FakeServer(state, port=late.port):
            output, errors = process.communicate(timeout=PATIENCE_S)
    assert waits == f"waiting for {closed_port}: Connection refused; trying for 60 s\n"
    assert process.returncode == 0
    assert errors.startswith("warning: updates: nothing bounds the norm of a single update")
    assert errors.count("\n") == 1
    assert output.splitlines()[-1].endswith("is COMPLETED")
    assert len(state.jobs) == 1


def test_mistakes_of_a_job_file_are_told_without_a_server(run: Run, closed_port: str, job_file: Path) -> None:
    job_file.write_text(JOB + LION)
    done = run("--server", closed_port, "job", "submit", str(job_file), "--timeout", "0")
    assert done.exit_code == 2
    first, second = done.stderr.splitlines()
    assert "aggregation.rule = 'lion': expected one of fedavg" in first
    assert "the server was not asked whether it has plugins of these names" in second
    assert closed_port in second
    job_file.write_text(JOB + "[aggregation]\nlearning_rat = 1.0\n")
    assert run("--server", closed_port, "job", "submit", str(job_file)).stderr.count("\n") == 1


@pytest.mark.fault("F50")
@pytest.mark.parametrize("method", ["CreateJob", "StartJob"])
def test_an_answer_that_is_lost_makes_no_second_job(
    method: str, state: State, run: Run, job_file: Path, server: FakeServer
) -> None:
    state.lost_answers.add(method)
    done = run("job", "submit", str(job_file))
    assert done.exit_code == 0, done.output
    assert [job.status for job in state.jobs.values()] == [S.JOB_STATUS_RUNNING]
    assert len(state.by_key) == 1
    assert done.stderr.splitlines()[0] == f"waiting for {server.address}: the connection was closed; trying for 60 s"


@pytest.mark.fault("F50")
def test_a_server_that_is_killed_twice_during_a_watch_costs_no_event_and_two_lines(
    state: State, server: FakeServer
) -> None:
    state.add_job()
    state.add_events(*script())
    with start(server, "job", "watch", "digits", "--json", "--timeout", "45") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in script()]
        waits: list[str] = []
        for more in (script()[0], ending()):
            server.stop()
            waits.append(process.stderr.readline())
            server.restart()
            state.add_events(more)
            lines.append(process.stdout.readline())
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output, errors) == (0, "", "")
    assert [f'"sequence": {10 * (at + 1)},' in line for at, line in enumerate(lines)] == [True] * len(lines)
    assert all(line.startswith(f"waiting for {server.address}: ") for line in waits)
    assert all(line.endswith("; trying for 45 s\n") for line in waits)


def test_what_does_not_pass_is_told_at_once(state: State, server: FakeServer, client: AdminClient) -> None:
    """A wrong token, and a server without TLS where TLS was expected."""
    clock, told = Clock(), list[str]()
    state.refusal = (grpc.StatusCode.UNAUTHENTICATED, "needs an operator's token")
    with pytest.raises(ServerRefusedError):
        patient(clock, told).run(client, client.status)
    with (
        AdminClient(Profile(server.address)) as secure,
        pytest.raises(ServerUnreachableError, match="it uses plaintext") as caught,
    ):
        patient(clock, told).run(secure, secure.status)
    assert caught.value.is_lasting
    assert (clock.pauses, told) == ([], [])


def test_wrong_arguments_are_told_before_any_server_is_asked(closed_port: str, tmp_path: Path) -> None:
    wrong = tmp_path / "job.toml"
    wrong.write_text("rounds = 0")
    environment = environment_for(closed_port)
    done = CliRunner().invoke(app, ["job", "submit", str(wrong)], env=environment)
    assert done.exit_code == 2
    assert "waiting for" not in done.stderr


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon"])
@pytest.mark.parametrize("command", [["job", "watch", "digits"], ["status"]])
def test_a_timeout_is_a_number_of_seconds(value: str, command: list[str], run: Run) -> None:
    for arguments in ([*command, "--timeout", value], ["--timeout", value, *command]):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert "--timeout" in done.stderr


def test_the_time_is_bounded_and_the_pauses_grow(closed_port: str) -> None:
    clock, told = Clock(), list[str]()
    with (
        AdminClient(Profile(closed_port, insecure=True)) as client,
        pytest.raises(ServerUnreachableError) as caught,
    ):
        patient(clock, told, 20.0).run(client, client.status)
    assert str(caught.value) == (
        f"no fedplat server answers at {closed_port} (Connection refused); check that it is running "
        "(fedplat-server run); gave up after 20 s"
    )
    assert sum(clock.pauses) == pytest.approx(20.0)
    longest = [0.25, 0.5, 1.0, 2.0, 4.0, *[5.0] * len(clock.pauses)]
    bounds = list(zip(clock.pauses, longest, strict=False))[:-1]  # the last pause is cut off by the timeout
    assert all(each / 2 <= pause <= each for pause, each in bounds)
    assert len({pause / each for pause, each in bounds}) > 1, "the pauses are not random"
    assert told == [f"waiting for {closed_port}: Connection refused; trying for 20 s"]


def test_a_success_begins_the_time_anew(state: State, client: AdminClient) -> None:
    clock, told = Clock(), list[str]()
    waiting = patient(clock, told, 3.0)
    for _ in range(3):
        failures = iter([True, True, False])

        def call(failures: Iterator[bool] = failures) -> str:
            if next(failures):
                raise ServerUnreachableError("away")
            return "done"

        assert waiting.run(client, call) == "done"
        clock.now += 2.0
    assert told == [f"waiting for {client.server}: away; trying for 3 s"] * 3


@pytest.mark.parametrize(("lasts_s", "num_breaks", "is_given_up"), [(50.0, 20, False), (0.1, 200, True)])
def test_a_watch_that_a_load_balancer_ends_is_no_failure(
    state: State, client: AdminClient, lasts_s: float, num_breaks: int, is_given_up: bool
) -> None:
    clock, told, breaks = Clock(), list[str](), [num_breaks]

    def watch() -> str:
        clock.now += lasts_s
        breaks[0] -= 1
        if breaks[0] >= 0:
            raise ServerUnreachableError("no server answers", reason="the connection was closed")
        return "the job has ended"

    patience = patient(clock, told)
    if is_given_up:
        with pytest.raises(ServerUnreachableError, match="gave up after 60 s"):
            patience.run(client, watch, watches=True)
    else:
        assert patience.run(client, watch, watches=True) == "the job has ended"
        assert told == []


def test_without_a_timeout_commands_fail_at_once(closed_port: str) -> None:
    environment = environment_for(closed_port)
    for arguments in (["status"], ["job", "list"], ["job", "watch", "x", "--timeout", "0"]):
        done = CliRunner().invoke(app, arguments, env=environment)
        assert done.exit_code == 5
        assert done.stderr.count("\n") == 1
        assert "waiting for" not in done.stderr
        assert "gave up" not in done.stderr


@pytest.mark.fault("F50")
@pytest.mark.parametrize("arguments", [["status", "--timeout", "50"], ["--timeout", "50", "enrollment", "list"]])
@pytest.mark.slow
def test_any_command_of_a_script_can_wait_for_the_server(state: State, closed_port: str, arguments: list[str]) -> None:
    late = FakeServer(State())
    late.stop()
    late.port = int(closed_port.rpartition(":")[2])
    with start(late, *arguments) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"waiting for {closed_port}: Connection refused; trying for 50 s\n"
        with FakeServer(state, port=late.port):
            _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors


class NameService:
    """A DNS server on its own port, which knows a name once it is told to. It answers only A queries."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.knows = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while True:
            question, sender = self._socket.recvfrom(1500)
            if self._ending.is_set():
                return
            end = question.index(b"\0", 12) + 5
            is_a = question[end - 4 : end - 2] == b"\0\1"
            found = self.knows.is_set()
            flags, num_answers = (0x8180 if found else 0x8183), int(found and is_a)  # 3: there is no such name
            answer = b"\xc0\x0c\0\1\0\1" + struct.pack(">IH", 0, 4) + bytes([127, 0, 0, 1])
            head = question[:2] + struct.pack(">HHHHH", flags, 1, num_answers, 0, 0)
            self._socket.sendto(head + question[12:end] + answer * num_answers, sender)

    def __enter__(self) -> NameService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


@pytest.mark.fault("F50")
def test_a_name_that_is_not_known_yet(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own resolver asks a DNS server, which learns the name while the command waits, as in `compose up`."""
    told: list[str] = []
    with NameService() as names:

        def channel(profile: Profile) -> grpc.Channel:
            return grpc.insecure_channel(
                f"dns://127.0.0.1:{names.port}/{profile.server}",
                options=[("grpc.dns_min_time_between_resolutions_ms", 50)],
            )

        def tell(text: str) -> None:
            told.append(text)
            names.knows.set()

        monkeypatch.setattr(connection, "_open_channel", channel)
        with AdminClient(Profile(f"fed.example.invalid:{server.port}", insecure=True)) as client:
            assert Patience(PATIENCE_S, tell).run(client, client.status).process_id == 4711
    assert told == [f"waiting for fed.example.invalid:{server.port}: the host name is not known; trying for 60 s"]
