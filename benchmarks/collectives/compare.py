"""Compare the collectives of Gloo or NCCL with a ring, a star, a tree, and shared memory.

    python benchmarks/collectives/compare.py [--ranks 2] [--max-size 1GB] [--collective all-reduce] [--json]

The options, the measurement and the output are those of `fedplat-server pool bench`, which measures only the library.
`--json` prints one object: the `BenchReport` of `fedplat/pytorch/distributed/bench/records.py`, with
`is_healthy` and `findings`. The results of each implementation are verified before it is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from fedplat.errors import FedplatError
from fedplat_server.cli.bench.command import make_command

RANK = Path(__file__).with_name("rank.py")

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(help="Compare collectives of Gloo or NCCL with other implementations, between ranks of this host.")(
    make_command((str(RANK),))
)

if __name__ == "__main__":
    try:
        app()
    except FedplatError as exc:
        sys.exit(f"error: {exc}")
