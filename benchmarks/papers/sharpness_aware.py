"""FedSAM beside FedAvg with one class for each client (Caldarola et al. 2022, arXiv 2203.11834), on MNIST.

    python benchmarks/papers/sharpness_aware.py --seeds 0 1 2
    python benchmarks/papers/sharpness_aware.py --quick

The setting is that of the paper's most heterogeneous experiment (alpha = 0): 100 clients with one class each, 5 per
round, one epoch with batches of 64, SGD with a learning rate of 0.01, and the mean accuracy of the last 100 rounds. The
paper trains a CNN on CIFAR-10 for 10,000 rounds and finds FedSAM above FedAvg; here the 2NN learns MNIST for 300. The
client's half is a plugin, `examples/plugins/fedsam.py`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence

from reproduction import Cell, Log, Paper, Value, format_gains, format_runs, main, play

LAST = 100
FEDSAM = 'algorithm = "../../examples/plugins/fedsam.py:FedSAM"\nrho = '
ALGORITHMS = {
    "fedavg": ("FedAvg", ""),
    "fedsam-0.05": ("FedSAM, rho = 0.05", f"{FEDSAM}0.05"),
    "fedsam-0.1": ("FedSAM, rho = 0.1", f"{FEDSAM}0.1"),
    "fedsam-0.5": ("FedSAM, rho = 0.5", f"{FEDSAM}0.5"),
}


def cells() -> Iterator[Cell]:
    """Yield one cell for each algorithm."""
    for name, (_, config) in ALGORITHMS.items():
        settings = f"""
name = "one-class-{name}"
population = "papers"
trainer = "papers"
rounds = 300
[model]
initial = "fedplat.pytorch.models:mcmahan_2nn"
[config]
epochs = 1
batch_size = 64
learning_rate = 0.01
{config}
[selection]
goal = 5
over_selection = 1.0
[deadlines]
training_s = 36000
[simulation]
engine = "loop"
[simulation.data]
source = "mnist"
[simulation.partition]
scheme = "classes"
clients = 100
classes_per_client = 1
"""
        yield Cell(name=name, settings=settings, quick=("rounds=2", "selection.goal=2"))


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the mean accuracy of the last rounds and the gain over FedAvg with the same seed, over the seeds."""
    found: list[tuple[Value, ...]] = []
    base = _ends(logs, "fedavg")
    for name, (label, _) in ALGORITHMS.items():
        ends = _ends(logs, name)
        gain = "-" if name == "fedavg" else format_gains(ends, base)
        published = "above FedAvg" if name == "fedsam-0.1" else "-"
        found.append((label, published, format_runs([*ends.values()]), gain, len(ends)))
    return found


def _ends(logs: Sequence[Log], cell: str) -> dict[int, float]:
    """Return the mean accuracy of the last rounds of each run, by its seed."""
    return {log.seed: statistics.mean(log.accuracies[-LAST:]) for log in logs if log.cell == cell}


PAPER = Paper(
    name="sharpness_aware",
    title="One class for each client: mean test accuracy of rounds 201 to 300 on MNIST, in percent",
    source="Caldarola et al. 2022, arXiv 2203.11834",
    columns=("algorithm", "published, CIFAR-10", "ours, MNIST", "gain", "runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
