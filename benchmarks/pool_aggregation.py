"""How fast do the ranks of a pool aggregate, and what memory does each of them need?

    python benchmarks/pool_aggregation.py [--updates 100] [--parameters 100000000] [--ranks 1,2,4] [--json] [--save]

From the first update to the stored version, as the daemon does it: ranks fold updates that lie in the spool, apply the
rule, and write the next version, which is hashed and synced. The updates' files are links to a few, which the page
cache holds. A fresh pool for each row, and a fresh process for the row without a pool. Beside it stands how fast one
thread copies memory on the same machine just before, and on a GPU how fast that copies its own.
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
from fedplat_server.aggregation.backend import AggregationBackend
from fedplat_server.aggregation.local import LocalAggregation
from fedplat_server.aggregation.pooled import PoolAggregation
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.attempt_inputs import AttemptInputs, SpooledUpdate
from fedplat_server.workers.client import WorkerPool

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
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas between them.")] = "1,2,4",
    files: Annotated[int, typer.Option(help="Files with bytes of their own; the other updates are links to them.")] = 4,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measures one process, and pools of each size with both splits."""
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        make_files(folder, updates, parameters, files)
        copy = copied_gb_s(parameters)
        gigabytes = 4e-9 * updates * parameters
        rows = list[tuple[report.Cell, ...]]()

        def add(where: str, split: str, seconds: float, peaks: list[int], digest: str) -> None:
            speed = gigabytes / seconds
            rows.append((where, split, seconds, speed, speed / copy, max(peaks) / 1e6, digest[:8]))
            print(*rows[-1], file=sys.stderr)

        with multiprocessing.get_context("spawn").Pool(1) as process:
            seconds, peak, digest = process.apply(alone, (name, updates))
            add("one process, no pool", "", seconds, [peak], digest)
        for split in ("columns", "reports"):
            for number in map(int, ranks.split(",")):
                add(f"{number} ranks", split, *on_ranks(folder, updates, number, split))
    cores = len(os.sched_getaffinity(0))
    notes = [
        f"{updates} updates of {parameters / 1e6:g} M parameters ({gigabytes:.3g} GB, links to {files} files). "
        f"One thread copied {copy:.3g} GB/s of memory. More ranks than the {cores} cores cannot be faster.",
        "Equal digests are equal bits: by columns they are those of one process, by reports they follow from the "
        "number of ranks. The memory of a rank has PyTorch in it, and by reports its part of what the ranks share.",
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
    """The base version and the updates, as links to a few files."""
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
    """One attempt's."""
    table = f'[pool]\nranks = {ranks}\nsplit = "{split}"\n' if split else ""
    return AttemptInputs(spec=parse_job(JOB + table), job_id="bench", version=1, base_path=str(folder / "base"))


async def aggregated(folding: AggregationBackend, folder: Path, num_updates: int) -> str:
    """The digest of the version."""
    for number in range(num_updates):
        await folding.fold(SpooledUpdate(str(folder / f"{number}.update"), Contribution(1.0 - number / 1000)))
    digest = (await folding.commit()).model.digest
    await folding.close()
    return digest


def alone(name: str, num_updates: int) -> tuple[float, int, str]:
    """Seconds, peak of memory and digest of this process; to be called in a fresh one."""
    folder = Path(name)
    blobs = BlobStore(folder / "blobs")
    begin = time.perf_counter()
    digest = asyncio.run(aggregated(LocalAggregation(inputs_of(folder, "", 1), blobs), folder, num_updates))
    return time.perf_counter() - begin, peak_bytes(os.getpid()), digest


def on_ranks(folder: Path, num_updates: int, ranks: int, split: str) -> tuple[float, list[int], str]:
    """Seconds, the peaks of memory of the ranks, and the digest."""

    async def measure(processes: list[int]) -> tuple[float, list[int], str]:
        begin = time.perf_counter()
        folding = PoolAggregation(inputs_of(folder, split, ranks), BlobStore(folder / "blobs"), WorkerPool.at(folder))
        await folding.begin()
        digest = await aggregated(folding, folder, num_updates)
        return time.perf_counter() - begin, [peak_bytes(process) for process in processes], digest

    with running_pool(folder, ranks) as processes:
        return asyncio.run(measure(processes))


@contextmanager
def running_pool(folder: Path, ranks: int) -> Generator[list[int]]:
    """A pool; the processes of its ranks."""
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
    """The most memory that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def copied_gb_s(num_parameters: int) -> float:
    """How fast one thread copies memory: the best of five."""
    source = np.ones(num_parameters, np.float32)
    target = np.empty_like(source)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = max(best, source.nbytes / (time.perf_counter() - begin) / 1e9)
    return best


def gpu_gb_s() -> float:
    """How fast the first GPU copies its own memory."""
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
