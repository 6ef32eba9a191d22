"""A job whose clients add fixed vectors, and the model that it ends with, in every version."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Generator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.admin import AdminClient
from fedplat.model import Parameters
from support import process_logs, processes, releases
from support.jobs import write_job

TRAINER = Path(__file__).parent / "trainer.py"
SIZE = 16
LARGE = 100_000
"""Entries of a model whose updates are too large for a report; its job has no codec."""
HUGE = 25_000_000
"""Entries of a model of 100 MB."""
NUM_CLIENTS = 2


def write_project(folder: Path, name: str, population: str, rounds: int, size: int = SIZE) -> Path:
    """Write a job file and its initial model; the path of the job file.

    The rule has a momentum and the codec leaves values to later rounds, so that server and clients keep states.
    """
    tables: dict[str, Any] = {}
    if size < LARGE:
        tables["compression"] = {"uplink": {"codec": "topk", "fraction": 0.25, "values": "fp32"}}
    folder.mkdir(parents=True, exist_ok=True)
    text = write_job(
        name,
        population=population,
        trainer="add",
        rounds=rounds,
        selection={"goal": NUM_CLIENTS, "min_fraction": 1.0},
        aggregation={"rule": "fedavgm", "momentum": 0.5},
        deadlines={"heartbeat_s": 0.5},
        retry={"base_s": 0.1},
        **tables,
    )
    (folder / "unused.safetensors").write_bytes(initial_model(size).to_bytes())
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def initial_model(size: int = SIZE) -> Parameters:
    return Parameters.from_arrays({"weight": np.zeros(size, np.float32)})


def expected_model(rounds: int, size: int = SIZE) -> Parameters:
    """What the job computes, by its definition."""
    steps = [np.arange(1, size + 1) * (number + 1) / 64 for number in range(NUM_CLIENTS)]
    omitted = [np.zeros(size) for _ in steps]
    model, velocity = np.zeros(size), np.zeros(size)
    for _ in range(rounds):
        sent: list[npt.NDArray[np.float64]] = []
        for number, step in enumerate(steps):
            update = step + omitted[number]
            num_kept = size if size == LARGE else size // 4
            kept = np.sort(np.argsort(-np.abs(update), kind="stable")[:num_kept])
            sent.append(np.zeros(size))
            sent[-1][kept] = update[kept]
            omitted[number] = update - sent[-1]
        velocity = 0.5 * velocity + np.mean(sent, axis=0)
        model = model + velocity
    assert np.array_equal(model, model.astype(np.float32))
    return Parameters.from_arrays({"weight": model.astype(np.float32)})


def expected_huge_model() -> Parameters:
    """What the job of a huge model computes in its first round."""
    mean = np.mean([number + 1 for number in range(NUM_CLIENTS)]) / 64
    return Parameters.from_arrays({"weight": (np.arange(1, HUGE + 1) % 2**20 * mean).astype(np.float32)})


def digest_of(model: Parameters) -> str:
    """The digest of a model's file."""
    return sha256(model.to_bytes()).hexdigest()


def submit(cli: releases.Release, profile: Path, server: str, job: Path) -> list[dict[str, Any]]:
    """Submit a job with the command of a version, and follow it to its end; its model versions."""
    options = ["--profile", str(profile), "--server", server]
    cli.run("fedplat", *options, "job", "submit", str(job))
    cli.run("fedplat", *options, "job", "watch", job.stem)  # releases name the option of submit differently
    return json.loads(cli.run("fedplat", *options, "model", "list", job.stem, "--json"))


def enroll(admin: AdminClient, population: str, address: str) -> str:
    """A ticket of one client."""
    return admin.create_enrollment(population, 1, 3600.0, address).ticket


def start_client(
    release: releases.Release, number: int, folder: Path, ticket: str, *options: str
) -> subprocess.Popen[bytes]:
    """Start a client process of a version. Its folder has its identity, models and states."""
    folder.mkdir(parents=True, exist_ok=True)
    command = release.command("fedplat-client", "run", "--trainer", f"add={TRAINER}:train", "--data-dir", str(folder))
    environment = releases.environment(FEDPLAT_TICKET=ticket, CLIENT_NUMBER=str(number), OMP_NUM_THREADS="1")
    with process_logs.open_log(folder.parent / f"{folder.name}.log") as log:
        return subprocess.Popen([*command, *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


@contextlib.contextmanager
def stopped_at_the_end(clients: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    """Stop the clients that still run; each must end without an error."""
    try:
        yield
    finally:
        for client in clients:
            if client.poll() is None:
                client.terminate()
        statuses = [client.wait(processes.PATIENCE_S) for client in clients]
    assert not any(statuses), statuses
