"""Measure unmodified Flower apps on fedplat and on Flower, side by side in one run.

    python benchmarks/flower_apps.py [--only TEXT] [--save]

Deployed: a server and clients as processes over loopback, rounds of the no-op app of `peers/flower_app`, with TLS on
fedplat and without on Flower, as its guide starts it. A round lasts from one aggregated model to the next. Simulated:
1,000 clients answer a no-op message in each round; and the PyTorch app of `examples/flower/digits`, 10 clients, 3
rounds, from the start of the command to its end. Flower simulates on Ray. The systems take turns, and each number is a
median. `make bench-peers` installs Flower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deployment import BIN, ENVIRONMENT, HERE, START_S, intervals, serve, wait_for_clients
from flower import APP, CONFIG, flower
from models import MODELS
from processes import FailedError, Processes, free_port, is_open
from report import Cell, JsonOption, Report, SaveOption, finish
from systems import (
    PATIENCE_S,
    WARM_UP,
    Plan,
    Sample,
    System,
    moments,
    peers_environment,
    require_peers,
    watch,
    write_model,
)

NAME = "noop-flower"
DIGITS = HERE.parent / "examples" / "flower" / "digits"
SIMULATED_CLIENTS = 1000
SIMULATED_ROUNDS = 3
TURNS = 3
COLUMNS = ("app", "system", "seconds", "x fedplat", "goal", "measurements")
NOTES = (
    "Deployed: seconds of a round. fedplat writes each update, each version and the app's checkpoint to the disk; "
    "Flower keeps its state in memory.",
    "Simulated: 1,000 no-op clients, seconds of a round without the first one; digits, seconds of the whole command, "
    "with 10 clients, 3 rounds and evaluations.",
)
Run = Callable[[Path], list[float]]
_console = Console(stderr=True, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An app on both systems, and how many times faster fedplat should be."""

    name: str
    systems: Mapping[str, Run]
    goal: float


def _deployed(model: str, clients: int, goal: float, rounds: int, seconds: float) -> Comparison:
    plan = Plan(MODELS[model], clients, rounds, seconds)

    def measure(system: System, folder: Path) -> list[float]:
        return system(plan, folder).seconds

    systems = {
        "fedplat": functools.partial(measure, fedplat_flower),
        "Flower": functools.partial(measure, flower),
    }
    return Comparison(f"deployed, {model}, {clients} clients", systems, goal)


def fedplat_flower(plan: Plan, folder: Path) -> Sample:
    """Measure the rounds of the no-op app as a job of a fedplat server, with default settings."""
    write_model(plan, folder / "model.json")
    times = folder / "times.txt"
    with serve(folder, options=("--flower-app", f"{NAME}={APP}")) as deployment, deployment.admin() as admin:
        ticket = folder / "ticket"
        ticket.write_text(admin.create_enrollment("bench", plan.clients, 600.0, deployment.address).ticket)
        for index in range(plan.clients):
            client = [BIN / "fedplat-client", "flower", APP, "--ticket-file", ticket, "--log-level", "warning"]
            deployment.processes.start(f"client-{index}", [*client, "--data-dir", folder / f"client-{index}"])
        wait_for_clients(deployment, admin, plan.clients)
        submit = [BIN / "fedplat", "--profile", folder / "admin.toml", "flower", "run", APP, "--no-follow"]
        submit += ["--server", deployment.address, "--population", "bench", *_config(plan, folder, times)]
        if not deployment.processes.run(submit, START_S):
            raise FailedError(f"the app could not be submitted: {(folder / 'commands.log').read_text()[-600:]}")
        return watch(plan, deployment.processes, deployment.server, times)


def _config(plan: Plan, folder: Path, times: Path) -> list[str]:
    values = {"model": folder / "model.json", "times": times, "rounds": plan.rounds + 1, "clients": plan.clients}
    return [text for name, value in values.items() for text in ("--run-config", f"{name}={value}")]


def simulate_noop(folder: Path) -> list[float]:
    """Measure rounds of the no-op app with simulated clients, on fedplat."""
    plan = Plan(MODELS["4KB"], SIMULATED_CLIENTS, SIMULATED_ROUNDS, math.inf)
    write_model(plan, folder / "model.json")
    times = folder / "times.txt"
    command = [
        BIN / "fedplat",
        "flower",
        "run",
        APP,
        "--num-clients",
        str(SIMULATED_CLIENTS),
        "--dir",
        folder / "out",
    ]
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        if not processes.run([*command, *_config(plan, folder, times)], PATIENCE_S):
            raise FailedError((folder / "commands.log").read_text()[-600:])
    return _read_rounds(times)


def simulate_noop_on_ray(folder: Path) -> list[float]:
    """Measure rounds of the no-op app with simulated clients, on Flower with Ray."""
    plan = Plan(MODELS["4KB"], SIMULATED_CLIENTS, SIMULATED_ROUNDS, math.inf)
    write_model(plan, folder / "model.json")
    times = folder / "times.txt"
    values = {"model": folder / "model.json", "times": times, "rounds": plan.rounds + 1, "clients": plan.clients}
    quoted = {name: f'"{value}"' if isinstance(value, Path) else value for name, value in values.items()}
    config = " ".join(f"{name}={value}" for name, value in quoted.items())
    with _simulate_on_ray(folder, APP, SIMULATED_CLIENTS, ["--run-config", config]) as processes:
        processes.wait("the rounds", lambda: len(_read_times(times)) > plan.rounds + 1, 10 * PATIENCE_S)
    return _read_rounds(times)


def simulate_digits(folder: Path) -> list[float]:
    """Measure the digits app with simulated clients from start to end, on fedplat."""
    command = [BIN / "fedplat", "flower", "run", DIGITS, "--dir", folder / "out"]
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        began = time.monotonic()
        if not processes.run(command, PATIENCE_S):
            raise FailedError((folder / "commands.log").read_text()[-600:])
        return [time.monotonic() - began]


def simulate_digits_on_ray(folder: Path) -> list[float]:
    """Measure the digits app with simulated clients from start to end, on Flower with Ray."""
    began = time.monotonic()
    with _simulate_on_ray(folder, DIGITS, 10, []) as processes:
        processes.wait("the end", (folder / "final_model.pt").exists, 2 * PATIENCE_S)
        return [time.monotonic() - began]


def await_first_round(folder: Path) -> list[float]:
    """Measure the seconds from the start of the digits app to the last reply of its first round, on fedplat."""
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        began = time.monotonic()
        processes.start("run", [BIN / "fedplat", "flower", "run", DIGITS, "--dir", folder / "out"])
        log = folder / "run.log"
        processes.wait("the first round", lambda: "\nround 1 " in log.read_text(), PATIENCE_S)
        return [time.monotonic() - began]


@contextlib.contextmanager
def _simulate_on_ray(folder: Path, app: Path, clients: int, options: list[str]) -> Generator[Processes]:
    """Give an app to a SuperLink that simulates on Ray; end it afterwards. Raises `FailedError`."""
    bin_, home = require_peers("flower-superlink"), folder / "home"
    environment = {**peers_environment(home), "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    port = free_port()
    address = f"127.0.0.1:{port}"
    (home / "config.toml").write_text(CONFIG.format(address=address))
    app = shutil.copytree(app, folder / "app")  # `flwr run` may change an app's pyproject.toml
    with Processes(folder, environment) as processes:
        link = [bin_ / "flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        processes.start("superlink", [*link, "--host", "127.0.0.1", "--port", str(port)])
        processes.wait("the SuperLink", lambda: is_open(port), START_S)
        federation = f"num-supernodes={clients} client-resources-num-cpus=1 client-resources-num-gpus=0.0"
        run = [bin_ / "flwr", "run", app, "bench", "--federation-config", federation, *options]
        if not processes.run(run, START_S):
            raise FailedError(f"`flwr run`: {(folder / 'commands.log').read_text()[-600:]}")
        yield processes


def _read_times(times: Path) -> list[float]:
    return moments(times.read_text()) if times.exists() else []


def _read_rounds(times: Path) -> list[float]:
    """Return the seconds of each round but the first."""
    return intervals(_read_times(times))[WARM_UP:]


COMPARISONS = (
    _deployed("4KB", 4, goal=20.0, rounds=30, seconds=60.0),
    _deployed("100MB", 10, goal=3.0, rounds=3, seconds=60.0),
    _deployed("ResNet-50", 2, goal=5.0, rounds=6, seconds=60.0),
    Comparison("simulated, 1,000 no-op clients", {"fedplat": simulate_noop, "Flower": simulate_noop_on_ray}, 20.0),
    Comparison("simulated, digits, 10 clients", {"fedplat": simulate_digits, "Flower": simulate_digits_on_ray}, 2.0),
    Comparison("simulated, digits, to the end of round 1", {"fedplat": await_first_round}, 1.0),
)


def _compare(comparison: Comparison, turns: int) -> list[tuple[Cell, ...]]:
    """Measure the systems in turns; return a row for each, with the ratio to fedplat."""
    seconds: dict[str, list[float]] = {name: [] for name in comparison.systems}
    for turn in range(turns):
        for name, run in comparison.systems.items():
            with tempfile.TemporaryDirectory(prefix="fedplat-flower-") as folder:
                seconds[name] += run(Path(folder))
            _console.print(f"{comparison.name}, turn {turn + 1}, {name}: {statistics.median(seconds[name]):.3g} s")
    ours = statistics.median(seconds["fedplat"])
    return [
        (comparison.name, name, found := statistics.median(each), found / ours, _goal(comparison, name), len(each))
        for name, each in seconds.items()
    ]


def _goal(comparison: Comparison, name: str) -> Cell:
    return None if name == "fedplat" else comparison.goal


def main(
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only the apps with this text in their line.")] = "",
    turns: Annotated[int, typer.Option(min=1, help="How often each system is measured.")] = TURNS,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure unmodified Flower apps on fedplat and on Flower."""
    rows = [row for each in COMPARISONS if only in each.name for row in _compare(each, turns)]
    report = Report(name="flower_apps", title="Unmodified Flower apps", columns=COLUMNS, rows=tuple(rows), notes=NOTES)
    finish(report, as_json, save)


if __name__ == "__main__":
    typer.run(main)
