"""FedNTD beside FedAvg with two shards of sorted data for each client (Lee et al. 2022, arXiv 2106.03097), on MNIST.

    python benchmarks/papers/not_true_distillation.py --seeds 0 1 2
    python benchmarks/papers/not_true_distillation.py --quick

The setting is that of the paper's sharding with s = 2: 100 clients, 10 per round, 5 epochs with batches of 50, SGD with
momentum 0.9, weight decay 1e-5 and a learning rate that falls by 1 % each round; beta = tau = 1. The paper states a
learning rate of 0.1; the default of its published code is 0.01. The paper trains McMahan's CNN for 200 rounds, on
pictures that its code crops, flips and covers in part at random (`augmented.py`): the cells `published-...` run the
first 50 of these rounds. In the other cells the 2NN learns the unchanged pictures. The client's half is a plugin,
`examples/plugins/fedntd.py`.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence

from reproduction import Cell, Log, Paper, Value, format_gains, format_runs, main, play

FEDNTD = 'algorithm = "../../examples/plugins/fedntd.py:FedNTD"'
ALGORITHMS = {"fedavg": ("FedAvg", ""), "fedntd": ("FedNTD", FEDNTD)}
LEARNING_RATES = (0.1, 0.01)
PUBLISHED_ALGORITHMS = {"fedavg": "AugmentedSgd", "fedntd": "AugmentedNotTrueDistillation"}
PUBLISHED_RATE = 0.01
"""The default of the published code; with the paper's 0.1 the network stays at 10 % from the first round on."""
LAST = (25, 10, 1)
"""Numbers of rounds at the end whose mean accuracy is compared: single rounds fall by up to twenty points."""


def cells() -> Iterator[Cell]:
    """Yield one cell for each learning rate and algorithm."""
    for rate, name in itertools.product(LEARNING_RATES, ALGORITHMS):
        yield _make_cell(f"{name}-{rate}", "fedplat.pytorch.models:mcmahan_2nn", rate, ALGORITHMS[name][1])


def published_cells() -> Iterator[Cell]:
    """Yield one cell for each algorithm in the paper's setting."""
    for name, algorithm in PUBLISHED_ALGORITHMS.items():
        config = f'algorithm = "augmented.py:{algorithm}"'
        yield _make_cell(f"published-{name}", "augmented.py:network", PUBLISHED_RATE, config)


def _make_cell(name: str, model: str, rate: float, config: str) -> Cell:
    settings = f"""
name = "not-true-{name}"
population = "papers"
trainer = "papers"
rounds = 50
[model]
initial = "{model}"
[config]
epochs = 5
batch_size = 50
learning_rate = {rate}
learning_rate_decay = 0.99
momentum = 0.9
weight_decay = 1e-5
{config}
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
scheme = "shards"
clients = 100
"""
    return Cell(name=name, settings=settings, quick=("rounds=2", "selection.goal=2"))


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the mean accuracy of the last rounds and the gain over FedAvg with the same seed, over the seeds."""
    settings = [("", "2NN", rate) for rate in LEARNING_RATES] + [("published-", "the paper's network and pictures", "")]
    found: list[tuple[Value, ...]] = []
    for (prefix, setting, rate), (name, (label, _)) in itertools.product(settings, ALGORITHMS.items()):
        suffix = f"-{rate}" if rate else ""
        row: list[Value] = [
            f"{label}, {setting}, learning rate {rate or PUBLISHED_RATE}",
            "-" if name == "fedavg" else "above FedAvg",
        ]
        ours: dict[int, float] = {}
        for last in LAST:
            base = _ends(logs, f"{prefix}fedavg{suffix}", last)
            ours = _ends(logs, f"{prefix}{name}{suffix}", last)
            row += [format_runs([*ours.values()]), "-" if name == "fedavg" else format_gains(ours, base)]
        found.append((*row, len(ours)))
    return found


def _ends(logs: Sequence[Log], cell: str, last: int) -> dict[int, float]:
    """Return the mean accuracy of the last rounds of each run, by its seed."""
    return {log.seed: statistics.mean(log.accuracies[-last:]) for log in logs if log.cell == cell}


PAPER = Paper(
    name="not_true_distillation",
    title="Two shards for each client: mean test accuracy on MNIST in percent",
    source="Lee et al. 2022, arXiv 2106.03097",
    columns=(
        "algorithm",
        "published",
        "rounds 26 to 50",
        "gain",
        "rounds 41 to 50",
        "gain",
        "round 50",
        "gain",
        "runs",
    ),
    cells=(*cells(), *published_cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
