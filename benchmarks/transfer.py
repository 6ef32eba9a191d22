"""Measure the download of models by clients, and the upload of updates to the server.

    python benchmarks/transfer.py [--clients 10] [--model-bytes 100000000] [--repeat 5]

The benchmark runs a real `fedplat-server` process and client processes, with all parts of a transfer: signatures,
SHA-256 at both ends, the model in the client's cache, the update in the server's spool. In turns with them it sends the
same bytes through bare streams of `grpc.aio`, and through one TCP connection. A direction lasts from the start of all
clients until the last is done. CPU seconds include all threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import report
from deployment import HERE, JOB, Deployment, serve
from fedplat.admin import submission
from fedplat.job import parse_job
from fedplat.model import Parameters

GB = 1e9


@dataclasses.dataclass(frozen=True)
class End:
    """A process of `transfer_ends.py`."""

    process: subprocess.Popen[str]

    def read(self) -> str:
        """Read the next line of its output. Exits if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark ended; see above")
        return line.strip()

    def start(self, direction: str) -> None:
        """Start a transfer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{direction}\n")
        self.process.stdin.flush()


@dataclasses.dataclass(frozen=True)
class Side:
    """A server and its clients, ready for transfers."""

    name: str
    server_pid: int
    clients: Sequence[End]

    def move(self, direction: str, num_clients: int) -> tuple[float, float, float]:
        """Transfer the model to, or an update from, `num_clients` clients.

        Returns the seconds, and the CPU seconds of the server and of the clients.
        """
        busy = self.clients[:num_clients]
        before, began = cpu_seconds(self.server_pid), time.perf_counter()
        for end in busy:
            end.start(direction)
        spent = sum(json.loads(end.read())["cpu_s"] for end in busy)
        return time.perf_counter() - began, cpu_seconds(self.server_pid) - before, spent


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Network:
    """Where servers listen, and the command that starts a client's process if it is in another network."""

    host: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


LOOPBACK = Network()


@contextlib.contextmanager
def ends(role: str, arguments: Sequence[Sequence[object]], enter: Sequence[str] = ()) -> Generator[list[End]]:
    """Run processes of one role, by the command `enter`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
    program = [*enter, sys.executable, str(HERE / "transfer_ends.py"), role]
    running: list[subprocess.Popen[str]] = []
    try:
        for each in arguments:
            command = [*program, *map(str, each)]
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))
        yield [End(process) for process in running]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            with process:
                pass


@contextlib.contextmanager
def sides(
    folder: Path, tls: bool, clients: int, size: int, chunk: int, network: Network = LOOPBACK
) -> Generator[list[Side]]:
    """Start fedplat, raw gRPC and (without TLS, or over a network) TCP, all of them ready."""
    host, enter = network.host, network.enter
    with contextlib.ExitStack() as stack:
        deployment = stack.enter_context(serve(folder, insecure=not tls, host=host))
        pki = folder / "pki"
        fedplat = stack.enter_context(working(deployment, clients, size, enter))
        found = [Side("fedplat", deployment.server.pid, fedplat)]
        shown = [pki / "server.key", pki / "server.pem"] if tls else ["", ""]
        (server,) = stack.enter_context(ends("raw-server", [[host, size, chunk, *shown]]))
        raw = [[f"{host}:{server.read()}", size, chunk, pki / "ca.pem" if tls else ""]] * clients
        found.append(Side("raw gRPC", server.process.pid, stack.enter_context(ready("raw-client", raw, enter))))
        if enter or not tls:
            (server,) = stack.enter_context(ends("tcp-server", [[host, size, chunk]]))
            tcp = [[host, int(server.read()), size, chunk]]
            found.append(Side("raw TCP", server.process.pid, stack.enter_context(ready("tcp-client", tcp, enter))))
        yield found


@contextlib.contextmanager
def ready(role: str, arguments: Sequence[Sequence[object]], enter: Sequence[str] = ()) -> Generator[list[End]]:
    """Run processes, and wait until they are ready."""
    with ends(role, arguments, enter) as started:
        for end in started:
            assert end.read() == "ready"
        yield started


@contextlib.contextmanager
def working(
    deployment: Deployment, clients: int, size: int, enter: Sequence[str] = (), transports: Sequence[str] = ("grpc",)
) -> Generator[list[End]]:
    """Run clients of fedplat, each with an assignment; so many for each of these transports."""
    over = [transport for transport in transports for _ in range(clients)]
    clients = len(over)
    model = Parameters.from_arrays({"weight": np.zeros(size // 4, np.float32)})
    text = JOB.format(rounds=1, clients=clients)
    ticket = deployment.folder / "ticket"
    with deployment.admin() as admin:
        enrollment = admin.create_enrollment(deployment.population, clients, 600.0, deployment.address)
        ticket.write_text(enrollment.ticket)
        submission.submit(admin, submission.Submission(text, parse_job(text), model))
        folders = [deployment.folder / f"client-{index}" for index in range(clients)]
        arguments = [[ticket, folder, transport] for folder, transport in zip(folders, over, strict=True)]
        with ready("fedplat-client", arguments, enter) as started:
            yield started


def measure(tls: bool, clients: int, size: int, chunk: int, repeat: int) -> list[tuple[report.Cell, ...]]:
    """Return one row for each side, direction and number of clients."""
    rows: list[tuple[report.Cell, ...]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        sides(Path(folder), tls, clients, size, chunk) as found,
    ):
        for direction in ("down", "up"):
            for count in dict.fromkeys((1, clients)):
                active = [side for side in found if len(side.clients) >= count]
                for side in active:
                    side.move(direction, count)
                runs = [[side.move(direction, count) for side in active] for _ in range(repeat)]
                medians = [
                    [statistics.median(values) for values in zip(*run, strict=True)] for run in zip(*runs, strict=True)
                ]
                limit_s = medians[[side.name for side in active].index("raw gRPC")][0]
                volume = count * size / GB
                for side, (wall_s, server_s, client_s) in zip(active, medians, strict=True):
                    security = "TLS" if tls else "plain"
                    key = (f"{direction}, {count} client{'s' * (count > 1)}", security, side.name)
                    cost = (volume / wall_s, server_s / volume, client_s / volume)
                    rows.append((*key, *cost, wall_s / limit_s))
    return rows


def main(
    clients: Annotated[int, typer.Option(min=1, help="Number of client processes.")] = 10,
    model_bytes: Annotated[int, typer.Option(min=4, help="Size of the model, float32.")] = 100_000_000,
    chunk_bytes: Annotated[int, typer.Option(min=1, help="Chunk of the raw streams.")] = 2**20,
    repeat: Annotated[int, typer.Option(min=1, max=3, help="Number of measurements; the median is shown.")] = 3,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure downloads and uploads, of one client and of several at once, compared with the limits of the machine."""
    one = functools.partial(measure, clients=clients, size=model_bytes, chunk=chunk_bytes, repeat=repeat)
    columns = ("what", "security", "by", "GB/s", "server CPU s/GB", "client CPU s/GB", "x raw gRPC")
    rows = [*one(False), *one(True)]
    title = f"Models of {model_bytes / 1e6:g} MB down to clients, updates up"
    answer = report.Report(name="transfer", title=title, columns=columns, rows=tuple(rows))
    report.finish(answer, as_json, save)


if __name__ == "__main__":
    typer.run(main)
