"""The measurement of a plan: collectives in all sizes, and the memory and links as a reference."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from torch import distributed

from fedplat import system
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.distributed.bench import records

REPETITIONS = 5
_CHUNK = 1 << 20


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_runs(ranks: Ranks, run: Callable[[], object], times: int = 1) -> float:
    """Return the seconds per run, of `times` runs, until the last rank is done; the same on all ranks."""
    ranks.barrier()
    started_at = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(ranks.device)
    took = msgspec.msgpack.encode(time.perf_counter() - started_at)
    return max(msgspec.msgpack.decode(each, type=float) for each in ranks.all_gather(took)) / times


def measure_copies(ranks: Ranks, num_bytes: int) -> list[float]:
    """Return the GB/s at which each rank copies its memory while all others do the same."""
    source = torch.ones(num_bytes // 4, device=ranks.device)
    target = torch.empty_like(source)
    durations: list[float] = []
    target.copy_(source)
    for _ in range(REPETITIONS):
        synchronize(ranks.device)
        ranks.barrier()
        started_at = time.perf_counter()
        target.copy_(source)
        synchronize(ranks.device)
        durations.append(time.perf_counter() - started_at)
    mine = msgspec.msgpack.encode(num_bytes / min(durations) / 1e9)
    return [msgspec.msgpack.decode(each, type=float) for each in ranks.all_gather(mine)]


def choose_pairs(ranks: Ranks) -> list[tuple[int, int]]:
    """Return the links to measure, both ways: all of a small group; of a large one a ring, and those of rank 0."""
    size = ranks.size
    if size <= 16:
        return [(a, b) for a in range(size) for b in range(size) if a != b]
    ring = {(rank, (rank + 1) % size) for rank in range(size)} | {(0, rank) for rank in range(1, size)}
    return sorted(ring | {(b, a) for a, b in ring})


def measure_link(ranks: Ranks, pair: tuple[int, int], num_bytes: int) -> records.Link:
    """Return the bandwidth from one rank to another while all others wait."""
    sender, receiver = pair
    values = torch.zeros(num_bytes // 4, device=ranks.device)

    def run() -> None:
        if ranks.rank == sender:
            work = distributed.batch_isend_irecv([distributed.P2POp(distributed.isend, values, receiver)])
        elif ranks.rank == receiver:
            work = distributed.batch_isend_irecv([distributed.P2POp(distributed.irecv, values, sender)])
        else:
            return
        for each in work:
            each.wait()

    ranks.connect()
    time_runs(ranks, run)
    seconds = min(time_runs(ranks, run) for _ in range(REPETITIONS))
    return records.Link(sender, receiver, num_bytes / seconds / 1e9)


def measure_tcp(ranks: Ranks, num_bytes: int) -> float:
    """Return the GB/s of a plain TCP stream from rank 1 to rank 0 over the loopback, an upper limit for Gloo."""
    content = memoryview(bytearray(_CHUNK))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(ranks.broadcast(str(listener.getsockname()[1]).encode()))
        durations: list[float] = []
        for _ in range(REPETITIONS):
            stream: socket.socket | None = None
            if ranks.rank == 1:
                stream = socket.create_connection(("127.0.0.1", port))
            elif ranks.is_first:
                stream, _ = listener.accept()

            def run(stream: socket.socket | None = stream) -> None:
                for _ in range(num_bytes // _CHUNK if stream is not None else 0):
                    assert stream is not None
                    if ranks.is_first:
                        stream.recv_into(content, _CHUNK, socket.MSG_WAITALL)
                    else:
                        stream.sendall(content)

            durations.append(time_runs(ranks, run))
            if stream is not None:
                stream.close()
    return num_bytes // _CHUNK * _CHUNK / min(durations) / 1e9


PATTERN_PERIOD = 1021
"""Entry i of rank r's vector is i mod 1021, plus r: a prime, so that all pieces differ, and sums are exact."""
ADDING = frozenset({"reduce", "reduce-scatter", "all-reduce"})


@dataclasses.dataclass(frozen=True)
class Buffers:
    """One rank's vectors of one size: the input `give`, the output `take`, and `scratch` memory.

    Collectives that add have their input in `take`, and write the result there, like nccl-tests in place.
    """

    ranks: Ranks
    give: torch.Tensor
    take: torch.Tensor
    scratch: torch.Tensor

    @classmethod
    def allocate(cls, ranks: Ranks, size_bytes: int) -> Buffers:
        """Return buffers of at most `size_bytes`, with as many entries for each rank."""
        count = size_bytes // 4 // ranks.size * ranks.size
        buffers = cls(ranks, *(torch.empty(count, dtype=torch.float32, device=ranks.device) for _ in range(3)))
        fill_pattern(buffers.give, 0, 1.0, ranks.rank)
        return buffers

    @property
    def count(self) -> int:
        """Number of entries of a vector, a multiple of the number of ranks."""
        return self.give.numel()

    def piece(self, rank: int) -> slice:
        """Return a rank's part of a vector."""
        length = self.count // self.ranks.size
        return slice(rank * length, (rank + 1) * length)

    @property
    def mine(self) -> slice:
        """This rank's part of a vector."""
        return self.piece(self.ranks.rank)

    def prepare(self, collective: str) -> None:
        """Set `take` to the input that the collective expects there; no earlier result remains in it."""
        self.take.zero_()
        if collective in ADDING:
            self.take.copy_(self.give)
        elif collective in ("all-gather", "gather"):
            self.take[self.mine] = self.give[self.mine]
        elif collective == "broadcast" and self.ranks.is_first:
            self.take.copy_(self.give)

    def is_correct(self, collective: str) -> bool:
        """Return whether `take` holds the result of the collective on this rank. Overwrites `scratch`."""
        ranks, first = self.ranks, self.ranks.is_first
        terms = (float(ranks.size), ranks.size * (ranks.size - 1) / 2)  # of sums
        expected: list[tuple[slice, int, float, float]] = []  # a part, its first entry, factor and summand
        everything = slice(0, self.count)
        if collective == "broadcast":
            expected = [(everything, 0, 1.0, 0.0)]
        elif collective == "scatter":
            expected = [(self.mine, self.mine.start, 1.0, 0.0)]
        elif collective == "all-gather" or (collective == "gather" and first):
            expected = [(self.piece(rank), self.piece(rank).start, 1.0, float(rank)) for rank in range(ranks.size)]
        elif collective == "all-to-all":
            expected = [(self.piece(rank), self.mine.start, 1.0, float(rank)) for rank in range(ranks.size)]
        elif collective == "reduce-scatter":
            expected = [(self.mine, self.mine.start, *terms)]
        elif collective == "all-reduce" or (collective == "reduce" and first):
            expected = [(everything, 0, *terms)]
        for part, start, factor, summand in expected:
            fill_pattern(self.scratch[part], start, factor, summand)
            if not torch.equal(self.take[part], self.scratch[part]):
                return False
        return True


def fill_pattern(values: torch.Tensor, first: int, factor: float, summand: float) -> None:
    """Fill the part of a vector that starts at entry `first` with (entry mod 1021) * factor + summand."""
    length = 1024 * PATTERN_PERIOD
    entries = torch.arange(first, first + min(length, values.numel()), device=values.device)
    block = (entries % PATTERN_PERIOD).float() * factor + summand
    for part in values.split(length):
        part.copy_(block[: part.numel()])


MIN_REPETITIONS, MAX_REPETITIONS = 3, 25
_BATCH_S = 0.005
"""Short operations are timed in batches of about this duration; otherwise the start times of the ranks dominate."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One implementation of a collective, and the buffers that it works on."""

    collective: str
    implementation: str
    buffers: Buffers
    run: Callable[[], object]


MakeTrials: TypeAlias = Callable[[Buffers, Sequence[str]], list[Trial]]
"""Returns the trials of one size, for collectives by their names; as many for each size, on all ranks."""


def make_library_trials(buffers: Buffers, collectives: Sequence[str]) -> list[Trial]:
    """Return a trial of Gloo or NCCL for each collective."""
    return [
        Trial(name, records.LIBRARY, buffers, functools.partial(COLLECTIVES[name], buffers)) for name in collectives
    ]


def measure(
    ranks: Ranks,
    plan: records.BenchPlan,
    note: Callable[[records.BenchStep], None],
    make_trials: MakeTrials = make_library_trials,
) -> records.BenchReport:
    """Measure everything in the plan, and return the report on every rank; `note` is called before each step."""
    load = os.getloadavg()[0]
    pairs = choose_pairs(ranks)
    num_trials = len(make_trials(Buffers.allocate(ranks, plan.sizes[0]), plan.collectives))
    total = 2 + len(pairs) + len(plan.sizes) * num_trials
    note(records.BenchStep(0, total, "the memory of all ranks"))
    copies = measure_copies(ranks, plan.probe)
    note(records.BenchStep(1, total, "TCP"))
    tcp = measure_tcp(ranks, plan.probe)
    measured_links: list[records.Link] = []
    for pair in pairs:
        note(records.BenchStep(2 + len(measured_links), total, f"the link from rank {pair[0]} to rank {pair[1]}"))
        measured_links.append(measure_link(ranks, pair, plan.probe))
    measurements: list[records.Measurement] = []
    for size in plan.sizes:
        for trial in make_trials(Buffers.allocate(ranks, size), plan.collectives):
            doing = f"{trial.collective} ({trial.implementation}), {4 * trial.buffers.count} bytes"
            note(records.BenchStep(2 + len(pairs) + len(measurements), total, doing))
            measurements.append(_measure_trial(ranks, plan, trial))
    return records.BenchReport(
        ranks=ranks.size,
        device=torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        library="nccl" if ranks.device.type == "cuda" else "gloo",
        cores=system.num_cores(),
        load=load,
        copies=copies,
        links=measured_links,
        tcp=tcp,
        measurements=measurements,
    )


def _measure_trial(ranks: Ranks, plan: records.BenchPlan, trial: Trial) -> records.Measurement:
    trial.buffers.prepare(trial.collective)
    estimate = time_runs(ranks, trial.run)  # warms up
    is_correct = all(each == b"1" for each in ranks.all_gather(b"%d" % trial.buffers.is_correct(trial.collective)))
    batch = max(1, min(50, int(min(_BATCH_S, plan.seconds) / estimate)))
    repetitions = max(MIN_REPETITIONS, min(MAX_REPETITIONS, int(plan.seconds / (estimate * batch))))
    seconds = statistics.median(time_runs(ranks, trial.run, batch) for _ in range(repetitions))
    size = 4 * trial.buffers.count
    algbw, busbw = records.bandwidths(trial.collective, size, seconds, ranks.size)
    return records.Measurement(
        collective=trial.collective,
        implementation=trial.implementation,
        size=size,
        seconds=seconds,
        repetitions=repetitions,
        algbw=algbw,
        busbw=busbw,
        is_correct=is_correct,
    )


Operation: TypeAlias = Callable[[Buffers], object]
_library: Any = distributed
# PyTorch renamed these functions; the extra allows versions with either name.
_all_gather: Any = getattr(_library, "all_gather_single", None) or _library.all_gather_into_tensor
_reduce_scatter: Any = getattr(_library, "reduce_scatter_single", None) or _library.reduce_scatter_tensor


def _scatter(buffers: Buffers) -> None:
    pieces = list(buffers.give.chunk(buffers.ranks.size)) if buffers.ranks.is_first else None
    distributed.scatter(buffers.take[buffers.mine], pieces, 0)


def _gather(buffers: Buffers) -> None:
    pieces = list(buffers.take.chunk(buffers.ranks.size)) if buffers.ranks.is_first else None
    distributed.gather(buffers.give[buffers.mine], pieces, 0)


COLLECTIVES: Mapping[str, Operation] = {
    "broadcast": lambda buffers: _library.broadcast(buffers.take, 0),
    "scatter": _scatter,
    "gather": _gather,
    "all-gather": lambda buffers: _all_gather(buffers.take, buffers.give[buffers.mine]),
    "all-to-all": lambda buffers: _library.all_to_all_single(buffers.take, buffers.give),
    "reduce": lambda buffers: _library.reduce(buffers.take, 0),
    "reduce-scatter": lambda buffers: _reduce_scatter(buffers.take[buffers.mine], buffers.give),
    "all-reduce": lambda buffers: _library.all_reduce(buffers.take),
}
"""The collectives by name; rank 0 is the root of those that have one."""
