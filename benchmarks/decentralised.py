"""Compare ways to train without a trusted middle: accuracy against the bytes of the busiest node, and virtual time.

    python benchmarks/decentralised.py [--seeds 3] [--rounds 20] [--picture] [--json] [--save]
    python benchmarks/decentralised.py --tune

Sixteen silos in the simulator have 4,800 examples of MNIST, divided by Dirichlet(0.3) for each label: unequal amounts,
skewed labels. Their speeds and links differ widely (`FLEET`). All modes train the same network (McMahan's 2NN) with
the same data, fleet and initial weights, in batches of 20, with equal weights, until the silos have trained on
`rounds` times all their examples. For modes without rounds a simulation of the schedule alone finds the number of
versions until then. The busiest node is the server, whose bytes are those of all clients, or the silo that sends and
receives the most. Results are medians over the seeds. `--tune` compares the `candidates` of each mode with a seed that
the results do not use; the best ones are in `MODES`. The data is read from the folder FEDPLAT_DATA.
"""

from __future__ import annotations

import dataclasses
import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # before NumPy and PyTorch are imported

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedplat.simulation import simulate
from fedplat.simulation.data import Dataset, Federation, partitioners, sources
from fedplat.simulation.data.sources import SourcePaths, data_folder
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.scenario.file import SimulationFile, parse
from report import RESULTS, Cell, JsonOption, Report, SaveOption, finish

SILOS, EXAMPLES, TARGET, TUNING_SEED = 16, 4800, 0.85, 100
PICTURE = RESULTS.parents[1] / "docs" / "images" / "decentralised.png"
COLUMNS = (
    "mode",
    "accuracy at the end, %",
    "busiest node, MB",
    "virtual time, min",
    f"MB to {100 * TARGET:g} %",
    f"min to {100 * TARGET:g} %",
)
FLEET = """
[simulation.fleet]
speed = { kind = "lognormal", median = 50.0, sigma = 0.8 } # examples a second
download = { kind = "lognormal", median = 2e6, sigma = 0.5 } # bytes a second
upload = { kind = "lognormal", median = 1e6, sigma = 0.5 }
noise = 0.1
"""
BASE = f"""
population = "silos"
trainer = "silos"
[model]
initial = "fedplat.pytorch.models:mcmahan_2nn"
[selection]
goal = {SILOS}
[deadlines]
selection_s = 36000
training_s = 36000
upload_s = 36000
[updates]
weighting = "uniform"
[config]
epochs = 1
batch_size = 20
[simulation]
engine = "loop"
target = {TARGET}
{FLEET}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode: `changes` of `BASE`, and the `candidates` that were compared for it. `group` is its colour.

    A version merges `merged` updates of `epochs` epochs each; `has_rounds` is false if fast silos train more often.
    """

    group: str
    changes: Mapping[str, str]
    candidates: Sequence[Mapping[str, str]]
    epochs: int = 1
    merged: int = SILOS
    has_rounds: bool = True

    def file(self, seed: int, versions: int, more: Iterable[str] = ()) -> SimulationFile:
        """Return its simulation file for a number of versions (rounds)."""
        named = [f"{key}={value}" for key, value in self.changes.items()]
        named += ["selection.over_selection=1.0"] if self.group != "no server" else []
        own = ['name="silos"', f"rounds={versions}", f"simulation.seed={seed}", f"config.epochs={self.epochs}"]
        return parse(BASE, Path.cwd(), [*own, *named, f"evaluation.every={SILOS // self.merged}", *more])


def rates(*values: float, **more: str) -> list[Mapping[str, str]]:
    """Return one candidate for each learning rate of the silos."""
    return [{"config.learning_rate": f"{value:g}", **more} for value in values]


def elastic(*values: float, beta: float = 0.9) -> list[Mapping[str, str]]:
    """Return candidates of EASGD with the paper's α = β / silos, whatever the learning rate."""
    return [{"config.learning_rate": f"{each:g}", "config.rho": f"{beta / SILOS / each:.6g}"} for each in values]


SGD = rates(0.1, 0.2, 0.4, 0.8)
EASGD = {"config.algorithm": '"easgd"', "aggregation.rule": '"easgd"'}
ADAMW = {"config.optimizer": '"adamw"', "config.keep_optimizer": "true", "config.weight_decay": "0.1"}
OUTER = {
    "aggregation.rule": '"fedavgm"',
    "aggregation.nesterov": "true",
    "aggregation.learning_rate": "0.7",
    "aggregation.momentum": "0.5",
}


def gossip(topology: str, **more: str) -> dict[str, str]:
    """Return the changes of a decentralised mode."""
    return {"mode.kind": '"gossip"', "mode.topology": f'"{topology}"', "config.learning_rate": "0.4", **more}


MODES: Mapping[str, Mode] = {
    "FedAvg": Mode(group="server, rounds", changes=SGD[2], candidates=SGD),
    "FedAvg, 4 epochs a round": Mode(group="server, rounds", changes=SGD[1], candidates=SGD[:3], epochs=4),
    "DiLoCo, 4 epochs a round": Mode(
        group="server, rounds",
        changes={**ADAMW, **OUTER, "config.learning_rate": "3e-3"},
        candidates=[
            {"config.learning_rate": rate, "aggregation.momentum": momentum}
            for rate, momentum in (("1e-3", "0.9"), ("1e-3", "0.5"), ("3e-3", "0.9"), ("3e-3", "0.5"), ("6e-3", "0.5"))
        ],
        epochs=4,
    ),
    "EASGD, rounds": Mode(
        group="server, rounds",
        changes={**EASGD, **elastic(0.2)[0]},
        candidates=[*elastic(0.1, 0.2, 0.4), {**elastic(0.05)[0], "config.momentum": "0.9"}],
    ),
    "EASGD, asynchronous": Mode(
        group="server, asynchronous",
        changes={
            **EASGD,
            **elastic(0.2)[0],
            "mode.kind": '"buffered"',
            "mode.concurrency": f"{SILOS}",
            "mode.staleness": '"constant"',
            "selection.goal": "1",
        },
        candidates=[*elastic(0.2, 0.4), *elastic(0.2, 0.4, beta=3.6)],
        merged=1,
        has_rounds=False,
    ),
    "buffered (FedBuff), 4 updates": Mode(
        group="server, asynchronous",
        changes={
            "mode.kind": '"buffered"',
            "mode.concurrency": f"{SILOS}",
            "selection.goal": "4",
            "aggregation.rule": '"fedbuff"',
            "aggregation.learning_rate": "1.0",
            "config.learning_rate": "0.4",
        },
        candidates=[
            *rates(0.1, 0.2, 0.4, **{"aggregation.learning_rate": "1.0"}),
            *rates(0.2, 0.4, **{"aggregation.learning_rate": "0.25"}),
        ],
        merged=4,
        has_rounds=False,
    ),
    "SSP, slack 3": Mode(
        group="server, asynchronous",
        changes={
            "mode.kind": '"ssp"',
            "mode.concurrency": f"{SILOS}",
            "mode.slack": "3",
            "selection.goal": "1",
            "selection.wait_for": f"{SILOS}",
            "aggregation.rule": '"fedbuff"',
            "aggregation.learning_rate": f"{1 / SILOS}",
            "config.learning_rate": "0.4",
        },
        candidates=SGD,
        merged=1,
        has_rounds=False,
    ),
    "gossip, ring": Mode(group="no server", changes=gossip("ring"), candidates=SGD),
    "gossip, exponential": Mode(group="no server", changes=gossip("exponential"), candidates=SGD),
    "gossip, random pairs": Mode(
        group="no server", changes=gossip("pairs", **{"config.learning_rate": "0.2"}), candidates=SGD
    ),
    "ring all-reduce": Mode(group="no server", changes=gossip("ring", **{"mode.exchange": '"ring"'}), candidates=()),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """The state after a version or round: virtual seconds, bytes in and out of the busiest node so far, accuracy."""

    at_s: float
    busiest: float
    accuracy: float | None
    """On the test data; None: not evaluated."""


def count_traffic(records: Iterable[AttemptResult]) -> list[Point]:
    """Return the points of a run: with a server, it sends what clients download, and receives their uploads.

    Without one, the busiest silo of each round counts, which is the same in all rounds if the silos have equal parts;
    else the sum is an upper bound.
    """
    points, busiest = list[Point](), 0.0
    for record in records:
        if record.exchange is None:
            busiest += record.bytes_down + record.bytes_up
        else:
            busiest += record.exchange.busiest_bytes
        points.append(Point(record.ended_at, busiest, record.evaluation.get("accuracy")))
    return points


def find_target(points: Iterable[Point], target: float) -> Point | None:
    """Return the first point with at least the target accuracy; None if no point has."""
    return next((point for point in points if point.accuracy is not None and point.accuracy >= target), None)


def split_mnist(seed: int, examples: int = EXAMPLES) -> Federation:
    """Return the silos' examples. Raises `DataError` if MNIST is not in the data folder."""
    rng = np.random.default_rng(seed)
    mnist = sources.Mnist().load(SourcePaths(Path.cwd(), data_folder(), rng))
    kept, test = rng.permutation(len(mnist.inputs))[:examples], (mnist.test_inputs, mnist.test_targets)
    subset = Dataset.from_arrays(mnist.inputs[kept], mnist.targets[kept], test)
    parts = partitioners.Dirichlet(clients=SILOS, alpha=0.3, min_examples=20).split(subset, rng)
    return Federation(subset.inputs, subset.targets, parts, *test)


def count_versions(mode: Mode, seed: int, rounds: int, data: Federation) -> int:
    """Return the number of versions until the silos have trained on `rounds` times all their examples.

    Without rounds, fast silos train more often: the schedule is simulated without training, and the number corrected.
    """
    versions = round(rounds * SILOS / mode.merged / mode.epochs)
    if mode.has_rounds:
        return versions
    wanted = rounds * float(data.sizes().sum())
    for _ in range(4):
        merged = simulate_schedule(mode, seed, versions, data)
        versions = max(1, round(versions * wanted / float(merged @ data.sizes())))
    return versions


def simulate_schedule(mode: Mode, seed: int, versions: int, data: Federation) -> np.ndarray:
    """Return how many trainings of each silo were merged, from a simulation without training."""
    file = mode.file(seed, versions, ["simulation.training=false"])
    return simulate(file, data=data, progress=False).result.participation.merged


def measure(mode: Mode, seed: int, rounds: int, data: Federation, more: Iterable[str] = ()) -> list[Point]:
    """Run a mode with one seed. Raises `RuntimeError` if its job failed."""
    run = simulate(mode.file(seed, count_versions(mode, seed, rounds, data), more), data=data, progress=False)
    if run.result.status != "COMPLETED":
        raise RuntimeError(f"the job ended {run.result.status}: {run.result.reason}")
    return count_traffic(run.result.attempts)


def make_row(name: str, runs: Sequence[Sequence[Point]]) -> tuple[Cell, ...]:
    """Return a mode's row: medians over the seeds, and "not reached" if most of them did not reach the target."""
    ends = [points[-1] for points in runs]
    accuracy = [next(each.accuracy for each in reversed(points) if each.accuracy is not None) for points in runs]
    reached = [point for points in runs if (point := find_target(points, TARGET)) is not None]
    missing = [float("inf")] * (len(runs) - len(reached))
    to_target = [
        statistics.median([*found, *missing])
        for found in ([each.busiest / 1e6 for each in reached], [each.at_s / 60 for each in reached])
    ]
    return (
        name,
        f"{100 * statistics.median(accuracy):.1f} ({100 * min(accuracy):.1f} to {100 * max(accuracy):.1f})",
        statistics.median(end.busiest for end in ends) / 1e6,
        statistics.median(end.at_s for end in ends) / 60,
        *("not reached" if each == float("inf") else each for each in to_target),
    )


def draw(results: Mapping[str, Sequence[Sequence[Point]]], path: Path) -> None:
    """Plot the accuracy of each mode's run with the median end against the busiest node's bytes, and virtual time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles = ["-", "--", ":", "-."]
    colours = {"server, rounds": "#1f5f8b", "server, asynchronous": "#c26a1a", "no server": "#3a7d44"}
    figure, pair = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained", sharey=True)
    drawn = dict.fromkeys(colours, 0)
    for name, runs in results.items():
        group = MODES[name].group
        scored = [[point for point in points if point.accuracy is not None] for points in runs]
        line = sorted(scored, key=lambda points: points[-1].accuracy or 0.0)[len(scored) // 2]
        values = [100 * (point.accuracy or 0.0) for point in line]
        style = {"color": colours[group], "linestyle": styles[drawn[group] % len(styles)], "linewidth": 1.6}
        pair[0].plot([point.busiest / 1e6 for point in line], values, label=name, **style)
        pair[1].plot([point.at_s / 60 for point in line], values, **style)
        drawn[group] += 1
    for axes, label in zip(pair, ("MB in and out of the busiest node", "virtual minutes"), strict=True):
        axes.set_xscale("log")
        axes.axhline(100 * TARGET, color="#888888", linewidth=0.8)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.set_ylim(30, 95)
    pair[0].set_ylabel("test accuracy, %")
    figure.legend(loc="outside right center", fontsize=9)
    figure.suptitle(f"MNIST, {SILOS} unequal silos, equal local work")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def tune(only: Sequence[str], rounds: int) -> None:
    """Print the accuracy at the end of each candidate."""
    data = split_mnist(TUNING_SEED)
    for name in only:
        for candidate in MODES[name].candidates:
            changes = [f"{key}={value}" for key, value in candidate.items()]
            points = measure(MODES[name], TUNING_SEED, rounds, data, changes)
            accuracy = next(each.accuracy for each in reversed(points) if each.accuracy is not None)
            print(f"{name}: {' '.join(changes)}: {accuracy:.4f}", flush=True)


def main(  # noqa: PLR0913 - the options of a program, each by its name
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; the median is shown.")] = 3,
    rounds: Annotated[int, typer.Option(min=4, help="How often each silo's examples are trained on, on average.")] = 20,
    only: Annotated[list[str] | None, typer.Option(help="A mode, by its name in the table; may be repeated.")] = None,
    tuning: Annotated[bool, typer.Option("--tune", help="Compare the candidates of each mode instead.")] = False,
    picture: Annotated[bool, typer.Option("--picture", help=f"Draw {PICTURE.name} into docs/images.")] = False,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Compare FedAvg, DiLoCo, EASGD, buffered, SSP, gossip and a ring on MNIST with 16 silos, in the simulator."""
    import torch

    torch.set_num_threads(1)
    names = only or list(MODES)
    if tuning:
        tune(names, rounds)
        return
    results: dict[str, list[list[Point]]] = {name: [] for name in names}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("runs", total=seeds * len(names))
        for seed in range(seeds):
            data = split_mnist(seed)
            for name in names:
                progress.update(bar, description=f"{name}, seed {seed}")
                results[name].append(measure(MODES[name], seed, rounds, data))
                progress.advance(bar)
    if picture:
        draw(results, PICTURE)
    sizes = split_mnist(0).sizes()
    report = Report(
        name="decentralised",
        title=f"MNIST, {SILOS} unequal silos, {rounds} passes over {EXAMPLES:,} examples, in the simulator",
        columns=COLUMNS,
        rows=tuple(make_row(name, runs) for name, runs in results.items()),
        notes=(
            f"Medians over {seeds} seeds (smallest to largest accuracy in brackets), on the 10,000 test images. Silos "
            f"have {sizes.min()} to {sizes.max()} examples (seed 0). Gossip includes the rounds without training until "
            "the silos agree within 1 %, and its accuracy is that of the silos' mean.",
        ),
    )
    finish(report, as_json, save)


if __name__ == "__main__":
    typer.run(main)
