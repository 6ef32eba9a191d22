"""How fast do robust rules aggregate updates that lie in the spool, and what memory does that take?

    python benchmarks/robust_aggregation.py [--updates 100] [--parameters 25000000] [--json] [--save]

Through the accumulator that the server uses, from files to the parts of the next version: everything that a commit does
but writing it. The files are links to a few, which the page cache holds; beside each rule stands what reading the same
files once takes, one after the other in windows of 1 MiB on one thread, measured in turns with it. Each rule runs in a
process of its own, whose peak of memory is shown. On a size that fits into memory as a whole byzfl and Flower run the
same rules, in the peers' own environment, if that is there: as many updates of so many parameters as `--small` says.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import report
from fedplat.aggregate import Accumulator, Contribution, Robust, first_columns, weighted_mean
from fedplat.aggregate.robust import (
    Bucketing,
    Bulyan,
    CenteredClipping,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NearestNeighbours,
    TrimmedMean,
)
from fedplat.model import ModelFile, Parameters

PEERS = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
THEIRS = Path(__file__).with_name("peers") / "robust_times.py"
NUM_FILES = 8
WINDOW_BYTES = 1 << 20
COLUMNS = (
    "rule",
    "s",
    "GB/s of updates",
    "reading once, s",
    "rule / reading",
    "peak of memory, MB",
    "small: s",
    "byzfl, s",
    "Flower, s",
)


def rules(f: int) -> Mapping[str, Robust]:
    """Each rule, by the name that the peers' times have."""
    return {
        "median": Robust(Median(), f),
        "trimmed mean": Robust(TrimmedMean(), f),
        "Krum": Robust(Krum(), f),
        "Multi-Krum": Robust(MultiKrum(), f),
        "Bulyan": Robust(Bulyan(), f),
        "geometric median": Robust(GeometricMedian(), f),
        "centered clipping": Robust(CenteredClipping(radius=10.0), f),
        "FLTrust": Robust(FLTrust(("c0",)), f),
        "buckets of 2, then median": Robust(Median(), f, (Bucketing(size=2),)),
        "nearest, then median": Robust(Median(), f, (NearestNeighbours(),)),
    }


def main(
    updates: Annotated[int, typer.Option(min=10, max=1000, help="Updates of an attempt.")] = 100,
    parameters: Annotated[int, typer.Option(min=1, help="Parameters of the model.")] = 25_000_000,
    small: Annotated[int, typer.Option(min=1, help="Parameters of the model for the peers.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each rule; the median counts.")] = 3,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure robust rules on files, beside reading them, and byzfl and Flower on less."""
    f = updates // 10
    theirs = times_of_peers(updates, small, f)
    rows: list[tuple[report.Cell, ...]] = []
    with tempfile.TemporaryDirectory() as large_folder, tempfile.TemporaryDirectory() as small_folder:
        make_files(Path(large_folder), updates, parameters)
        make_files(Path(small_folder), updates, small)
        for name in rules(f):
            seconds, reading, memory = in_own_process(large_folder, name, f, repeats)
            few_seconds, _, _ = in_own_process(small_folder, name, f, 3)
            rate = 4 * updates * parameters / seconds / 1e9
            peers = (theirs.get(peer, {}).get(name) for peer in ("byzfl", "flower"))
            rows.append((name, seconds, rate, reading, seconds / reading, memory / 1e6, few_seconds, *peers))
    notes = (
        f"{updates} updates of {parameters / 1e6:g} M parameters, of which {f} may be byzantine; small: {updates} of "
        f"{small / 1e6:g} M. The geometric median goes on until it has converged here, for 10 iterations in byzfl.",
    )
    if not theirs:
        notes += ("byzfl and Flower were not measured: `make bench-peers` makes their environment.",)
    finished = report.Report(
        name="robust_aggregation",
        title="Robust aggregation of updates in files",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=notes,
    )
    report.finish(finished, as_json, save)


def make_files(folder: Path, num_updates: int, num_parameters: int) -> None:
    """The updates, as links to a few files."""
    for number in range(min(NUM_FILES, num_updates)):
        values = np.random.default_rng(number).standard_normal(num_parameters, np.float32)
        (folder / f"{number}").write_bytes(Parameters.from_arrays({"w": values}).to_bytes())
    for number in range(NUM_FILES, num_updates):
        (folder / f"{number}").hardlink_to(folder / f"{number % NUM_FILES}")


def in_own_process(folder: str, name: str, f: int, repeats: int) -> tuple[float, float, int]:
    """Seconds of the rule and of reading the files, and the peak of memory in bytes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (folder, name, f, repeats))


def measure(folder: str, name: str, f: int, repeats: int) -> tuple[float, float, int]:
    """What `in_own_process` returns."""
    paths = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
    read_all(paths)
    reading, aggregating = list[float](), list[float]()
    for _ in range(repeats):
        reading.append(seconds(lambda: read_all(paths)))
        aggregating.append(seconds(lambda: aggregate(paths, rules(f)[name])))
    return statistics.median(aggregating), statistics.median(reading), peak_bytes()


def read_all(paths: list[Path]) -> None:
    """Reads the files one after the other."""
    window = memoryview(bytearray(WINDOW_BYTES))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(window):
                pass


def aggregate(paths: list[Path], robust: Robust) -> None:
    """What the server does to commit an attempt, but for writing the version."""
    base, rule = ModelFile.open(paths[0]), robust.build(seed=1)(weighted_mean())
    accumulator = Accumulator(base.schema, rule)
    for number, path in enumerate(paths):
        accumulator.fold(ModelFile.open(path), Contribution(1.0, client_id=f"c{number}"))
    for _ in accumulator.parts(base, first_columns(rule, base.schema.num_floating)):
        pass


def seconds(function: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_bytes() -> int:
    """The most memory that this process has had."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def times_of_peers(num_updates: int, num_parameters: int, f: int) -> Mapping[str, Mapping[str, Any]]:
    """Seconds by peer and rule; nothing if they are not installed."""
    if not PEERS.exists():
        return {}
    command = [PEERS, THEIRS, str(num_updates), str(num_parameters), str(f)]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    typer.run(main)
