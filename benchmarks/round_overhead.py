"""What does a whole round cost when training costs nothing?

    python benchmarks/round_overhead.py [--clients 4] [--rounds 50] [--model-bytes 4096] [--json]

A real server process and real client processes over loopback; SQLite and blobs on the disk, every version synced.
A round lasts from one committed version to the next: check-in, selection, download, (no) training, upload, report,
aggregation, commit. The first rounds are left out: processes load code then.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from deployment import deploy, measure
from models import alike, parameters

WARM_UP = 3


def main(
    clients: Annotated[int, typer.Option(min=1, help="Client processes, all of them in each round.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to measure.")] = 50,
    model_bytes: Annotated[int, typer.Option(min=4, help="Size of the model, float32.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="The last line is one JSON object.")] = False,
) -> None:
    """Measure the time of rounds whose trainer does nothing."""
    with tempfile.TemporaryDirectory() as folder, deploy(Path(folder), clients) as deployment:
        seconds = measure(deployment, clients, rounds + WARM_UP, parameters(alike(model_bytes)))[WARM_UP:]
    result = {
        "clients": clients,
        "model_bytes": model_bytes,
        "rounds": len(seconds),
        "median_s": round(statistics.median(seconds), 5),
        "min_s": round(min(seconds), 5),
        "p90_s": round(float(np.percentile(seconds, 90)), 5),
        "max_s": round(max(seconds), 5),
        "python": platform.python_version(),
    }
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(
            f"no-op round, {clients} clients, {model_bytes} bytes: median {result['median_s'] * 1000:.1f} ms "
            f"(min {result['min_s'] * 1000:.1f}, p90 {result['p90_s'] * 1000:.1f}, max {result['max_s'] * 1000:.1f}) "
            f"over {len(seconds)} rounds"
        )


if __name__ == "__main__":
    typer.run(main)
