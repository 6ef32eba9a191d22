"""The bandwidth of memory and of links, as a reference for collectives."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec
import torch
from torch import distributed

from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.distributed.bench.records import Link

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


def measure_link(ranks: Ranks, pair: tuple[int, int], num_bytes: int) -> Link:
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

    time_runs(ranks, run)
    seconds = min(time_runs(ranks, run) for _ in range(REPETITIONS))
    return Link(sender, receiver, num_bytes / seconds / 1e9)


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
