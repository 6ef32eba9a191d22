"""What the tests of this folder run on the ranks."""

from __future__ import annotations

import os
import pkgutil
import resource
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from fedplat.pytorch.distributed import Ranks, Transport, VectorLayout, make_vectors
from fedplat.pytorch.distributed.bench.measure import Buffers, MakeTrials, measure
from fedplat.pytorch.distributed.bench.records import FACTORS, BenchPlan, BenchStep
from fedplat.pytorch.distributed.exchange import P2PVectors
from fedplat.pytorch.distributed.group import prove_key

LIBRARY_TRIALS = "fedplat.pytorch.distributed.bench.measure:make_library_trials"


def vector_of(logical: int, size: int) -> npt.NDArray[np.float32]:
    """Numbers of very different sizes: their sum depends on the order in which they are added."""
    generator = np.random.default_rng(logical)
    return (generator.standard_normal(size) * 10.0 ** generator.integers(-4, 5, size)).astype(np.float32)


def add_up(ranks: Ranks, transport: Transport, logical: int, bounds: list[int], folder: str) -> dict[str, Any]:
    """Writes this rank's columns of the sum, and the whole of what becomes of them, twice in the same memory."""
    layout = VectorLayout(logical, tuple(bounds))
    # Several messages for each column.
    p2p = P2PVectors(ranks, layout, length=20_000) if transport == "p2p" else None
    with p2p or make_vectors(ranks, layout, transport) as terms:
        zeros = not any(vector.any() for vector in terms.own.values())
        for name in ("first", "second"):
            for number, vector in terms.own.items():
                vector.copy_(torch.from_numpy(vector_of(number, layout.size)))
            columns = terms.reduce_scatter()
            Path(folder, f"columns-{name}-{ranks.rank}").write_bytes(columns.cpu().numpy().tobytes())
            columns *= 2
            Path(folder, f"whole-{name}-{ranks.rank}").write_bytes(terms.all_gather().cpu().numpy().tobytes())
        return {"class": type(terms).__name__, "zeros": zeros, "own": list(terms.own)}


def memory_files(ranks: Ranks) -> list[int]:
    """How many memory files this process has open and mapped, while vectors are in use and afterwards."""

    def count() -> list[int]:
        opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        mapped = Path("/proc/self/maps").read_text("utf-8").splitlines()
        return [sum("memfd:fedplat" in line for line in lines) for lines in (opened, mapped)]

    with make_vectors(ranks, VectorLayout.even(2, ranks.size, 10), "shared_memory") as terms:
        terms.all_reduce()
        during = count()
    del terms
    return during + count()


def make_vectors_without_files(ranks: Ranks, transport: Transport) -> str:
    """The class of the vectors that come out."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with make_vectors(ranks, VectorLayout.even(2, ranks.size, 10), transport) as terms:
            return type(terms).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def of_another_number(ranks: Ranks) -> None:
    make_vectors(ranks, VectorLayout.even(2, 3, 10))


def talk(ranks: Ranks) -> dict[str, Any]:
    contents = [b"", b"\0", bytes(range(256)) * 1000]
    return {
        "gathered": [len(each) for each in ranks.all_gather(contents[ranks.rank])],
        "same": ranks.all_gather(contents[ranks.rank]) == contents[: ranks.size],
        "told": ranks.broadcast(b"from " + str(ranks.rank).encode()).decode(),
        "nothing": ranks.broadcast().decode(),
        "is_first": ranks.is_first,
    }


def in_parts(ranks: Ranks) -> list[str | None]:
    """What the parts of the group say, and the mistakes."""
    said: list[str | None] = []
    for count in (1, 2, 2, 3, 99):
        part = ranks.subgroup(count)
        said.append(None if part is None else b" ".join(part.all_gather(f"{part.rank}/{part.size}".encode())).decode())
    part = ranks.subgroup(2)
    for group, count in ((part, 1), (ranks, 0)):
        try:
            said.append(None if group is None else str(group.subgroup(count)))
        except ValueError as exc:
            said.append(str(exc))
    return said


def add_up_in_subgroup(ranks: Ranks, transport: Transport) -> list[float] | None:
    """The sum of two of three ranks."""
    part = ranks.subgroup(2)
    if part is None:
        return None
    with make_vectors(part, VectorLayout(3, (0, 2, 4)), transport) as terms:
        for number, vector in terms.own.items():
            vector += number + 1
        return terms.all_reduce().tolist()


def die_or_wait(ranks: Ranks, victim: int, transport: Transport) -> None:
    """One rank is killed; the others add up."""
    with make_vectors(ranks, VectorLayout.even(ranks.size, ranks.size, 2**20), transport) as terms:
        if ranks.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        terms.all_reduce()


def gather_or_die(ranks: Ranks, victim: int) -> None:
    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.all_gather(b"here")


def bench(ranks: Ranks, sizes: list[int], trials: str = LIBRARY_TRIALS) -> dict[str, Any]:
    """The report, and the steps."""
    steps: list[BenchStep] = []
    plan = BenchPlan(sizes=sizes, collectives=list(FACTORS), seconds=0.0, probe=2**20)
    make_trials: MakeTrials = pkgutil.resolve_name(trials)
    report = measure(ranks, plan, steps.append, make_trials)
    return {"report": msgspec.to_builtins(report), "steps": [(step.done, step.total) for step in steps]}


def what_is_correct_without_doing_it(ranks: Ranks) -> list[str]:
    buffers = Buffers.allocate(ranks, 48)
    found: list[str] = []
    for collective in FACTORS:
        buffers.prepare(collective)
        if buffers.is_correct(collective):
            found.append(collective)
    return found


def prove(ranks: Ranks, keys: list[str]) -> str:
    """What a rank with its key of these makes of the others."""
    try:
        prove_key(ranks, keys[ranks.rank].encode())
    except PermissionError as exc:
        return str(exc)
    return "a rank"
