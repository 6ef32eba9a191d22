"""Measure the speed and the memory of robust rules that aggregate updates in the spool.

    python benchmarks/robust_aggregation.py [--updates 100] [--parameters 25000000] [--json] [--save]

The benchmark uses the server's accumulator, from files to the parts of the next version: a whole commit except for
writing it. The files are links to a few files in the page cache. Each rule is compared with one pass over the same
files, one after the other in windows of 1 MiB on one thread, measured in turns with it. Each rule runs in a separate
process, to measure its peak memory. On updates that fit into memory (`--small` parameters each) byzfl and Flower run
the same rules, in the environment of the other platforms, if it exists.
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
    """Return each rule, by its name in `robust_times.py`."""
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
    updates: Annotated[int, typer.Option(min=10, max=1000, help="Number of updates of an attempt.")] = 100,
    parameters: Annotated[int, typer.Option(min=1, help="Parameters of the model.")] = 25_000_000,
    small: Annotated[int, typer.Option(min=1, help="Parameters of the model for byzfl and Flower.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each rule; the median is shown.")] = 3,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure robust rules on files, compared with reading them, and byzfl and Flower on smaller updates."""
    f = updates // 10
    theirs = times_of_peers(updates, small, f)
    rows: list[tuple[report.Cell, ...]] = []
    with tempfile.TemporaryDirectory() as large_folder, tempfile.TemporaryDirectory() as small_folder:
        make_files(Path(large_folder), updates, parameters)
        make_files(Path(small_folder), updates, small)
        for name in rules(f):
            seconds, reading, memory = measure_in_process(large_folder, name, f, repeats)
            few_seconds, _, _ = measure_in_process(small_folder, name, f, 3)
            rate = 4 * updates * parameters / seconds / 1e9
            peers = (theirs.get(peer, {}).get(name) for peer in ("byzfl", "flower"))
            rows.append((name, seconds, rate, reading, seconds / reading, memory / 1e6, few_seconds, *peers))
    notes = (
        f"{updates} updates of {parameters / 1e6:g} M parameters, of which {f} may be byzantine; small: {updates} of "
        f"{small / 1e6:g} M. The geometric median runs until it has converged here, for 10 iterations in byzfl.",
    )
    if not theirs:
        notes += ("byzfl and Flower were not measured: `make bench-peers` creates their environment.",)
    finished = report.Report(
        name="robust_aggregation",
        title="Robust aggregation of updates in files",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=notes,
    )
    report.finish(finished, as_json, save)


def make_files(folder: Path, num_updates: int, num_parameters: int) -> None:
    """Write the updates, as links to a few files."""
    for number in range(min(NUM_FILES, num_updates)):
        values = np.random.default_rng(number).standard_normal(num_parameters, np.float32)
        (folder / f"{number}").write_bytes(Parameters.from_arrays({"w": values}).to_bytes())
    for number in range(NUM_FILES, num_updates):
        (folder / f"{number}").hardlink_to(folder / f"{number % NUM_FILES}")


def measure_in_process(folder: str, name: str, f: int, repeats: int) -> tuple[float, float, int]:
    """Return the seconds of the rule and of reading the files, and the peak memory in bytes, of a separate process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (folder, name, f, repeats))


def measure(folder: str, name: str, f: int, repeats: int) -> tuple[float, float, int]:
    """Return the seconds of the rule and of reading the files, and the peak memory in bytes, of this process."""
    paths = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
    read_all(paths)
    reading, aggregating = list[float](), list[float]()
    for _ in range(repeats):
        reading.append(seconds(lambda: read_all(paths)))
        aggregating.append(seconds(lambda: aggregate(paths, rules(f)[name])))
    return statistics.median(aggregating), statistics.median(reading), peak_bytes()


def read_all(paths: list[Path]) -> None:
    """Read the files one after the other."""
    window = memoryview(bytearray(WINDOW_BYTES))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(window):
                pass


def aggregate(paths: list[Path], robust: Robust) -> None:
    """Aggregate as the server commits an attempt, without writing the version."""
    base, rule = ModelFile.open(paths[0]), robust.build(seed=1)(weighted_mean())
    accumulator = Accumulator(base.schema, rule)
    for number, path in enumerate(paths):
        accumulator.fold(ModelFile.open(path), Contribution(1.0, client_id=f"c{number}"))
    for _ in accumulator.parts(base, first_columns(rule, base.schema.num_floating)):
        pass


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def times_of_peers(num_updates: int, num_parameters: int, f: int) -> Mapping[str, Mapping[str, Any]]:
    """Return the seconds by library and rule; empty if they are not installed."""
    if not PEERS.exists():
        return {}
    command = [PEERS, THEIRS, str(num_updates), str(num_parameters), str(f)]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    typer.run(main)
