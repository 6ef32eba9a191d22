"""FedProx with 90 % stragglers on MNIST (Li et al. 2020, arXiv 1812.06127, figure 1, the row of 90 %).

    python benchmarks/papers/fedprox_stragglers.py
    python benchmarks/papers/fedprox_stragglers.py --quick

Logistic regression, 1,000 clients with two digits each and sizes by a power law, 10 per round, 100 rounds of 10 epochs
with batches of 10 and a learning rate of 0.03. Nine of ten assignments have time for only a part of their steps, drawn
uniformly. FedAvg drops them, FedProx uses their partial work. As in the authors' code (`data/mnist/generate_niid.py`),
each pixel is standardized over all 70,000 images, and a tenth of every client's examples is the test set.

The authors' code has the same number of stragglers in every round. Here each assignment is one with probability 0.9,
and a round with ten stragglers is tried again, so that on average one and a half clients remain. FedAvg with exactly
one client, the result of dropping nine of ten in the authors' code, is a separate cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from reproduction import Cell, Log, Observe, Paper, Value, main, mean

from fedplat.simulation import RunFolderOptions, simulate
from fedplat.simulation.data import Dataset, Federation, partitioners, sources
from fedplat.simulation.data.sources import SourcePaths, data_folder
from fedplat.simulation.scenario.file import SimulationFile

VARIANTS = {
    "fedavg-drops": ('algorithm = "sgd"\npartial_work = false', "0.60 to 0.72"),
    "fedavg-one": ('algorithm = "sgd"', "0.60 to 0.72"),
    "fedprox-mu0": ('algorithm = "sgd"\npartial_work = true', "-"),
    "fedprox-mu2": ('algorithm = "fedprox"\nmu = 2.0\npartial_work = true', "0.82 to 0.86"),
}
NAMES = {
    "fedavg-drops": "FedAvg, drops stragglers",
    "fedavg-one": "FedAvg, one client a round",
    "fedprox-mu0": "mu = 0, keeps their partial work",
    "fedprox-mu2": "FedProx, mu = 2, keeps their partial work",
}


def cells() -> Iterator[Cell]:
    """Yield one cell for each variant."""
    for name, (config, _) in VARIANTS.items():
        goal, stragglers = (1, 0.0) if name == "fedavg-one" else (10, 0.9)
        settings = f"""
name = "{name}"
population = "papers"
trainer = "papers"
rounds = 100
[model]
initial = "fedplat.pytorch.models:logistic_regression"
[config]
epochs = 10
batch_size = 10
learning_rate = 0.03
{config}
[selection]
goal = {goal}
over_selection = 1.0
min_fraction = 0.1
[updates]
max_weight_factor = 0 # the paper weighs clients by all their examples
outlier_factor = 0
[retry]
base_s = 0.1
max_s = 0.1
[simulation]
engine = "loop"
[simulation.fleet]
stragglers = {stragglers}
"""
        yield Cell(name=name, settings=settings)


def federation(seed: int) -> Federation:
    """Return the paper's data. Raises `DataError` if MNIST is not in the data folder."""
    rng = np.random.default_rng(seed)
    mnist = sources.Mnist().load(SourcePaths(Path.cwd(), data_folder(), rng))
    inputs = np.concatenate([mnist.inputs, mnist.test_inputs])
    inputs = (inputs - inputs.mean(axis=0)) / (inputs.std(axis=0) + 0.001 / 255)
    targets = np.concatenate([mnist.targets, mnist.test_targets])
    whole = Dataset.from_arrays(inputs.astype(np.float32), targets)
    shuffled = [rng.permutation(part) for part in partitioners.FedProx().split(whole, rng)]
    kept = [int(0.9 * len(part)) for part in shuffled]
    test = np.concatenate([part[count:] for part, count in zip(shuffled, kept, strict=True)])
    parts = [part[:count] for part, count in zip(shuffled, kept, strict=True)]
    return Federation(whole.inputs, whole.targets, parts, whole.inputs[test], whole.targets[test])


def play(file: SimulationFile, observe: Observe, run_folder: RunFolderOptions) -> None:
    """Run a cell on that data."""
    simulate(file, data=federation(file.simulation.seed), observe=observe, run_folder=run_folder)


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the final accuracy, as the mean of the last ten rounds, over the seeds."""
    found: list[tuple[Value, ...]] = []
    for name, (_, published) in VARIANTS.items():
        mine = [log for log in logs if log.cell == name]
        ends = [end for log in mine if (end := mean(log.accuracies[-10:])) is not None]
        best = [max(log.accuracies) for log in mine if log.accuracies]
        ours = mean(ends)
        shown = "not run" if ours is None else f"{ours / 100:.3f}"
        highest = mean(best)
        found.append((NAMES[name], published, shown, "-" if highest is None else f"{highest / 100:.3f}", len(mine)))
    return found


PAPER = Paper(
    name="fedprox_stragglers",
    title="Li et al. 2020 (FedProx), MNIST with 90 % stragglers: test accuracy after 100 rounds",
    source="Li et al. 2020, arXiv 1812.06127, figure 1",
    columns=("algorithm", "published", "ours, last 10 rounds", "ours, best round", "runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
