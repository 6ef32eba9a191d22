"""Whole rounds with and without secure aggregation, for `secure_aggregation.py`: a real server and SDK clients."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil

import deployment
from deployment import Deployment
from fedplat.admin import submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.secure_aggregation import primitives
from fedplat.secure_aggregation.messages import SecureAggregation
from fedplat.secure_aggregation.setup import Graph
from models import alike, parameters
from processes import FailedError
from report import Report

COLUMNS = ("round", "s a round", "x without", "server, CPU s", "client, CPU s", "rounds")
CASES = {
    "without": "",
    "secure aggregation": "[updates]\nweighting = 'uniform'\nclip_norm = 1.0\n[secure_aggregation]\nstep_s = 60\n",
}
CLIENTS_A_PROCESS = 25


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of a job: their seconds, and the CPU seconds of the server and of a client in a round."""

    seconds: list[float]
    server_s: float
    client_s: float

    @property
    def median_s(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def compare(folder: Path, num_clients: int, num_parameters: int, rounds: int) -> Report:
    """Run rounds of both kinds with the same server and clients; the first round of each is omitted.

    Then run them again with clients that wait for as long as their masks take on an idle core.
    """
    mask_s = time_masks(num_clients, num_parameters)
    shared = run_cases(folder / "shared", num_clients, num_parameters, rounds)
    own = run_cases(folder / "own", num_clients, num_parameters, rounds, mask_s)
    rows = tuple(
        (f"{name}{where}", each.median_s, each.median_s / plain.median_s, each.server_s, each.client_s, rounds)
        for where, found in (("", shared), (", masks on devices", own))
        for plain in [found["without"]]
        for name, each in found.items()
        if found is shared or each is not plain
    )
    cores = len(os.sched_getaffinity(0))
    notes = (
        f"{num_clients} clients with {num_parameters / 1e6:g} M parameters on the {cores} cores of the server.",
        f"Masks on devices: a client waits {1e3 * mask_s:.0f} ms, which its masks take on an idle core, so that the "
        "clients' masks do not share the server's cores; compared with such clients' rounds without.",
    )
    return Report(name="secure_rounds", title="Rounds with secure aggregation", columns=COLUMNS, rows=rows, notes=notes)


def time_masks(num_clients: int, num_parameters: int) -> float:
    """Return the seconds that the masks of one of `num_clients` clients take on one core: the median of 5."""
    vector = np.zeros(num_parameters, np.uint32)
    keys = [os.urandom(32) for _ in range(Graph.of(SecureAggregation(), num_clients).num_peers + 1)]
    seconds: list[float] = []
    for _ in range(5):
        started = time.perf_counter()
        primitives.apply_masks(vector, 32, keys, ())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def run_cases(
    folder: Path, num_clients: int, num_parameters: int, rounds: int, mask_s: float = 0.0
) -> dict[str, Rounds]:
    """Run all `CASES` with a new server and SDK clients, which wait `mask_s` seconds instead of masking if given."""
    model = parameters(alike(4 * num_parameters))
    with deployment.serve(folder) as deployed, deployed.admin() as admin:
        for first in range(0, num_clients, CLIENTS_A_PROCESS):
            count = min(CLIENTS_A_PROCESS, num_clients - first)
            ticket = folder / f"ticket-{first}"
            ticket.write_text(admin.create_enrollment("bench", count, 600.0, deployed.address).ticket)
            program = [sys.executable, deployment.HERE / "sdk_clients.py"]
            options = [ticket, folder / f"clients-{first}", str(count), str(mask_s)]
            deployed.clients.append(deployed.processes.start(f"clients-{first}", [*program, *options]))
        deployment.wait_for_clients(deployed, admin, num_clients)
        return {name: run(deployed, num_clients, rounds + 1, model, more) for name, more in CASES.items()}


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
