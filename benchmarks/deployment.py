"""A real deployment on this machine, for benchmarks: a server daemon and client processes over loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import psutil

from fedplat.admin import AdminClient, profile, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from processes import FailedError, Processes, free_port

BIN = Path(sys.executable).parent
HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
"""Environment of all processes, of fedplat and of other platforms: they share few cores."""
START_S = 120.0
LIGHT_PROCESSES = 4
JOB = """
name = "noop"
population = "bench"
trainer = "noop"
rounds = {rounds}
[model]
initial = "noop.safetensors"
[selection]
goal = {clients}
over_selection = 1.0
min_fraction = 1.0
[deadlines]
training_s = 3600
upload_s = 3600
heartbeat_s = 600
"""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A server with waiting clients."""

    address: str
    folder: Path
    processes: Processes
    server: psutil.Process
    is_insecure: bool = False
    clients: list[psutil.Process] = dataclasses.field(default_factory=list[psutil.Process])
    population: str = "bench"

    def admin(self) -> AdminClient:
        """Connect as an operator with the role admin."""
        operator = profile.load(self.folder / "admin.toml")
        if self.is_insecure:
            operator = msgspec.structs.replace(operator, ca="", insecure=True)
        return AdminClient(operator)

    @property
    def server_rss(self) -> int:
        """The peak memory of the server, in bytes."""
        self.processes.note_peak(self.server)
        return sum(self.processes.peaks.values())


@contextlib.contextmanager
def serve(
    folder: Path,
    insecure: bool = False,
    options: Sequence[str] = (),
    port: int | None = None,
    counted: bool = False,
    host: str = "127.0.0.1",
) -> Generator[Deployment]:
    """Start a server with more `options` at an address of this machine; end it and its other processes afterwards.

    A folder that a server has used before needs its `port`. If `counted`, it runs in `metered.py`, with the counts in
    `server.counts`. Raises `FailedError` if it does not start.
    """
    port = port or free_port()
    address = f"{host}:{port}"
    server = BIN / "fedplat-server"
    folder.mkdir(parents=True, exist_ok=True)
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        init = [server, "init", "--data-dir", folder, "--host", host, "--port", str(port)]
        if not processes.run(init, START_S):
            raise FailedError(f"the server could not be set up: {(folder / 'commands.log').read_text()[-600:]}")
        run = [
            *_program("fedplat-server", folder / "server.counts", counted),
            "run",
            "--listen",
            address,
            "--data-dir",
            folder,
            "--log-level",
            "warning",
        ]
        daemon = processes.start("server", [*run, *(["--insecure"] if insecure else []), *options])
        deployment = Deployment(address, folder, processes, daemon, insecure)
        with deployment.admin() as admin:
            admin.wait_until_ready(START_S)
        yield deployment


def _program(name: str, counts: Path, counted: bool) -> list[str | Path]:
    return [sys.executable, HERE / "metered.py", counts, name] if counted else [BIN / name]


@contextlib.contextmanager
def deploy(
    folder: Path, num_clients: int, insecure: bool = False, options: Sequence[str] = (), counted: bool = False
) -> Generator[Deployment]:
    """Start a server with more `options` and no-op client processes; end them afterwards. Raises `FailedError`.

    If `counted`, all run in `metered.py`, with the counts in `server.counts` and `client-0.counts` and so on.
    """
    with serve(folder, insecure, options, counted=counted) as deployment, deployment.admin() as admin:
        ticket = folder / "ticket"
        ticket.write_text(admin.create_enrollment("bench", num_clients, 600.0, deployment.address).ticket)
        for index in range(num_clients):
            program = _program("fedplat-client", folder / f"client-{index}.counts", counted)
            client = [*program, "run", "--ticket-file", ticket, "--trainer", "noop=noop:train"]
            client += ["--data-dir", folder / f"client-{index}", "--log-level", "warning"]
            deployment.clients.append(deployment.processes.start(f"client-{index}", client, HERE))
        wait_for_clients(deployment, admin, num_clients)
        yield deployment


def wait_for_clients(deployment: Deployment, admin: AdminClient, num_clients: int) -> None:
    """Wait until `num_clients` clients have checked in. Raises `FailedError`."""
    deployment.processes.wait("clients", lambda: admin.status().num_waiting >= num_clients, START_S)


@contextlib.contextmanager
def deploy_light(folder: Path, num_clients: int, counted: bool = False) -> Generator[Deployment]:
    """Start a server and light clients, many in a process; end them afterwards. Raises `FailedError`.

    If `counted`, the server runs in `metered.py`.
    """
    with serve(folder, counted=counted) as deployment, deployment.admin() as admin:
        count = min(LIGHT_PROCESSES, num_clients)
        for number in range(count):
            share = len(range(number, num_clients, count))
            ticket = folder / f"ticket-{number}"
            ticket.write_text(admin.create_enrollment("bench", share, 600.0, deployment.address).ticket)
            command = [sys.executable, HERE / "light_clients.py", ticket, str(share)]
            deployment.processes.start(f"clients-{number}", command)
        wait_for_clients(deployment, admin, num_clients)
        yield deployment


def measure(
    deployment: Deployment,
    clients: int,
    rounds: int,
    model: Parameters,
    seconds: float = float("inf"),
    least: int = 2,
) -> list[float]:
    """Run no-op rounds. Returns the seconds from each committed version to the next, from the server's history.

    Stops after `rounds`, or after `seconds`, but not before `least` rounds.
    """
    text = JOB.format(rounds=rounds, clients=clients)
    deadline = time.monotonic() + seconds
    moments: list[float] = []
    with deployment.admin() as admin:
        job = submission.submit(admin, submission.Submission(text, parse_job(text), model))
        for event in admin.watch_job(job.job_id):
            if event.entity == "job" and event.to_state == "RUNNING":
                moments = [event.unix_s]
            if event.entity == "version" and not event.metrics and moments:
                moments.append(event.unix_s)
            if len(moments) > least and time.monotonic() > deadline:
                break
    return intervals(moments)


def intervals(moments: Sequence[float]) -> list[float]:
    """Return the time from each moment to the next."""
    return [after - before for before, after in itertools.pairwise(moments)]
