"""Whole rounds with and without secure aggregation, for `secure_aggregation.py`: a real server and SDK clients."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

import deployment
from deployment import Deployment
from fedplat.cli import submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from models import alike, parameters
from processes import FailedError
from report import Report

COLUMNS = ("round", "s a round", "x without", "server, CPU s", "client, CPU s", "rounds")
CASES = {
    "without": "",
    "secure aggregation": "[updates]\nweighting = 'uniform'\nclip_norm = 1.0\n[secure_aggregation]\nstep_s = 600\n",
}
CLIENTS_A_PROCESS = 25


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of a job: their seconds, and the CPU seconds of the server and of a client in a round."""

    seconds: list[float]
    server_s: float
    client_s: float


def compare(folder: Path, num_clients: int, num_parameters: int, rounds: int) -> Report:
    """Run rounds of both kinds with the same server and clients; the first round of each is omitted."""
    model = parameters(alike(4 * num_parameters))
    with deployment.serve(folder) as deployed, deployed.admin() as admin:
        for first in range(0, num_clients, CLIENTS_A_PROCESS):
            count = min(CLIENTS_A_PROCESS, num_clients - first)
            ticket = folder / f"ticket-{first}"
            ticket.write_text(admin.create_enrollment("bench", count, 600.0, deployed.address).ticket)
            command = [
                sys.executable,
                deployment.HERE / "sdk_clients.py",
                ticket,
                folder / f"clients-{first}",
                str(count),
            ]
            deployed.clients.append(deployed.processes.start(f"clients-{first}", command))
        deployment.wait_for_clients(deployed, admin, num_clients)
        found = {name: run(deployed, num_clients, rounds + 1, model, more) for name, more in CASES.items()}
    plain = statistics.median(found["without"].seconds)
    rows = tuple(
        (name, median, median / plain, each.server_s, each.client_s, len(each.seconds))
        for name, each in found.items()
        for median in [statistics.median(each.seconds)]
    )
    note = f"{num_clients} clients with {num_parameters / 1e6:g} M parameters on the same machine as the server."
    return Report(
        name="secure_rounds", title="Rounds with secure aggregation", columns=COLUMNS, rows=rows, notes=(note,)
    )


def run(deployed: Deployment, num_clients: int, rounds: int, model: Parameters, more: str) -> Rounds:
    """Run a job; the CPU times include its first round."""
    text = deployment.JOB.format(rounds=rounds, clients=num_clients) + more
    server_s, clients_s = cpu_seconds([deployed.server]), cpu_seconds(deployed.clients)
    moments: list[float] = []
    with deployed.admin() as admin:
        job = submission.submit(admin, submission.Submission(text, parse_job(text), model))
        for event in admin.watch_job(job.job_id):
            if event.entity == "attempt" and event.to_state == "ABANDONED":
                raise FailedError(f"an attempt was abandoned: {event.reason}")
            if event.entity == "version" and not event.metrics:
                moments.append(event.unix_s)
    return Rounds(
        deployment.intervals(moments),
        (cpu_seconds([deployed.server]) - server_s) / rounds,
        (cpu_seconds(deployed.clients) - clients_s) / rounds / num_clients,
    )


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds of processes so far."""
    return sum(each.cpu_times().user + each.cpu_times().system for each in processes)
