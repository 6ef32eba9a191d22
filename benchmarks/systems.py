"""What can be measured in a whole round: fedplat, the limit, and what the peers' modules share."""

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
"""Rounds that are left out: processes load code then, and wait for each other."""
PATIENCE_S = 180.0
"""How long a peer may take for a round."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rounds of a model with some clients: so many, or as many as fit into the seconds, but one at least."""

    tensors: Tensors
    clients: int
    rounds: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """The seconds of each round, and the bytes of memory that the server's processes had at most."""

    seconds: list[float]
    server_rss: int


System = Callable[[Plan, Path], Sample]
"""Runs the rounds of a plan in an empty folder. Raises `FailedError`."""


def fedplat(plan: Plan, folder: Path) -> Sample:
    """As it is set up by default: TLS, updates on the disk."""
    return _fedplat(plan, folder, insecure=False)


def fedplat_insecure(plan: Plan, folder: Path) -> Sample:
    """Without TLS."""
    return _fedplat(plan, folder, insecure=True)


def _fedplat(plan: Plan, folder: Path, insecure: bool) -> Sample:
    with deploy(folder, plan.clients, insecure) as deployment:
        model = parameters(plan.tensors)
        seconds = measure(deployment, plan.clients, plan.rounds + WARM_UP, model, plan.seconds)
        return Sample(seconds[WARM_UP:], deployment.server_rss)


def raw_grpc(plan: Plan, folder: Path) -> Sample:
    """The limit: the same bytes, and nothing done with them."""
    return _raw_grpc(plan, folder, [])


def raw_grpc_tls(plan: Plan, folder: Path) -> Sample:
    """The limit of those who speak TLS."""
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        if not processes.run([BIN / "fedplat-server", "init", "--data-dir", folder, "--host", "127.0.0.1"], START_S):
            raise FailedError("no certificates could be made for the limit")
    return _raw_grpc(plan, folder, [str(folder / "pki")])


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
    """What a peer noted, a line for each model that it committed, the initial one first."""
    lines = text.splitlines(keepends=True)
    return [float(line) for line in lines if line.endswith("\n")]


def require_peers(program: str) -> Path:
    """The folder of the peers' programs. Raises `NotInstalledError` if it lacks this one."""
    folder = PEERS / "bin"
    if not (folder / program).exists():
        raise NotInstalledError(f"{program} is not installed; run `make bench-peers` (it makes .venv-peers)")
    return folder


def peers_environment(home: Path) -> dict[str, str]:
    """What processes of peers shall see: their own programs first, and a home that goes away with the run."""
    home.mkdir()
    path = f"{PEERS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **ENVIRONMENT, "HOME": str(home), "PATH": path}


def write_model(plan: Plan, path: Path) -> None:
    """Tells a peer's app which arrays its model has."""
    path.write_text(json.dumps(plan.tensors))


def watch(plan: Plan, processes: Processes, server: psutil.Process, times: Path) -> Sample:
    """Waits until a peer has noted the rounds of a plan. Raises `FailedError`."""

    def noted() -> list[float]:
        return moments(times.read_text()) if times.exists() else []

    def next_round() -> bool:
        processes.note_peak(server)
        return len(noted()) > have

    have, began = 0, time.monotonic()
    while have <= plan.rounds + WARM_UP and (have <= 1 + WARM_UP or time.monotonic() < began + plan.seconds):
        processes.wait(f"round {have}", next_round, PATIENCE_S)
        began = began if have else time.monotonic()
        have = len(noted())
    return Sample(intervals(noted())[WARM_UP:], sum(processes.peaks.values()))
