"""Measure the speed and the memory of aggregating updates as they arrive.

    python benchmarks/aggregation.py [--parameters 1000000 --parameters 25000000] [--updates 10 ...] [--json] [--save]

The benchmark uses the server's functions: the check before an update is accepted, and the fold afterwards, from files
of the spool in the page cache. It repeats the same four updates. In turns with these it measures the fold of arrays in
memory, torch's `add_(alpha=)` and a plain copy of the same bytes. Flower's `aggregate_arrayrecords` runs in the
environment of the other platforms, if it exists. Everything uses one thread. Each case runs in a separate process; its
memory beyond the accumulator is the peak while it checks and folds, minus the memory before.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import numpy as np
import typer

import report
from fedplat import report_validation
from fedplat.aggregate import Accumulator, Contribution, FedAvg
from fedplat.codecs.container import open_update
from fedplat.model import ModelFile, Parameters
from fedplat.model.file import FilePart

PEERS = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
FLOWER = Path(__file__).with_name("peers") / "flower_aggregate.py"
DTYPES: dict[str, Any] = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
WEIGHT = 3.0
FLOWER_BYTES = 20e9
"""The most bytes for Flower. A larger case would take minutes."""
SLICE = 10
"""Updates of one method before the next method has its turn."""
MAX_SLICES = 20
"""More slices do not change the rates. Memory is measured over all updates."""
COLUMNS = (
    "updates",
    "K",
    "copy GB/s",
    "fold of arrays",
    "fold of files",
    "check of files",
    "check + fold",
    "fold / copy",
    "torch add_",
    "Flower",
    "memory beyond the accumulator, MB",
)


class Rates(NamedTuple):
    """Bytes of updates per second, by method, and the memory of folding files."""

    copy: float
    arrays: float
    files: float
    check: float
    both: float
    torch: float
    memory_bytes: int


def main(
    parameters: Annotated[list[int] | None, typer.Option(min=1, help="Parameters of a model.")] = None,
    updates: Annotated[list[int] | None, typer.Option(min=1, help="Updates to aggregate.")] = None,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure checking and folding updates, compared with Flower, torch and a plain copy."""
    rows: list[tuple[report.Cell, ...]] = []
    context = multiprocessing.get_context("spawn")
    for num_parameters in parameters or [1_000_000, 25_000_000]:
        for dtype in DTYPES:
            for num_updates in updates or [10, 100, 1000]:
                with context.Pool(1) as pool:  # a separate process, to measure the peak memory of this case
                    rates = pool.apply(measure, (num_parameters, dtype, num_updates))
                rows.append(row(num_parameters, dtype, num_updates, rates))
    note = "GB/s of updates as stored in their files; the fold of bf16 reads half the bytes of fp32 for as many sums."
    if not PEERS.exists():
        note += " Flower was not measured: `make bench-peers` creates its environment."
    finished = report.Report(
        name="aggregation",
        title="Aggregation on arrival, GB/s of updates on one thread",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(note,),
    )
    report.finish(finished, as_json, save)


def row(num_parameters: int, dtype: str, num_updates: int, rates: Rates) -> tuple[report.Cell, ...]:
    """Return one row of the table."""
    flower = flower_rate(num_parameters, num_updates) if dtype == "fp32" else None  # Flower does not support bf16
    return (
        f"{num_parameters / 1e6:g} M {dtype}",
        num_updates,
        *(rate / 1e9 for rate in (rates.copy, rates.arrays, rates.files, rates.check, rates.both)),
        rates.files / rates.copy,
        rates.torch / 1e9,
        None if flower is None else flower / 1e9,
        rates.memory_bytes / 1e6,
    )


def flower_rate(num_parameters: int, num_updates: int) -> float | None:
    """Measure the bytes per second of `aggregate_arrayrecords`; None if it is not installed or would take too long."""
    if not PEERS.exists() or 4.0 * num_parameters * num_updates > FLOWER_BYTES:
        return None
    command = [PEERS, FLOWER, str(num_parameters), str(num_updates)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def measure(num_parameters: int, dtype: str, num_updates: int) -> Rates:
    """Run one case, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(4)]
        for number, path in enumerate(paths):
            values = np.random.default_rng(number).random(num_parameters, np.float32).astype(DTYPES[dtype])
            path.write_bytes(Parameters.from_arrays({"w": values}).to_bytes())
            del values
        memory_bytes = files_memory(paths, num_updates)
        return rates_of(paths, num_updates, memory_bytes)


def files_memory(paths: list[Path], num_updates: int) -> int:
    """Return the peak memory of checking and folding, in bytes beyond the accumulator."""
    base = ModelFile.open(paths[0])
    accumulator = Accumulator(base.schema, FedAvg().build())
    fold_file(accumulator, base, paths[0])  # now the accumulator's pages are allocated
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status_bytes("VmRSS")
    for number in range(num_updates):
        check_file(paths[0], paths[number % 4])
        fold_file(accumulator, base, paths[number % 4])
    return max(status_bytes("VmHWM") - before, 0)


def rates_of(paths: list[Path], num_updates: int, memory_bytes: int) -> Rates:
    """Measure every method in turns, in slices of a few updates."""
    import torch

    from fedplat.pytorch.convert import to_torch

    torch.set_num_threads(1)
    base = ModelFile.open(paths[0])
    accumulator = Accumulator(base.schema, FedAvg().build())
    arrays = [Parameters.open(path).copy() for path in paths]
    total, target = torch.zeros(base.schema.num_floating), np.zeros_like(arrays[0].buffer)
    tensors = [to_torch(one)["w"] for one in arrays]
    methods: dict[str, Callable[[int], object]] = {
        "copy": lambda number: np.copyto(target, arrays[number].buffer),
        "arrays": lambda number: accumulator.fold(arrays[number], Contribution(WEIGHT)),
        "files": lambda number: fold_file(accumulator, base, paths[number]),
        "check": lambda number: check_file(paths[0], paths[number]),
        "torch": lambda number: total.add_(tensors[number], alpha=WEIGHT),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(-1, min(max(num_updates // SLICE, 3), MAX_SLICES)):
        for name, method in methods.items():
            start = time.perf_counter()
            for number in range(SLICE):
                method(number % 4)
            if turn >= 0:  # the first turn warms up
                seconds[name].append((time.perf_counter() - start) / SLICE)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rates = {name: arrays[0].buffer.nbytes / each for name, each in medians.items()}
    both = arrays[0].buffer.nbytes / (medians["check"] + medians["files"])
    return Rates(**rates, both=both, memory_bytes=memory_bytes)


def check_file(base: Path, update: Path) -> None:
    """Check an update as the server does before it accepts it."""
    assert isinstance(report_validation.validate_file(FilePart(update), base, None), float)


def fold_file(accumulator: Accumulator, base: ModelFile, update: Path) -> None:
    """Fold an update as the server does after it accepts it."""
    accumulator.fold(open_update(update, base, None), Contribution(WEIGHT))


def status_bytes(key: str) -> int:
    """Read a number of this process from /proc, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    typer.run(main)
