"""The cost of client-level privacy in accuracy: the 2NN on MNIST with 3,383 users, with increasing noise.

    python benchmarks/papers/private_utility.py --seeds 0 1
    python benchmarks/papers/private_utility.py --quick

There are as many users as EMNIST has in Andrew et al. 2021 (arXiv 1905.03871), with 17 or 18 images each. Poisson
sampling draws 120 of them in an average round, for 100 rounds; clipping follows the median norm. Runs differ only in
the noise; "none" still clips, and still divides by 120.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache

from reproduction import Cell, Log, Paper, Value, main, mean, play

from fedplat.privacy import Charge, Mechanism, accounting

USERS, EXPECTED, ROUNDS, DELTA = 3383, 120, 100, 1e-5
NONE = 1e-5
"""A noise multiplier of nearly nothing: the same code, without an effect."""
MULTIPLIERS = (NONE, 0.7, 1.2, 1.7, 2.4, 4.8)


def cell_name(multiplier: float) -> str:
    """Return the name of the cell with this noise."""
    return "none" if multiplier == NONE else f"z{multiplier:g}"


def cells() -> Iterator[Cell]:
    """Yield one cell for each noise multiplier."""
    for multiplier in MULTIPLIERS:
        settings = f"""
name = "private-{cell_name(multiplier)}"
population = "papers"
trainer = "papers"
rounds = {ROUNDS}
[model]
initial = "fedplat.pytorch.models:mcmahan_2nn"
[config]
epochs = 1
batch_size = 10
learning_rate = 0.1
[selection]
goal = {EXPECTED}
close = "deadline"
wait_for = 3300
sampling = {{ policy = "poisson", rate = {EXPECTED / USERS} }}
[deadlines]
selection_s = 86400
training_s = 10
upload_s = 10
[updates]
weighting = "uniform"
adaptive_clip = {{ quantile = 0.5, initial_norm = 0.1 }}
[aggregation]
rule = "fedavgm"
learning_rate = 0.2
momentum = 0.9
[privacy]
participation = "poisson"
delta = {DELTA}
noise_multiplier = {multiplier}
count_noise = {1e-3 if multiplier == NONE else EXPECTED / 20}
[evaluation]
every = 5
[simulation]
engine = "loop"
[simulation.fleet]
wait_s = 300
arrive_s = 1
[simulation.data]
source = "mnist"
[simulation.partition]
scheme = "iid"
clients = {USERS}
"""
        quick = ("rounds=2", "evaluation.every=2", "selection.wait_for=20", "selection.sampling.rate=0.2")
        yield Cell(name=cell_name(multiplier), settings=settings, quick=(*quick, "simulation.partition.clients=20"))


@cache
def epsilon(multiplier: float) -> float:
    """Return the epsilon of all rounds, by privacy loss distributions."""
    mechanism = Mechanism(kind="poisson", noise_multiplier=multiplier, sampling_probability=EXPECTED / USERS)
    return accounting.epsilon([Charge(mechanism, ROUNDS)], DELTA)


def accuracy(logs: Sequence[Log], multiplier: float) -> float | None:
    """Return the accuracy after the last round, in percent, over the seeds."""
    return mean([log.accuracies[-1] for log in logs if log.cell == cell_name(multiplier)])


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return a row for each noise multiplier."""
    found: list[tuple[Value, ...]] = []
    without = accuracy(logs, NONE)
    for multiplier in MULTIPLIERS:
        each = [log.accuracies[-1] for log in logs if log.cell == cell_name(multiplier)]
        ours = mean(each)
        shown = "not run" if ours is None else f"{ours:.1f}"
        lost = "-" if ours is None or without is None or multiplier == NONE else f"{without - ours:.1f}"
        spread = " ".join(f"{one:.1f}" for one in each) or "-"
        if multiplier == NONE:
            found.append(("none", "infinite", shown, lost, spread))
        else:
            found.append((f"{multiplier:g}", f"{epsilon(multiplier):.2f}", shown, lost, spread))
    return found


PAPER = Paper(
    name="private_utility",
    title="2NN on MNIST, 3,383 users, 120 expected a round, 100 rounds: test accuracy in percent, delta 1e-5",
    source="the setting of Andrew et al. 2021, arXiv 1905.03871",
    columns=("noise multiplier", "epsilon", "accuracy", "points lost to noise", "single runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
