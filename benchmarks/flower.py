"""Rounds of Flower: a SuperLink and SuperNodes, plaintext; state in memory (the fastest option) or in a file."""

from __future__ import annotations

from pathlib import Path

from deployment import HERE, START_S
from processes import Processes, free_port, is_open
from systems import Plan, Sample, peers_environment, require_peers, watch, write_model

APP = HERE / "peers" / "flower_app"
CONFIG = """
[superlink]
default = "bench"

[superlink.bench]
address = "{address}"
insecure = true
"""


def flower(plan: Plan, folder: Path) -> Sample:
    """Measure Flower as in its deployment guide, with `--insecure`. A new process handles each message."""
    return _flower(plan, folder, [])


def flower_sqlite(plan: Plan, folder: Path) -> Sample:
    """Measure Flower with its state in SQLite, for deployments that must keep it."""
    return _flower(plan, folder, ["--database", str(folder / "state.db")])


def _flower(plan: Plan, folder: Path, state: list[str]) -> Sample:
    bin_ = require_peers("flower-superlink")
    home = folder / "home"
    environment = {**peers_environment(home), "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    port = free_port()
    address = f"127.0.0.1:{port}"
    (home / "config.toml").write_text(CONFIG.format(address=address))
    write_model(plan, folder / "model.json")
    times = folder / "times.txt"
    with Processes(folder, environment) as processes:
        link = [bin_ / "flower-superlink", "--insecure", "--port", str(port)]
        server = processes.start("superlink", [*link, "--disable-runtime-dependency-installation", *state])
        processes.wait("the SuperLink", lambda: is_open(port), START_S)
        for number in range(plan.clients):
            node = [bin_ / "flower-supernode", "--insecure", "--superlink", address, "--port", str(free_port())]
            processes.start(f"supernode-{number}", node)
        config = f'model="{folder / "model.json"}" times="{times}"'
        config += f" rounds={plan.rounds + 1} clients={plan.clients}"
        submit = [bin_ / "flwr", "run", APP, "bench", "--run-config", config]
        processes.wait("`flwr run`", lambda: processes.run(submit, START_S), START_S)
        return watch(plan, processes, server, times)
