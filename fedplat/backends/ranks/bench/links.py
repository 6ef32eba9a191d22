"""What memory and links can do, to compare collectives with."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec
import torch
from torch import distributed

from fedplat.backends.ranks import Ranks
from fedplat.backends.ranks.bench.records import Link

REPETITIONS = 5
_CHUNK = 1 << 20


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(ranks: Ranks, run: Callable[[], object], times: int = 1) -> float:
    """Seconds that one of `times` runs takes until the last rank has done it; the same number on all ranks."""
    ranks.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(ranks.device)
    took = msgspec.msgpack.encode(time.perf_counter() - begin)
    return max(msgspec.msgpack.decode(each, type=float) for each in ranks.gather(took)) / times


def copies(ranks: Ranks, num_bytes: int) -> list[float]:
    """GB/s at which each rank copies its memory while all others do so, too."""
    source = torch.ones(num_bytes // 4, device=ranks.device)
    target = torch.empty_like(source)
    found: list[float] = []
    target.copy_(source)
    for _ in range(REPETITIONS):
        synchronize(ranks.device)
        ranks.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(ranks.device)
        found.append(time.perf_counter() - begin)
    mine = msgspec.msgpack.encode(num_bytes / min(found) / 1e9)
    return [msgspec.msgpack.decode(each, type=float) for each in ranks.gather(mine)]


def pairs(ranks: Ranks) -> list[tuple[int, int]]:
    """The links to measure, both ways: all of a small group; of a large one those of the ring, and of rank 0."""
    size = ranks.size
    if size <= 16:
        return [(a, b) for a in range(size) for b in range(size) if a != b]
    ring = {(rank, (rank + 1) % size) for rank in range(size)} | {(0, rank) for rank in range(1, size)}
    return sorted(ring | {(b, a) for a, b in ring})


def link(ranks: Ranks, pair: tuple[int, int], num_bytes: int) -> Link:
    """What gets from one rank to another, all others waiting."""
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

    timed(ranks, run)
    seconds = min(timed(ranks, run) for _ in range(REPETITIONS))
    return Link(sender, receiver, num_bytes / seconds / 1e9)


def tcp(ranks: Ranks, num_bytes: int) -> float:
    """GB/s of a plain TCP stream from rank 1 to rank 0 over the loopback: what no Gloo can beat by much."""
    content = memoryview(bytearray(_CHUNK))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(ranks.told(str(listener.getsockname()[1]).encode()))
        found: list[float] = []
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

            found.append(timed(ranks, run))
            if stream is not None:
                stream.close()
    return num_bytes // _CHUNK * _CHUNK / min(found) / 1e9
