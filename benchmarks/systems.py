"""The systems of `whole_rounds.py`: fedplat, the limit, and the code that Flower and NVFlare share."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import limit
from deployment import BIN, ENVIRONMENT, HERE, START_S, deploy, intervals, measure
from models import Tensors, parameters, size_bytes
from processes import FailedError, NotInstalledError, Processes, free_port

PEERS = HERE.parent / ".venv-peers"
WARM_UP = 1
"""Rounds that are not counted: processes load code and wait for each other."""
PATIENCE_S = 180.0
"""Timeout of a round of another platform."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rounds of a model with some clients: at most `rounds`, and as many as fit into `seconds`, but at least one."""

    tensors: Tensors
    clients: int
    rounds: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """The seconds of each round, and the peak memory of the server's processes in bytes."""

    seconds: list[float]
    server_rss: int


System = Callable[[Plan, Path], Sample]
"""Runs the rounds of a plan in an empty folder. Raises `FailedError`."""


def fedplat(plan: Plan, folder: Path) -> Sample:
    """Measure fedplat with default settings: TLS, updates on the disk."""
    return _fedplat(plan, folder, insecure=False)


def fedplat_insecure(plan: Plan, folder: Path) -> Sample:
    """Measure fedplat without TLS."""
    return _fedplat(plan, folder, insecure=True)


def _fedplat(plan: Plan, folder: Path, insecure: bool) -> Sample:
    with deploy(folder, plan.clients, insecure) as deployment:
        model = parameters(plan.tensors)
        seconds = measure(deployment, plan.clients, plan.rounds + WARM_UP, model, plan.seconds)
        return Sample(seconds[WARM_UP:], deployment.server_rss)


def raw_grpc(plan: Plan, folder: Path) -> Sample:
    """Measure the limit: the same bytes, without processing."""
    return _raw_grpc(plan, folder, [])


def raw_grpc_tls(plan: Plan, folder: Path) -> Sample:
    """Measure the limit with TLS."""
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        pki = create_certificates(processes, folder)
    return _raw_grpc(plan, folder, [str(pki)])


def create_certificates(processes: Processes, folder: Path) -> Path:
    """Create the certificates with which the limit uses TLS, and return their folder. Raises `FailedError`."""
    if not processes.run([BIN / "fedplat-server", "init", "--data-dir", folder, "--host", "127.0.0.1"], START_S):
        raise FailedError("the certificates of the limit could not be created")
    return folder / "pki"


def _raw_grpc(plan: Plan, folder: Path, pki: list[str]) -> Sample:
    port, size = str(free_port()), str(size_bytes(plan.tensors))
    program = [sys.executable, str(Path(limit.__file__))]
    serve = [*program, "serve", port, size, str(plan.clients), str(plan.rounds + WARM_UP), str(plan.seconds), *pki]
    log = folder / "server.log"
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        server = processes.start("server", serve)
        workers = Processes(folder, {**os.environ, **ENVIRONMENT})
        with workers:
            for number in range(plan.clients):
                workers.start(f"client-{number}", [*program, "work", port, size, *pki])
            deadline = time.monotonic() + START_S + 2 * plan.seconds
            while server.poll() is None and time.monotonic() < deadline:
                processes.note_peak(server)
                time.sleep(0.05)
    seconds = intervals(moments(log.read_text()))[WARM_UP:]
    if not seconds:
        raise FailedError(f"the limit could not be measured: {log.read_text()[-600:]}")
    return Sample(seconds, sum(processes.peaks.values()))


def moments(text: str) -> list[float]:
    """Parse the times that a platform has written, first in a line per committed model, the initial one first."""
    lines = text.splitlines(keepends=True)
    return [float(line.split()[0]) for line in lines if line.endswith("\n")]


def require_peers(program: str) -> Path:
    """Return the folder of the other platforms' programs. Raises `NotInstalledError` if `program` is missing."""
    folder = PEERS / "bin"
    if not (folder / program).exists():
        raise NotInstalledError(f"{program} is not installed; run `make bench-peers` (it creates .venv-peers)")
    return folder


def peers_environment(home: Path) -> dict[str, str]:
    """Return the environment of other platforms: their programs first in PATH, and a temporary home folder."""
    home.mkdir()
    path = f"{PEERS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **ENVIRONMENT, "HOME": str(home), "PATH": path}


def write_model(plan: Plan, path: Path) -> None:
    """Write the arrays of the model for a platform's app."""
    path.write_text(json.dumps(plan.tensors))


def watch(plan: Plan, processes: Processes, server: psutil.Process, times: Path) -> Sample:
    """Wait until a platform has completed the rounds of a plan. Raises `FailedError`."""

    def read_times() -> list[float]:
        return moments(times.read_text()) if times.exists() else []

    def next_round() -> bool:
        processes.note_peak(server)
        return len(read_times()) > have

    have, began = 0, time.monotonic()
    while have <= plan.rounds + WARM_UP and (have <= 1 + WARM_UP or time.monotonic() < began + plan.seconds):
        processes.wait(f"round {have}", next_round, PATIENCE_S)
        began = began if have else time.monotonic()
        have = len(read_times())
    return Sample(intervals(read_times())[WARM_UP:], sum(processes.peaks.values()))
