"""Four algorithms on MNIST divided by Dirichlet(0.5) (NIID-Bench, Li et al. 2022, arXiv 2102.02079).

    python benchmarks/papers/niid_bench.py
    python benchmarks/papers/niid_bench.py --only scaffold
    python benchmarks/papers/niid_bench.py --quick

The settings and published values are those of Flower's reproduction (`baselines/niid_bench`): LeNet-5, 10 clients, all
of them in each round, 50 rounds of 10 epochs with batches of 64, SGD with a learning rate of 0.01, momentum 0.9 and
weight decay 1e-5, and FedProx with mu = 0.01. Flower applies SCAFFOLD's correction after the momentum, fedplat before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from reproduction import Cell, Log, Paper, Value, main, mean, play

# The paper weighs clients by all their examples, and its shares are very unequal.
EXACT = "[updates]\nmax_weight_factor = 0\n"
ALGORITHMS = {
    "fedavg": ("", f'{EXACT}[aggregation]\nrule = "fedavg"', 98.89),
    "scaffold": (
        'algorithm = "scaffold"',
        '[updates]\nweighting = "uniform"\n[aggregation]\nrule = "scaffold"\nnum_clients = 10',
        99.07,
    ),
    "fedprox": ('algorithm = "fedprox"\nmu = 0.01', f'{EXACT}[aggregation]\nrule = "fedavg"', 99.02),
    "fednova": ("", f'{EXACT}[aggregation]\nrule = "fednova"', 98.03),
}
NAMES = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD", "fedprox": "FedProx", "fednova": "FedNova"}


def cells() -> Iterator[Cell]:
    """Yield one cell for each algorithm."""
    for name, (config, tables, _) in ALGORITHMS.items():
        settings = f"""
name = "niid-{name}"
population = "papers"
trainer = "papers"
rounds = 50
[model]
initial = "fedplat.pytorch.models:lenet5"
[config]
epochs = 10
batch_size = 64
learning_rate = 0.01
momentum = 0.9
weight_decay = 1e-5
{config}
{tables}
[selection]
goal = 10
over_selection = 1.0
[deadlines]
training_s = 36000
[simulation]
engine = "loop"
[simulation.data]
source = "mnist"
[simulation.partition]
scheme = "dirichlet"
clients = 10
alpha = 0.5
"""
        yield Cell(name=name, settings=settings, quick=("rounds=2", "config.epochs=1", "selection.goal=2"))


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the accuracy after the last round, over the seeds."""
    found: list[tuple[Value, ...]] = []
    for name, (_, _, published) in ALGORITHMS.items():
        ends = [log.accuracies[-1] for log in logs if log.cell == name and log.accuracies]
        ours = mean(ends)
        shown = ("not run", "-") if ours is None else (f"{ours:.2f}", f"{ours - published:+.2f}")
        found.append((NAMES[name], f"{published:.2f}", *shown, len(ends)))
    return found


PAPER = Paper(
    name="niid_bench",
    title="NIID-Bench, MNIST, Dirichlet(0.5): test accuracy after 50 rounds, in percent",
    source="Li et al. 2022, arXiv 2102.02079; figures of Flower's baseline",
    columns=("algorithm", "published", "ours", "difference", "runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
