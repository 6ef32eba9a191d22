"""Measure the speed and the memory of the ranks of a pool that aggregate updates.

    python benchmarks/pool_aggregation.py [--updates 100] [--parameters 100000000] [--ranks 1,2,4] [--json] [--save]

The time runs from the first update to the stored version, as in the daemon: ranks fold updates in the spool, apply the
rule, and write the next version, which is hashed and synced. The updates' files are links to a few files in the page
cache. Each row has a new pool, and the row without a pool a new process. For comparison, one thread copies memory on
the same machine just before, and a GPU copies its own memory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import torch
import typer

import report
from fedplat.aggregate import Contribution
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_server.aggregation.backend import AggregationBackend, LocalAggregation, PoolAggregation
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.client import WorkerPool
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate

COLUMNS = (
    "where",
    "split",
    "s",
    "GB/s of updates",
    "part of one thread's copy",
    "peak of memory of a rank, MB",
    "digest",
)
JOB = """
name = "bench"
population = "bench"
trainer = "bench"
rounds = 1
[model]
initial = "m.safetensors"
[selection]
goal = 100
[updates]
weighting = "uniform"
[aggregation]
rule = "fedadam"
"""


def main(
    updates: int = 100,
    parameters: int = 100_000_000,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,4",
    files: Annotated[int, typer.Option(help="Number of distinct files; the other updates are links to them.")] = 4,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure one process, and pools of each size with both splits."""
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        make_files(folder, updates, parameters, files)
        copy = measure_copy_gb_s(parameters)
        gigabytes = 4e-9 * updates * parameters
        rows = list[tuple[report.Cell, ...]]()

        def add(where: str, split: str, seconds: float, peaks: list[int], digest: str) -> None:
            speed = gigabytes / seconds
            rows.append((where, split, seconds, speed, speed / copy, max(peaks) / 1e6, digest[:8]))
            print(*rows[-1], file=sys.stderr)

        with multiprocessing.get_context("spawn").Pool(1) as process:
            seconds, peak, digest = process.apply(aggregate_in_process, (name, updates))
            add("one process, no pool", "", seconds, [peak], digest)
        for split in ("columns", "reports"):
            for number in map(int, ranks.split(",")):
                add(f"{number} ranks", split, *aggregate_on_ranks(folder, updates, number, split))
    cores = len(os.sched_getaffinity(0))
    notes = [
        f"{updates} updates of {parameters / 1e6:g} M parameters ({gigabytes:.3g} GB, links to {files} files). "
        f"One thread copied {copy:.3g} GB/s of memory. More ranks than the {cores} cores cannot be faster.",
        "Equal digests are equal bits: by columns they are those of one process, by reports they depend on the "
        "number of ranks. The memory of a rank includes PyTorch, and by reports its part of the shared memory.",
    ]
    if torch.cuda.is_available():
        notes.append(f"The GPU copied {gpu_gb_s():.3g} GB/s of its own memory.")
    finished = report.Report(
        name="pool_aggregation",
        title="Aggregation on the pool",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=tuple(notes),
    )
    report.finish(finished, as_json, save)


def make_files(folder: Path, num_updates: int, num_parameters: int, num_files: int) -> None:
    """Write the base version and the updates, as links to a few files."""
    base = Parameters.from_arrays({"w": np.zeros(num_parameters, np.float32)})
    (folder / "base").write_bytes(base.to_bytes())
    for number in range(num_updates):
        path = folder / f"{number}.update"
        if number < num_files:
            base["w"][:] = np.random.default_rng(number).standard_normal(num_parameters, np.float32)
            with path.open("wb") as file:
                file.write(base.schema.header)
                file.write(base.buffer.data)
        else:
            path.hardlink_to(folder / f"{number % num_files}.update")


def inputs_of(folder: Path, split: str, ranks: int) -> AttemptInputs:
    """Return the inputs of one attempt."""
    table = f'[pool]\nranks = {ranks}\nsplit = "{split}"\n' if split else ""
    return AttemptInputs(
        spec=parse_job(JOB + table), job_id="bench", version=1, round=1, base_path=str(folder / "base")
    )


async def aggregate(backend: AggregationBackend, folder: Path, num_updates: int) -> str:
    """Fold all updates, commit, and return the digest of the version."""
    for number in range(num_updates):
        await backend.fold([SpooledUpdate(str(folder / f"{number}.update"), Contribution(1.0 - number / 1000))])
    digest = (await backend.commit()).model.digest
    await backend.close()
    return digest


def aggregate_in_process(name: str, num_updates: int) -> tuple[float, int, str]:
    """Return the seconds, the peak memory in bytes and the digest of this process; call it in a new process."""
    folder = Path(name)
    blobs = BlobStore(folder / "blobs")
    begin = time.perf_counter()
    digest = asyncio.run(aggregate(LocalAggregation(inputs_of(folder, "", 1), blobs), folder, num_updates))
    return time.perf_counter() - begin, peak_bytes(os.getpid()), digest


def aggregate_on_ranks(folder: Path, num_updates: int, ranks: int, split: str) -> tuple[float, list[int], str]:
    """Return the seconds, the peak memory of each rank in bytes, and the digest."""

    async def measure(processes: list[int]) -> tuple[float, list[int], str]:
        begin = time.perf_counter()
        backend = PoolAggregation(inputs_of(folder, split, ranks), BlobStore(folder / "blobs"), WorkerPool.at(folder))
        await backend.begin()
        digest = await aggregate(backend, folder, num_updates)
        return time.perf_counter() - begin, [peak_bytes(process) for process in processes], digest

    with running_pool(folder, ranks) as processes:
        return asyncio.run(measure(processes))


@contextmanager
def running_pool(folder: Path, ranks: int) -> Generator[list[int]]:
    """Run a pool; yield the process ids of its ranks."""
    command = [str(Path(sys.executable).parent / "fedplat-server"), "pool", "run", "--data-dir", str(folder)]
    started = subprocess.Popen([*command, "--ranks", str(ranks), "--log-level", "ERROR"], stderr=subprocess.DEVNULL)
    try:
        if not asyncio.run(WorkerPool.at(folder).is_ready(120.0)):
            raise SystemExit("the pool did not start")
        children = psutil.Process(started.pid).children()
        yield [child.pid for child in children if "RANK" in child.environ()]
    finally:
        started.terminate()
        started.wait()


def peak_bytes(process: int) -> int:
    """Return the peak memory of a process in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def measure_copy_gb_s(num_parameters: int) -> float:
    """Measure how fast one thread copies memory: the best of five."""
    source = np.ones(num_parameters, np.float32)
    target = np.empty_like(source)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = max(best, source.nbytes / (time.perf_counter() - begin) / 1e9)
    return best


def gpu_gb_s() -> float:
    """Measure how fast the first GPU copies its own memory."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 4e-9 * source.numel() / (time.perf_counter() - begin))
    return best


if __name__ == "__main__":
    typer.run(main)
