"""Measure whole rounds, compared with Flower, NVFlare, and raw gRPC with the same bytes.

    python benchmarks/whole_rounds.py [--all] [--model 100MB] [--clients 10] [--system fedplat] [--save]

Real server and client processes run over loopback, without training. A round lasts from one committed model to the
next. Systems are measured in turns: fedplat and the limits before, between and after the other platforms, which take
minutes. `make bench-peers` installs the other platforms; missing ones are omitted. The first round after each start is
not counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flare import nvflare, nvflare_tuned
from flower import flower, flower_sqlite
from models import MODELS
from processes import FailedError, NotInstalledError
from report import Cell, JsonOption, Report, SaveOption, finish
from systems import Plan, Sample, System, fedplat, fedplat_insecure, raw_grpc, raw_grpc_tls

OURS: dict[str, System] = {
    "fedplat": fedplat,
    "fedplat --insecure": fedplat_insecure,
    "limit": raw_grpc,
    "limit, TLS": raw_grpc_tls,
}
PEERS: dict[str, System] = {
    "Flower": flower,
    "Flower, SQLite": flower_sqlite,
    "NVFlare": nvflare,
    "NVFlare tuned": nvflare_tuned,
}
SYSTEMS = OURS | PEERS
BARS = (("100MB", 10), ("ResNet-50", 2), ("one-tensor", 2), ("4KB", 4))
"""The rounds with a performance goal, with the number of clients."""
ALL_CLIENTS = (2, 4, 10)
TURNS = 3
ONE_TENSOR = "one-tensor"
"""The model to compare fedplat's ResNet-50 with. Other platforms are not measured with it."""
COLUMNS = ("round", "system", "s a round", "x fedplat", "x limit", "x limit, TLS", "server MiB", "rounds")
NOTES = (
    'Median of the rounds. fedplat keeps updates on the disk (`durability = "spool"`) and syncs each version; '
    "Flower keeps its state in memory, or in a file of SQLite, and NVFlare syncs nothing.",
    "fedplat and NVFlare's POC mode use TLS by default, Flower does not; the limit is measured with and without. "
    "NVFlare tuned: its polling intervals at 0.01 s instead of 0.5 to 2 s.",
    "Server MiB: the sum of the peaks of the server's processes.",
)
Rounds = tuple[str, int]
_console = Console(stderr=True, soft_wrap=True)


@dataclasses.dataclass
class Budget:
    """The time and the number of rounds to measure."""

    rounds: int
    seconds: float
    end: float

    def plan(self, rounds: Rounds, turns: int) -> Plan:
        """Return the plan of one of `turns` turns of a system."""
        model, clients = rounds
        return Plan(MODELS[model], clients, math.ceil(self.rounds / turns), self.seconds / turns)


@dataclasses.dataclass
class Measured:
    """The measurements of all systems in one kind of round."""

    samples: dict[str, list[Sample]]
    failures: list[str]

    def seconds(self, system: str) -> list[float]:
        """Return the seconds of all rounds of a system."""
        return [second for sample in self.samples.get(system, []) for second in sample.seconds]

    def median(self, system: str) -> float | None:
        """Return the median seconds of a round, or None without measurements."""
        seconds = self.seconds(system)
        return statistics.median(seconds) if seconds else None


def main(  # noqa: PLR0913 -- one parameter for each option of the command line
    everything: Annotated[bool, typer.Option("--all", help="All models with 2, 4 and 10 clients.")] = False,
    models: Annotated[list[str] | None, typer.Option("--model", help=f"Of {', '.join(MODELS)}; repeatable.")] = None,
    clients: Annotated[list[int] | None, typer.Option("--clients", min=2, help="With --model; repeatable.")] = None,
    systems: Annotated[list[str] | None, typer.Option("--system", help=f"Of {', '.join(SYSTEMS)}; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Maximum number of rounds of each system.")] = 12,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds for the rounds of each system; at least one round is measured.")
    ] = 24.0,
    minutes: Annotated[float, typer.Option(help="Time limit; no measurement starts after it.")] = 15.0,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure whole rounds without training."""
    for option, names, known in (("--model", models, MODELS), ("--system", systems, SYSTEMS)):
        for name in names or ():
            if name not in known:
                raise typer.BadParameter(f"{name!r} is unknown; expected one of {', '.join(known)}", param_hint=option)
    kinds: Sequence[Rounds] = BARS
    if everything or models or clients:
        kinds = list(itertools.product(models or MODELS, clients or ALL_CLIENTS))
    limit_s = math.inf if everything else 60.0 * minutes
    budget = Budget(rounds, seconds, time.monotonic() + limit_s)
    measured = {kind: measure(kind, systems or list(SYSTEMS), budget) for kind in kinds}
    finish(report(measured), as_json, save)


def measure(rounds: Rounds, systems: Sequence[str], budget: Budget, times: int = TURNS) -> Measured:
    """Measure systems in turns."""
    measured = Measured({}, [])
    order = list(turns([name for name in systems if rounds[0] != ONE_TENSOR or name in OURS], times))
    for name in order:
        if time.monotonic() > budget.end:
            measured.failures.append(f"{label(rounds)}, from {name} on: no time was left (--minutes)")
            break
        sample = attempt(name, budget.plan(rounds, order.count(name)), measured, rounds)
        if sample is None:
            continue
        measured.samples.setdefault(name, []).append(sample)
        median, count = statistics.median(sample.seconds), len(sample.seconds)
        _console.print(f"{label(rounds)}, {name}: {median:.3f} s a round, {count} rounds", markup=False)
    return measured


def attempt(name: str, plan: Plan, measured: Measured, rounds: Rounds) -> Sample | None:
    """Measure a system, and try again if that fails, because Flower loses tasks with processes that start slowly."""
    for is_last in (False, True):
        try:
            with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
                return SYSTEMS[name](plan, Path(folder))
        except NotInstalledError as exc:
            measured.failures.append(f"{label(rounds)}, {name}: {exc}")
            break
        except FailedError as exc:
            failure = f"{label(rounds)}, {name}: {exc}"
            _console.print(failure, style="red", markup=False)
            if is_last:
                measured.failures.append(failure)
    return None


def turns(systems: Sequence[str], times: int) -> Iterator[str]:
    """Return the order of measurements: ours `times` times, around and between the others, which are measured once."""
    ours = [name for name in systems if name in OURS]
    peers = [name for name in systems if name in PEERS]
    for turn in range(times):
        yield from ours
        yield from peers[:1] if turn < times - 2 else peers
        peers = peers[1:] if turn < times - 2 else []


def label(rounds: Rounds) -> str:
    """Describe a kind of round."""
    return f"{rounds[0]}, {rounds[1]} clients"


def report(measured: dict[Rounds, Measured]) -> Report:
    """Return the report, with a row for each system in each kind of round."""
    rows = [row(rounds, name, found) for rounds, found in measured.items() for name in SYSTEMS if name in found.samples]
    failures = [failure for found in measured.values() for failure in found.failures]
    notes = [*NOTES, *_tensors(measured), *(f"Not measured: {failure}" for failure in failures)]
    return Report(name="whole-rounds", title="Whole rounds", columns=COLUMNS, rows=tuple(rows), notes=tuple(notes))


def row(rounds: Rounds, system: str, measured: Measured) -> tuple[Cell, ...]:
    """Return the row of a system."""
    median = measured.median(system)
    ratios: list[Cell] = []
    for base in ("fedplat", "limit", "limit, TLS"):
        other = measured.median(base)
        ratios.append(median / other if median is not None and other else None)
    memory = max(sample.server_rss for sample in measured.samples[system]) / 2**20
    return label(rounds), system, median, *ratios, round(memory), len(measured.seconds(system))


def _tensors(measured: dict[Rounds, Measured]) -> Iterator[str]:
    for (model, clients), found in measured.items():
        one_tensor = measured.get((ONE_TENSOR, clients))
        if model == "ResNet-50" and one_tensor is not None:
            many, one = found.median("fedplat"), one_tensor.median("fedplat")
            if many and one:
                yield f"{label((model, clients))}: {many / one:.2f} x the time of one tensor of equal bytes."


if __name__ == "__main__":
    typer.run(main)
