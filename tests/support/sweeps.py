"""Sweep files on a tiny simulation of digits, and outcomes made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from fedplat.sweep.plan import Configuration, Objective, Outcome, Stopping
from fedplat.sweep.pool import SweepPool
from fedplat.sweep.schedule import ChooseBatch, Evaluated, RunKey, RunPart, schedule
from fedplat.sweep.worker import DoneReply, PartRequest, WorkerReply

BASE = """\
# equal clients
name = "digits" # the job
population = "demo"
trainer = "digits"
rounds = 6

[model]
initial = "fedplat.pytorch.models:digits_2nn"

[config]
epochs = 1
batch_size = 32
learning_rate = 0.3 # of SGD

[selection]
goal = 3

[simulation]
target = 0.3

[simulation.data]
source = "digits"

[simulation.partition]
scheme = "iid"
clients = 30
"""

GRID = """\
base = "base.toml"
seeds = [0, 1]

[grid]
"config.learning_rate" = [0.003, 1.0]
"config.epochs" = [1, 3]
"""

HALVING = '\n[stopping]\nrule = "halving"\nrounds = [2, 4]\n'

SEARCH = """\
base = "base.toml"

[search]
trials = 6
batch = 2

[search.parameters]
"config.learning_rate" = { kind = "log", low = 1e-4, high = 1.0 }
"""


def write_sweep(folder: Path, text: str = GRID, base: str = BASE) -> Path:
    (folder / "base.toml").write_text(base)
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def outcome(values: Sequence[float | None], until: int = 0, **more: float) -> Outcome:
    """Values of rounds 1, 2 and so on, ten virtual seconds each."""
    rounds = list(range(1, len(values) + 1))
    status = "RUNNING" if until else "COMPLETED"
    at_s = [10.0 * number for number in rounds]
    return Outcome(until=until, status=status, rounds=rounds, at_s=at_s, values=list(values), **more)


Curve = Callable[[Configuration, int], Sequence[float | None]]
"""Returns the values of all rounds of a run, given its seed."""


def drive(
    choose: ChooseBatch, seeds: Sequence[int], objective: Objective, curve: Curve, stopping: Stopping | None = None
) -> tuple[list[list[RunPart]], list[Evaluated]]:
    """Runs a schedule with outcomes from a function; returns all stages, and what was evaluated."""
    stages: list[list[RunPart]] = []
    work = schedule(choose, seeds, objective, stopping)
    found: Mapping[RunKey, Outcome] | None = None
    while True:
        try:
            parts = next(work) if found is None else work.send(found)
        except StopIteration as end:
            return stages, end.value
        stages.append(parts)
        found = {part.key: _run(curve(part.configuration, part.seed), part.until) for part in parts}


def _run(values: Sequence[float | None], until: int) -> Outcome:
    return outcome(values[:until], until) if 0 < until < len(values) else outcome(values)


class FakePool(SweepPool):
    """Answers at once, in the reverse order, with outcomes that `write` puts into the folder of the runs."""

    def __init__(self, write: Callable[[PartRequest], None]) -> None:
        self.write = write
        self.requests: list[PartRequest] = []

    @override
    def compute(self, requests: Sequence[PartRequest]) -> Iterator[tuple[PartRequest, WorkerReply]]:
        self.requests += requests
        for request in reversed(requests):
            self.write(request)
            yield request, DoneReply()

    @override
    def close(self) -> None:
        pass
