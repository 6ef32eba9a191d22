"""One rank of a measurement: `python -P -m fedplat.backends.ranks.bench SOCKET BACKEND PLAN`, started by torchrun.

Each rank says at the Unix socket SOCKET, in lines of JSON, how far it is, what came out, and why it failed.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import cast

import msgspec
import torch

from fedplat.backends.ranks import Backend, joined, store_of_one_host
from fedplat.backends.ranks.bench.measuring import measure
from fedplat.backends.ranks.bench.records import Done, Failed, Plan, Progress


def main() -> int:
    """Measures; the exit status."""
    address, backend, text = sys.argv[1:]
    plan = msgspec.json.decode(text, type=Plan)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)

        def tell(message: Progress | Done | Failed) -> None:
            connection.sendall(msgspec.json.encode(message) + b"\n")

        try:
            with joined(cast(Backend, backend), store=store_of_one_host(Path(address).parent)) as ranks:
                report = measure(ranks, plan, tell if ranks.is_first else lambda progress: None)
                if ranks.is_first:
                    tell(Done(report))
        except (RuntimeError, MemoryError, OSError, ValueError) as exc:
            tell(Failed(rank, f"{type(exc).__name__}: {exc}"))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
