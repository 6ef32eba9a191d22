"""One rank of a measurement: `python -P -m fedplat.pytorch.distributed.bench SOCKET BACKEND PLAN`, started by torchrun.

Each rank reports its progress, its result and its failure at the Unix socket SOCKET, in lines of JSON.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import cast

import msgspec
import torch

from fedplat.config.decoding import prepare_type
from fedplat.pytorch.distributed import Backend, join_group, make_file_store
from fedplat.pytorch.distributed.bench.measure import MakeTrials, make_library_trials, measure
from fedplat.pytorch.distributed.bench.records import BenchFailed, BenchFinished, BenchPlan, BenchStep


def main(make_trials: MakeTrials = make_library_trials) -> int:
    """Measure, and return the exit status."""
    address, backend, text = sys.argv[1:]
    plan = msgspec.json.decode(text, type=prepare_type(BenchPlan))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)

        def send(message: BenchStep | BenchFinished | BenchFailed) -> None:
            connection.sendall(msgspec.json.encode(message) + b"\n")

        try:
            with join_group(cast(Backend, backend), store=make_file_store(Path(address).parent)) as ranks:
                report = measure(ranks, plan, send if ranks.is_first else lambda step: None, make_trials)
                if ranks.is_first:
                    send(BenchFinished(report))
        except (RuntimeError, MemoryError, OSError, ValueError) as exc:
            send(BenchFailed(rank, f"{type(exc).__name__}: {exc}"))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
