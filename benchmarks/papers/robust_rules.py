"""Robust rules under three attacks on MNIST (Karimireddy et al. 2022, arXiv 2006.09365, the table of Section 6).

    python benchmarks/papers/robust_rules.py
    python benchmarks/papers/robust_rules.py --only alie
    python benchmarks/papers/robust_rules.py --quick

25 workers, 5 of them attackers; the others have the training images sorted by label, 3,000 each. 600 steps with
batches of 32, a learning rate of 0.01 and worker momentum 0.9. RFA has 8 iterations with smoothing 0.1, centered
clipping 3 with radius 100. That is 10 / (1 - momentum): the logs of the published code (experiments 3 and 6) have
the table's numbers for this radius, though the default of its command is 10. Bucketing has s = 2. Models are scored
every 30 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from reproduction import Cell, Log, Observe, Paper, Value, main, mean

from fedplat.simulation import RunFolderOptions
from fedplat.simulation.api import execute
from fedplat.simulation.clients import build_fleet
from fedplat.simulation.data import sources
from fedplat.simulation.data.sources import SourcePaths, data_folder
from fedplat.simulation.run import Simulation
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.setup import RunSetup

NUM_GOOD, NUM_BAD = 20, 5
RULES = {
    "clipping": '{ name = "centered-clipping", radius = 100.0, iterations = 3 }',
    "rfa": '{ name = "geometric-median", smoothing = 0.1, iterations = 8 }',
}
NAMES = {"clipping": "centered clipping", "rfa": "RFA"}
ATTACKS = {"alie": "ALIE", "bit-flip": "bit-flip", "ipm": "IPM"}
BEFORE = {"plain": "", "bucketing": 'before = [{ name = "bucketing", size = 2 }]'}
PUBLISHED = {
    ("clipping", "alie"): (98.04, 98.03),
    ("clipping", "bit-flip"): (97.65, 97.68),
    ("clipping", "ipm"): (97.63, 97.66),
    ("rfa", "alie"): (11.37, 91.66),
    ("rfa", "bit-flip"): (82.77, 96.78),
    ("rfa", "ipm"): (13.49, 95.90),
}


def cells() -> Iterator[Cell]:
    """Yield every rule under every attack, without and with bucketing."""
    for rule, attack in PUBLISHED:
        for before, table in BEFORE.items():
            settings = f"""
name = "{rule}-{attack}-{before}"
population = "papers"
trainer = "papers"
rounds = 600
config = {{ attack = "{attack}" }}
[model]
initial = "workers:network"
[selection]
goal = {NUM_GOOD + NUM_BAD}
over_selection = 1.0
min_fraction = 1.0
[updates]
weighting = "uniform"
[aggregation]
rule = "fedavg"
learning_rate = 0.01
[robust]
byzantine = {NUM_BAD}
rule = {RULES[rule]}
{table}
[evaluation]
every = 30
[simulation]
engine = "loop"
"""
            yield Cell(name=f"{rule}-{attack}-{before}", settings=settings, quick=("rounds=2", "evaluation.every=2"))


def play(file: SimulationFile, observe: Observe, run_folder: RunFolderOptions) -> None:
    """Run a cell with the engine of `workers`."""
    from workers import Workers

    seed, spec = file.simulation.seed, file.job
    place = SourcePaths(Path.cwd(), data_folder(), np.random.default_rng(seed))
    data = sources.Mnist(scale="standard").load(place)
    engine = Workers(data, NUM_GOOD, NUM_BAD, str(spec.config["attack"]), 0.9, seed)
    fleet = build_fleet(file.simulation.fleet, seed, engine.num_clients)
    simulation = Simulation(spec=spec, fleet=fleet, engine=engine, initial=engine.initial, seed=seed)
    execute(file, RunSetup(simulation, None, "workers", 1), observe, run_folder)


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the mean accuracy of the last three scores, over the seeds."""
    found: list[tuple[Value, ...]] = []
    for (rule, attack), published in PUBLISHED.items():
        row: list[Value] = [f"{NAMES[rule]}, {ATTACKS[attack]}"]
        for before, figure in zip(BEFORE, published, strict=True):
            mine = [log for log in logs if log.cell == f"{rule}-{attack}-{before}"]
            ours = mean([end for log in mine if (end := mean(log.accuracies[-3:])) is not None])
            row += [f"{figure:.2f}", "not run" if ours is None else f"{ours:.2f}"]
        found.append(tuple(row))
    return found


PAPER = Paper(
    name="robust_rules",
    title="Karimireddy et al. 2022, MNIST, 5 attackers of 25: test accuracy after 600 steps, in percent",
    source="Karimireddy et al. 2022, arXiv 2006.09365, Section 6",
    columns=("rule, attack", "published", "ours", "published, bucketing", "ours, bucketing"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
