"""Measure the training of simulated clients, compared with Flower's simulation, pfl-research and a PyTorch loop.

    python benchmarks/simulation_peers.py [--only 2NN] [--device cuda] [--seconds 20] [--turns 3] [--save]

Every system has the same workload: random images of MNIST's or CIFAR-10's size, SGD in batches of 10, federated
averaging without evaluation. Each measurement is a separate process, and systems are measured in turns. All use one
thread for arithmetic per process, and keep freed memory (`MALLOC_TRIM_THRESHOLD_`), which makes convolutions much
faster. The first round is not counted; the time until its end is shown separately. The other platforms are installed
by `make bench-peers`; without them, those that this program's environment has are measured.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deployment import ENVIRONMENT, HERE
from processes import FailedError, NotInstalledError, Processes
from report import Cell, JsonOption, Report, SaveOption, finish
from systems import PEERS

KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
START_S = 120.0
"""Timeout of the first round."""
MANY = 100_000
"""The requested rounds. Each measurement ends after its time, not after these rounds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A population, and the systems to measure."""

    name: str
    model: str
    clients: int
    cohort: int
    samples: int
    systems: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """The arguments of all programs."""
        return [self.model, *map(str, (self.clients, self.cohort, self.samples, MANY))]


FLEET = ("fedplat processes", "fedplat loop", "Flower", "plain PyTorch")
RAY = ("fedplat processes", "fedplat ray")
COHORT = ("fedplat vmap", "fedplat loop", "pfl-research", "plain PyTorch")
CASES = (
    Case("2NN, 10 of 100 clients, 600 examples", "2NN", 100, 10, 600, FLEET),
    Case("2NN, 10 of 100 clients, 10 examples", "2NN", 100, 10, 10, FLEET),
    Case("LR, 50 of 100 clients, 50 examples", "LR", 100, 50, 50, COHORT),
    Case("2NN, 50 of 100 clients, 50 examples", "2NN", 100, 50, 50, COHORT),
    Case("LeNet, 50 of 100 clients, 50 examples", "LeNet", 100, 50, 50, COHORT),
)
CIFAR = Case("CIFAR-10's CNN, 50 of 1,000 clients, 50 examples", "CIFAR", 1000, 50, 50, COHORT)
"""The benchmark of pfl-research (Granqvist et al. 2024, arXiv 2404.06430): 1,500 such rounds."""
BY_NAME = (Case("2NN, 10 of 100 clients, 600 examples, through Ray", "2NN", 100, 10, 600, RAY), CIFAR)
"""Only measured on request: one requires the extra `ray`, the other a GPU or a long time."""
ON_GPU = (*(case for case in CASES if case.systems == COHORT), CIFAR)
CIFAR_ROUNDS = 1500
PROGRAMS = {
    "Flower": "flower_simulation.py",
    "pfl-research": "pfl_simulation.py",
    "plain PyTorch": "plain_simulation.py",
}
PACKAGES = {"pfl-research": "pfl", "plain PyTorch": "torch"}
"""The systems that may be in the environment of fedplat, too, and the package that shows it."""
COLUMNS = ("work", "system", "updates/s", "fedplat's best / it", "first round, s", "rounds")
CORES = "Flower and fedplat's processes use all cores, all others one."
FIRST = "First round: from the end of the imports to the end of the round, with all that has to be started."
_console = Console(stderr=True, soft_wrap=True)


class Device(enum.StrEnum):
    """Where models are trained."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds until the first round was over, and of each later one."""

    first: float
    later: tuple[float, ...]


def main(
    only: Annotated[str, typer.Option(help="Only cases with this text in their name.")] = "",
    device: Annotated[Device, typer.Option(help="Where models are trained.")] = Device.CPU,
    seconds: Annotated[float, typer.Option(min=0.5, help="Seconds of each measurement, after its first round.")] = 15.0,
    turns: Annotated[int, typer.Option(min=1, help="Number of measurements of each system.")] = 3,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure simulated training."""
    rows: list[tuple[Cell, ...]] = []
    failures: list[str] = []
    cases = ON_GPU if device is Device.CUDA else (*CASES, *BY_NAME) if only else CASES
    chosen = [case for case in cases if only.lower() in case.name.lower()]
    if not chosen:
        raise typer.BadParameter(f"no case has this name; expected one of: {'; '.join(case.name for case in cases)}")
    on = f"On the GPU: {_gpu()}." if device is Device.CUDA else CORES
    for case in chosen:
        rows += measured(case, device, seconds, turns, failures)
    notes = (on, FIRST, *whole(rows), *(f"Not measured: {failure}" for failure in dict.fromkeys(failures)))
    name, title = ("simulation-gpu", "on a GPU") if device is Device.CUDA else ("simulation-peers", "on a CPU")
    title = f"Simulated training {title}"
    finish(Report(name=name, title=title, columns=COLUMNS, rows=tuple(rows), notes=notes), as_json, save)


def _gpu() -> str:
    """Return the name of the GPU. Ends the program without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU that PyTorch can use was found; leave `--device cuda` out")
    return torch.cuda.get_device_name()


def whole(rows: Sequence[tuple[Cell, ...]]) -> list[str]:
    """Return notes with the time of pfl-research's benchmark on each system."""
    found = [(name, rate) for case, name, rate, *_ in rows if case == CIFAR.name and isinstance(rate, float)]
    times = "; ".join(f"{name} {CIFAR_ROUNDS * CIFAR.cohort / rate:,.0f} s" for name, rate in found)
    return [f"{CIFAR_ROUNDS:,} rounds of CIFAR-10's CNN would take: {times}."] if times else []


def measured(case: Case, device: Device, seconds: float, turns: int, failures: list[str]) -> list[tuple[Cell, ...]]:
    """Measure the systems of a case in turns, and return a row for each."""
    samples: dict[str, list[Sample]] = {}
    for _ in range(turns):
        for system in case.systems:
            try:
                sample = measure(case, system, device, seconds)
            except (FailedError, NotInstalledError) as exc:
                failures.append(f"{case.name}, {system}: {exc}")
                continue
            samples.setdefault(system, []).append(sample)
            rate = case.cohort / statistics.median(sample.later)
            _console.print(f"{case.name}, {system}: {rate:.1f} updates/s", markup=False)
    rates = {name: case.cohort / statistics.median(_later(found)) for name, found in samples.items()}
    best = max((rate for name, rate in rates.items() if name.startswith("fedplat")), default=0.0)
    firsts = {name: statistics.median(sample.first for sample in found) for name, found in samples.items()}
    return [
        (case.name, name, rate, best / rate, firsts[name], len(_later(samples[name]))) for name, rate in rates.items()
    ]


def measure(case: Case, system: str, device: Device, seconds: float) -> Sample:
    """Run a system for `seconds`. Raises `FailedError` or `NotInstalledError`."""
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-", ignore_cleanup_errors=True) as folder:
        own = {"HOME": folder, "TMPDIR": folder}  # Ray leaves files behind when it is killed
        environment = {**os.environ, **ENVIRONMENT, **KEEP, "FLWR_TELEMETRY_ENABLED": "0", **own}
        if device is Device.CPU:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # every system uses a visible GPU
        with Processes(Path(folder), environment) as processes:
            processes.start("simulation", command(case, system))
            log = Path(folder) / "simulation.log"
            processes.wait("the first round", lambda: len(moments(log)) > 2, START_S)
            end = time.monotonic() + seconds
            processes.wait("rounds", lambda: time.monotonic() > end, seconds + START_S)
            start, *rounds = moments(log)
    later = tuple(after - before for before, after in itertools.pairwise(rounds))
    return Sample(rounds[0] - start, later)


def command(case: Case, system: str) -> list[str | Path]:
    """Return the command that runs a case on a system."""
    if system.startswith("fedplat"):
        return [sys.executable, HERE / "simulated_fedplat.py", system.split()[1], *case.arguments]
    python = PEERS / "bin" / "python"
    if not python.exists():
        if not _is_installed(system):
            raise NotInstalledError(
                "the other platforms are not installed; run `make bench-peers` (it creates .venv-peers)"
            )
        python = sys.executable
    return [python, HERE / "peers" / PROGRAMS[system], *case.arguments]


def _is_installed(system: str) -> bool:
    """Return whether this program's own environment has what a system needs."""
    return system in PACKAGES and importlib.util.find_spec(PACKAGES[system]) is not None


def moments(log: Path) -> list[float]:
    """Read the times of the program's start and of the end of each round."""
    lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
    return [json.loads(line)["time"] for line in lines if line.startswith('{"event"') and line.endswith("}\n")]


def _later(samples: list[Sample]) -> list[float]:
    return [second for sample in samples for second in sample.later]


if __name__ == "__main__":
    typer.run(main)
