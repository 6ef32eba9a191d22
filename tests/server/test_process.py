"""The real command as a real process: how it starts, how it refuses to, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from fedplat import wire
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2, fleet_pb2_grpc, model_pb2
from support.access import authorized
from support.commands import here
from support.daemons import PATIENCE_S, digest_of, initial_model, reason_name, update_of
from support.jobs import job_file
from support.ports import free_port
from support.raw_client import CHALLENGE, Metadata, Signing

COMMAND = str(Path(sys.executable).parent / "fedplat-server")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def only_line(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line that a failing command prints."""
    assert done.returncode == status, done
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    return lines[0]


class Process:
    """A `fedplat-server run`, its log lines, and stubs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines: list[dict[str, object]] = []

    def until_ready(self) -> str:
        """Reads the log until the server is ready; returns its address. The rest of the log is left to the caller."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line))
            if self.lines[-1]["event"] == "the server is ready":
                return f"127.0.0.1:{self.lines[-1]['port']}"
        raise AssertionError(self.lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        assert self.process.stderr is not None
        self.lines.extend(json.loads(line) for line in self.process.stderr.read().splitlines())
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def started(folder: Path, *options: str) -> Generator[Process]:
    where = ["--listen", "127.0.0.1:0", "--data-dir", str(folder)]
    arguments = [COMMAND, "run", "--insecure", *where, "--json-log", *options]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


@contextlib.contextmanager
def channel(address: str) -> Generator[grpc.Channel]:
    with grpc.insecure_channel(address) as made:
        grpc.channel_ready_future(made).result(PATIENCE_S)
        yield made


class Caller(Signing):
    """A client and an operator with blocking stubs."""

    def __init__(self, made: grpc.Channel, before: Caller | None = None) -> None:
        super().__init__(before.key if before is not None else Ed25519PrivateKey.generate())
        self.fleet = fleet_pb2_grpc.FleetStub(made)
        self.jobs = authorized(admin_pb2_grpc.JobsStub(made))
        self.clients = authorized(admin_pb2_grpc.ClientsStub(made))
        self.operators = authorized(admin_pb2_grpc.OperatorsStub(made))
        self.client_id = before.client_id if before is not None else self.enroll()
        request = self.opening()
        self.opened(self.fleet.OpenSession(request, metadata=self.proof("OpenSession", request)))

    def enroll(self) -> str:
        wanted = admin_pb2.CreateEnrollmentRequest(population="demo", expires_s=60, address="127.0.0.1:7443")
        request = fleet_pb2.EnrollRequest(
            population="demo",
            idempotency_key=os.urandom(8).hex(),
            protocol_version=wire.PROTOCOL_VERSION,
            token=Ticket.from_text(self.clients.CreateEnrollment(wanted).ticket).secret,
            public_key=self.public_key,
        )
        return self.fleet.Enroll(request, metadata=self.proof("Enroll", request)).client_id

    def proof(self, method: str, request: Message) -> Metadata:
        return self.proven(method, request, self.fleet.GetChallenge(CHALLENGE).nonce)

    def check_in(self, wait_s: float = PATIENCE_S) -> grpc.Future[fleet_pb2.CheckInResponse]:
        request = fleet_pb2.CheckInRequest(protocol_version=wire.PROTOCOL_VERSION, trainers=["toy"], wait_s=wait_s)
        return self.fleet.CheckIn.future(request, metadata=self.signed("CheckIn", request))

    def start_job(self, text: str) -> str:
        content = initial_model().to_bytes()
        digest = self.jobs.UploadModel(iter([admin_pb2.UploadModelRequest(data=content)])).digest
        key = os.urandom(8).hex()
        job = self.jobs.CreateJob(
            admin_pb2.CreateJobRequest(job_file=text, initial_digest=digest, idempotency_key=key)
        ).job_id
        self.jobs.StartJob(admin_pb2.JobRequest(job=job))
        return job

    def train(self) -> None:
        token = self.check_in().result().assignment.token
        content = update_of(initial_model(), 0).to_bytes()
        header = fleet_pb2.UploadHeader(token=token, digest=digest_of(content), size_bytes=len(content))
        parts = [fleet_pb2.UploadRequest(header=header), fleet_pb2.UploadRequest(data=content)]
        self.fleet.Upload(iter(parts), metadata=self.signed("Upload", parts[0]))
        report = fleet_pb2.ReportRequest(token=token, digest=digest_of(content), num_examples=1.0)
        assert self.fleet.Report(report, metadata=self.signed("Report", report)).HasField("receipt")

    def until(self, job: str, entity: str, to_state: str = "") -> None:
        """Waits for an event."""
        watching = self.jobs.WatchJob(admin_pb2.WatchJobRequest(job=job))
        for event in watching:
            if event.entity == entity and to_state in ("", event.to_state):
                watching.cancel()
                return
        raise AssertionError(f"the job ended before {entity} became {to_state}")

    def num_waiting(self) -> int:
        return self.operators.GetStatus(admin_pb2.GetStatusRequest()).num_waiting


def until_waiting(caller: Caller, count: int) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while caller.num_waiting() != count:
        assert time.monotonic() < deadline
        pause.wait(0.02)


@pytest.mark.fault("F36")
def test_sigterm_tells_those_who_wait_and_exits_with_0(folder: Path) -> None:
    with started(folder) as server, channel(server.until_ready()) as made:
        caller = Caller(made)
        waiting = caller.check_in()
        until_waiting(caller, 1)
        assert server.stop() == 0
        refusal = waiting.result(PATIENCE_S).refusal
        assert reason_name(refusal.reason) == "DRAINING"
        assert refusal.retry.max_s > 0
        events = [line["event"] for line in server.lines]
        assert events[-3:] == ["the server is stopping", "the audit log ends here", "the server has stopped"]


@pytest.mark.slow
@pytest.mark.fault("F36")
def test_ctrl_c_in_the_middle_of_a_job_and_a_restart(folder: Path) -> None:
    with started(folder) as server, channel(server.until_ready()) as made:
        caller = Caller(made)
        job = caller.start_job(job_file(goal=1, rounds=2))
        caller.train()
        caller.until(job, "version")
        assert server.stop(signal.SIGINT) == 0
    with started(folder) as server, channel(server.until_ready()) as made:
        again = Caller(made, caller)
        again.train()
        again.until(job, "job", "COMPLETED")
        assert again.jobs.ShowJob(admin_pb2.JobRequest(job=job)).model.version == 2
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.fault("F37")
def test_a_log_that_is_not_read_stops_no_round(folder: Path) -> None:
    with started(folder, "--log-level", "DEBUG") as server, channel(server.until_ready()) as made:
        caller = Caller(made)
        filler = "x" * 900
        job = caller.start_job(job_file(goal=1, rounds=3, more="[retry]\nbase_s = 0.01\nmax_s = 0.01\npause_after = 0"))
        for _ in range(100):  # much more than a pipe holds
            token = caller.check_in().result().assignment.token
            failure = fleet_pb2.FailRequest(token=token, reason=model_pb2.REASON_TRAINER_ERROR, text=filler)
            caller.fleet.Fail(failure, metadata=caller.signed("Fail", failure))
        for _ in range(3):
            caller.train()
        caller.until(job, "job", "COMPLETED")
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0  # the log is still not read


@pytest.mark.fault("F36")
@pytest.mark.slow
def test_sigterm_while_it_starts(folder: Path) -> None:
    """The database accepts connections and sends nothing."""
    pytest.importorskip("asyncpg")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://user:a-secret-word@127.0.0.1:{silent.getsockname()[1]}/x"
        (folder / "url").write_text(url)
        with started(folder, "--database", f"@{folder / 'url'}") as server:
            connection, _ = silent.accept()
            with connection:
                assert server.stop() == 0
    assert "a-secret-word" not in json.dumps(server.lines)


@pytest.mark.slow
@pytest.mark.fault("F20")
def test_a_second_daemon_on_the_same_folder_or_port(folder: Path, tmp_path: Path) -> None:
    with started(folder) as server:
        address = server.until_ready()
        line = only_line(command("run", "--insecure", "--listen", "127.0.0.1:0", "--data-dir", str(folder)), 1)
        assert "another fedplat-server uses" in line
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        done = command("run", "--insecure", "--listen", address, "--data-dir", str(other), "--log-level", "ERROR")
        assert f"cannot listen on {address}" in only_line(done, 2)
        assert server.stop() == 0


SHARED = ["--share-port", "--database", "postgresql://x/y", "--listen", "localhost:7443"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "nonsense"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "expected HOST:PORT"),
        (["--listen", "0.0.0.0:7443"], "--insecure on 0.0.0.0: without TLS a server listens on loopback only"),
        (["--tls-certificate", "x.pem"], "--insecure and --tls-certificate exclude each other"),
        (["--log-level", "LOUD"], "expected DEBUG, INFO"),
        (["--metrics", "9464"], "--metrics 9464: expected HOST:PORT"),
        (["--job-metric", "f1"], "--job-metric needs --metrics HOST:PORT"),
        (["--metrics", "127.0.0.1:0", "--job-metric", "x" * 101], "--job-metric: the metric 'xxx"),
        (["--metrics", "127.0.0.1:0", *(f"--job-metric=m{n}" for n in range(11))], "11 names; expected at most 10"),
        (["--trusted-proxy", "10.0.0.1/8"], "expected an address or a network"),
        (["--webhook-network", "10.0.0.1/8"], "webhook network '10.0.0.1/8': expected an address or a network"),
        (["--share-port"], "--share-port is for daemons of one PostgreSQL"),
        (["--share-port", "--database", "postgresql://x/y"], "--share-port needs --advertise"),
        ([*SHARED, "--advertise", "localhost:7443"], "another port, where the other daemons reach this one"),
        (
            [*SHARED, "--advertise", "localhost:7444", "--listen", "localhost:0"],
            "needs a port number that is the same for all",
        ),
        (["--grace", "inf"], "'inf' is not a duration"),
        (["--evaluation-timeout", "0"], "--evaluation-timeout 0"),
        (["--lease", "0.1s"], "--lease 0.1: expected at least 0.3s"),
        (["--evaluator", "rubbish"], "--evaluator rubbish: expected NAME=module:name"),
        (["--evaluator", "=json:loads"], "expected NAME=module:name"),
        (["--trainer", "a=nothing.py:trainer"], "--trainer a=nothing.py:trainer: there is no file"),
        (["--evaluator", "a=nothing.py:score"], "there is no file"),
        (["--evaluator", "a=json:no_such_function"], "has no 'no_such_function'"),
        (["--evaluator", "a=json:loads", "--evaluator", "a=json:dumps"], "a is json:loads already"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    tmp_path: Path,
    arguments: Sequence[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "new"
    status, out, err = here(monkeypatch, capsys, "run", "--insecure", "--data-dir", str(folder), *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 or err.startswith("Usage: ")  # what an option cannot mean is said with its usage
    assert said in err
    assert not folder.exists()


@pytest.mark.slow
def test_what_only_the_start_finds_is_one_line_too(folder: Path) -> None:
    done = command(
        "run",
        "--insecure",
        "--insecure-anywhere",
        "--listen",
        "256.1.1.1:0",
        "--data-dir",
        str(folder),
        "--log-level",
        "ERROR",
    )
    assert "cannot listen on 256.1.1.1:0" in only_line(done, 2)


@pytest.mark.parametrize("arguments", [["run", "--no-such-option"], ["no-such-command"], ["run", "--grace", "x"]])
def test_wrong_usage_is_plain_text(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = here(monkeypatch, capsys, *arguments)
    assert status == 2
    assert err.splitlines()[-1].startswith("Error: ")
    assert "╭" not in err


@pytest.mark.parametrize("kind", ["run --insecure", "init", "operator list", "db upgrade", "db current"])
def test_a_data_folder_that_cannot_be_made(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = here(monkeypatch, capsys, *kind.split(), "--data-dir", str(tmp_path / "file" / "data"))
    assert (status, err.count("\n")) == (2, 1)
    assert ("cannot be made" if kind in ("init", "db upgrade") else "there is no data folder") in err


@pytest.mark.slow
def test_a_data_folder_that_cannot_be_written_to(folder: Path) -> None:
    (folder / "lock").mkdir()  # even root cannot write to a folder
    assert "cannot be written to" in only_line(command("run", "--insecure", "--data-dir", str(folder)), 2)


@pytest.mark.slow
def test_a_database_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("asyncpg")
    port = free_port()
    (tmp_path / "url").write_text(f"postgresql://user:a-secret-word@127.0.0.1:{port}/x")
    url = f"@{tmp_path / 'url'}"
    status, out, err = here(monkeypatch, capsys, "db", "upgrade", "--data-dir", str(tmp_path), "--database", url)
    assert (status, out, err.count("\n")) == (1, "", 1)
    line = only_line(command("run", "--insecure", "--data-dir", str(tmp_path), "--database", url), 1)
    for said in (err, line):
        assert "a-secret-word" not in said
        assert str(port) in said


@pytest.mark.slow
@pytest.mark.fault("F29")
def test_a_database_that_was_not_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = only_line(command("run", "--insecure", "--data-dir", str(tmp_path)), 1)
    assert "run fedplat-server db upgrade" in line
    for end in ("\n", "already\n"):
        status, out, err = here(monkeypatch, capsys, "db", "upgrade", "--data-dir", str(tmp_path))
        assert (status, err) == (0, "")
        assert out.startswith("the database is at revision")
        assert out.endswith(end)
    assert here(monkeypatch, capsys, "db", "current", "--data-dir", str(tmp_path))[1].startswith("database ")


def test_the_version_and_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(monkeypatch, capsys, "--version")[1].startswith("fedplat-server ")
    assert "--evaluator" in here(monkeypatch, capsys, "run", "--help")[1]
    assert command("--version").stdout == here(monkeypatch, capsys, "--version")[1]
