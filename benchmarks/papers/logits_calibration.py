"""FedLC beside FedAvg under label skew (Zhang et al. 2022, arXiv 2209.00189), with MNIST in place of CIFAR-10.

    python benchmarks/papers/logits_calibration.py --seeds 0 1 2
    python benchmarks/papers/logits_calibration.py --quick

The heterogeneity is that of the paper's quantity-based skew with two classes for each client, and training is that of
Flower's reproduction of it (`baselines/fedlc`): 20 clients, all of them in each round, one epoch with batches of 128,
SGD with a learning rate of 0.01, sorted shards, two for each client. The published values are Flower's, for CIFAR-10
after 1,000 rounds with a small CNN; here the 2NN learns MNIST for 50 rounds. The client's half is a
plugin, `examples/plugins/fedlc.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from reproduction import Cell, Log, Paper, Value, format_gains, format_runs, main, play

FEDLC = 'algorithm = "../../examples/plugins/fedlc.py:FedLC"\ntau = '
ALGORITHMS = {
    "fedavg": ("FedAvg", "", 64.10),
    "fedlc-0.5": ("FedLC, tau = 0.5", f"{FEDLC}0.5", 65.24),
}


def cells() -> Iterator[Cell]:
    """Yield one cell for each algorithm."""
    for name, (_, config, _) in ALGORITHMS.items():
        settings = f"""
name = "label-skew-{name}"
population = "papers"
trainer = "papers"
rounds = 50
[model]
initial = "fedplat.pytorch.models:mcmahan_2nn"
[config]
epochs = 1
batch_size = 128
learning_rate = 0.01
{config}
[selection]
goal = 20
over_selection = 1.0
[deadlines]
training_s = 36000
[simulation]
engine = "loop"
[simulation.data]
source = "mnist"
[simulation.partition]
scheme = "shards"
clients = 20
"""
        yield Cell(name=name, settings=settings, quick=("rounds=2", "selection.goal=2"))


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the accuracy after the last round and the gain over FedAvg with the same seed, over the seeds."""
    found: list[tuple[Value, ...]] = []
    base = _ends(logs, "fedavg")
    for name, (label, _, published) in ALGORITHMS.items():
        ends = _ends(logs, name)
        gain = "-" if name == "fedavg" else format_gains(ends, base)
        theirs = "-" if name == "fedavg" else f"{published - ALGORITHMS['fedavg'][2]:+.2f}"
        found.append((label, f"{published:.2f}", theirs, format_runs([*ends.values()]), gain, len(ends)))
    return found


def _ends(logs: Sequence[Log], cell: str) -> dict[int, float]:
    """Return the accuracy after the last round of each run, by its seed."""
    return {log.seed: log.accuracies[-1] for log in logs if log.cell == cell and log.accuracies}


PAPER = Paper(
    name="logits_calibration",
    title="Two classes for each client: test accuracy in percent, published on CIFAR-10, ours on MNIST after 50 rounds",
    source="Zhang et al. 2022, arXiv 2209.00189; values of Flower's baseline",
    columns=("algorithm", "published, CIFAR-10", "gain", "ours, MNIST", "gain", "runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
