"""Rounds to a test accuracy of the 2NN and the CNN on MNIST (McMahan et al. 2017, arXiv 1602.05629, tables 1 and 2).

    python benchmarks/papers/mcmahan.py                # every cell with three learning rates: hours
    python benchmarks/papers/mcmahan.py --only 2nn-iid
    python benchmarks/papers/mcmahan.py --quick

100 clients with 600 examples, 10 of them per round. The paper tunes the learning rate of each cell on a grid of 11 to
13, a factor of 10^(1/3) or 10^(1/6) apart. Here each cell has three, a factor of 10^(1/3) apart, and the best counts.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence

from reproduction import Cell, Log, Paper, Value, main, mean, play, rounds_to

PARTITIONS = {
    "iid": 'scheme = "iid"\nclients = 100',
    "noniid": 'scheme = "shards"\nclients = 100\nshards_per_client = 2',
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A cell of the paper: local epochs E, batch size B (0: all examples), and its published rounds."""

    model: str
    partition: str
    epochs: int
    batch_size: int
    target: float
    published: int
    rates: tuple[float, ...]

    @property
    def name(self) -> str:
        """The name of the setting in the names of its logs."""
        return f"{self.model}-{self.partition}-e{self.epochs}-b{self.batch_size or 'all'}"


SETTINGS = (
    Setting("2nn", "iid", 1, 10, 97.0, 87, (0.0464, 0.1, 0.215)),
    Setting("2nn", "noniid", 1, 10, 97.0, 664, (0.0215, 0.0464, 0.1)),
    Setting("2nn", "iid", 1, 0, 97.0, 1474, (0.215, 0.464, 1.0)),
    Setting("2nn", "noniid", 1, 0, 97.0, 1796, (0.1, 0.215, 0.464)),
    Setting("cnn", "iid", 1, 10, 99.0, 34, (0.0464, 0.1, 0.215)),
    Setting("cnn", "iid", 5, 10, 99.0, 20, (0.0464, 0.1, 0.215)),
)


def cells() -> Iterator[Cell]:
    """Yield every setting with each of its learning rates. Runs end after 1.6 x the published rounds."""
    for setting in SETTINGS:
        for rate in setting.rates:
            settings = f"""
name = "{setting.name}"
population = "papers"
trainer = "papers"
rounds = {round(1.6 * setting.published)}
[model]
initial = "fedplat.pytorch.models:mcmahan_{setting.model}"
[config]
epochs = {setting.epochs}
batch_size = {setting.batch_size}
learning_rate = {rate}
[selection]
goal = 10
over_selection = 1.0
[simulation]
engine = "loop"
[simulation.data]
source = "mnist"
[simulation.partition]
{PARTITIONS[setting.partition]}
"""
            yield Cell(
                name=f"{setting.name}-lr{rate:g}",
                settings=settings,
                quick=("rounds=2", "selection.goal=2"),
                target=setting.target,
            )


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return a row for each setting: the rounds with its best learning rate, over the seeds."""
    found: list[tuple[Value, ...]] = []
    for setting in SETTINGS:
        means: dict[float, float] = {}
        tried = 0
        for rate in setting.rates:
            mine = [log for log in logs if log.cell == f"{setting.name}-lr{rate:g}"]
            tried += len(mine)
            rounds = [rounds_to(log.accuracies, setting.target) for log in mine]
            reached = [each for each in rounds if each is not None]
            if mine and len(reached) == len(mine):
                means[rate] = mean(reached) or 0.0
        rate = min(means, key=lambda each: means[each]) if means else None
        ours: Value = "not run" if not tried else "never reached"
        ratio: Value = "-"
        if rate is not None:
            ours, ratio = round(means[rate], 1), round(means[rate] / setting.published, 2)
        batch = setting.batch_size or "all"
        partition = setting.partition.replace("noniid", "non-IID").replace("iid", "IID")
        name = f"{setting.model.upper()}, {partition}, E = {setting.epochs}, B = {batch}, {setting.target:g} %"
        found.append((name, setting.published, ours, ratio, f"{rate:g}" if rate is not None else "-", tried))
    return found


PAPER = Paper(
    name="mcmahan",
    title="McMahan et al. 2017, MNIST: rounds to a test accuracy",
    source="McMahan et al. 2017, arXiv 1602.05629, tables 1 and 2",
    columns=("setting", "published rounds", "ours", "ours / published", "learning rate", "runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
