"""Noise of clients compared with noise of the server: the 2NN on MNIST with 3,383 users, at the same epsilon.

    python benchmarks/papers/distributed_noise.py --seeds 0 1 2
    python benchmarks/papers/distributed_noise.py --quick

As many users as EMNIST has in Andrew et al. 2021 (arXiv 1905.03871), with 17 or 18 images each. Each round draws 300 of
them, and the server knows which (`participation = "fixed"`), so both promises are about the same thing and no sampling
hides anyone. The runs of an epsilon differ only in who adds the noise: the server, to the sum of updates that it sees
(Gaussian), or the clients, each a part (Skellam, `trust = "none"`), with whole numbers that are rotated, rounded and
added modulo 2^32. The noise of clients is enough for 270 survivors; in "drop-outs" 2 % of the clients go offline
in each step, so that the sum of the others has less noise than it could.

Keys and masks are left out (`simulation.secure_aggregation = "model"`), which changes no result: masks cancel out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from reproduction import Cell, Log, Paper, Value, format_runs, main, mean, play

from fedplat.job import calibrate, find_mechanism

USERS, GOAL, ROUNDS, DELTA, CLIP = 3383, 300, 8, 1e-5, 0.5
EPSILONS = (8.0,)
SERVER, CLIENTS, DROP_OUTS = "server", "clients", "drop-outs"
KINDS = (SERVER, CLIENTS, DROP_OUTS)


def cell_name(kind: str, epsilon: float) -> str:
    """Return the name of a cell."""
    return f"{kind}-{epsilon:g}"


def cells() -> Iterator[Cell]:
    """Yield one cell for each epsilon and each kind of noise."""
    for epsilon in EPSILONS:
        for kind in KINDS:
            yield make_cell(kind, epsilon)


def make_cell(kind: str, epsilon: float) -> Cell:
    """Return a cell."""
    secure = "" if kind == SERVER else "[secure_aggregation]\nmodulus = 32\nbits = 22\n"
    settings = f"""
name = "noise-{cell_name(kind, epsilon)}"
population = "papers"
trainer = "papers"
rounds = {ROUNDS}
[model]
initial = "fedplat.pytorch.models:mcmahan_2nn"
[config]
epochs = 5
batch_size = 10
learning_rate = 0.1
[selection]
goal = {GOAL}
over_selection = 1.0
min_fraction = 0.9
close = "deadline"
[deadlines]
selection_s = 86400
training_s = 10
upload_s = 10
[updates]
weighting = "uniform"
clip_norm = {CLIP}
[aggregation]
rule = "fedavgm"
learning_rate = 1.0
momentum = 0.5
{secure}[privacy]
trust = "{"server" if kind == SERVER else "none"}"
participation = "fixed"
epsilon = {epsilon}
delta = {DELTA}
[simulation]
engine = "loop"
secure_aggregation = "model"
[simulation.fleet]
wait_s = 300
arrive_s = 1
drops_out = {0.02 if kind == DROP_OUTS else 0.0}
[simulation.data]
source = "mnist"
[simulation.partition]
scheme = "iid"
clients = {USERS}
"""
    quick = ("rounds=2", "selection.goal=20", "privacy.epsilon=100", "simulation.partition.clients=40")
    return Cell(name=cell_name(kind, epsilon), settings=settings, quick=quick)


def accuracies(logs: Sequence[Log], kind: str, epsilon: float) -> list[float]:
    """Return the test accuracies after the last round, in percent, one for each seed."""
    return [log.accuracies[-1] for log in logs if log.cell == cell_name(kind, epsilon)]


def noise_multiplier(cell: Cell) -> float:
    """Return the noise multiplier of a round with the fewest clients."""
    mechanism = find_mechanism(calibrate(cell.file().job))
    assert mechanism is not None
    return mechanism.noise_multiplier


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return a row for each epsilon and each kind of noise."""
    found: list[tuple[Value, ...]] = []
    for epsilon in EPSILONS:
        central = mean(accuracies(logs, SERVER, epsilon))
        for kind in KINDS:
            each = accuracies(logs, kind, epsilon)
            ours = mean(each)
            lost = "-" if ours is None or central is None or kind == SERVER else f"{central - ours:.2f}"
            multiplier = noise_multiplier(make_cell(kind, epsilon))
            merged = [
                line.get("merged", 0) for log in logs if log.cell == cell_name(kind, epsilon) for line in log.rounds
            ]
            clients = f"{mean(merged) or 0.0:.0f}"
            found.append((f"{epsilon:g}", kind, f"{multiplier:.3f}", clients, format_runs(each), lost))
    return found


PAPER = Paper(
    name="distributed_noise",
    title=f"2NN on MNIST, {USERS:,} users, {GOAL} a round, {ROUNDS} rounds: test accuracy in percent, delta 1e-5",
    source="the users of Andrew et al. 2021, arXiv 1905.03871",
    columns=("epsilon", "noise of", "noise multiplier", "clients in a sum", "accuracy", "points below the server's"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
