"""Measure the bytes of a client of the digits job per round, up and down, and the accuracy with compression.

    python benchmarks/both_ways.py [--seeds 3] [--json] [--save]

The digits job (examples/digits) is trained for 20 rounds as in `update_codecs.py`: with the functions of client and
server, without their processes. Bytes are those of the files in every round but the first one, in which clients
download the whole initial model.
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
from typing import Annotated

import numpy as np
import typer

import update_codecs
from fedplat.cli import job_files
from fedplat.codecs import CodecOptions, Eden
from fedplat.codecs.container import Format
from fedplat.model import Parameters
from report import Cell, JsonOption, Report, SaveOption, finish

WAYS: dict[str, tuple[CodecOptions | None, CodecOptions | None]] = {
    "float32 both ways": (None, None),
    "eden, 4 bits, up": (Eden(bits=4), None),
    "eden, 4 bits, both ways": (Eden(bits=4), Eden(bits=4)),
    "eden, 1 bit up, 4 bits down": (Eden(bits=1), Eden(bits=4)),
}


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each combination.")] = 3,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Train with each combination of codecs, and count the bytes."""
    model = job_files.load(update_codecs.DIGITS / "job.toml").parameters
    accuracies = train_all(seeds)
    rows: list[tuple[Cell, ...]] = [
        (name, *(size_of(model, codec) / 1000 for codec in codecs), accuracies[name]) for name, codecs in WAYS.items()
    ]
    notes = (f"Accuracy: of the digits job on held-out images after 20 rounds, mean of {seeds} trainings.",)
    columns = ("codecs", "up, kB", "down, kB", "accuracy")
    finish(Report(name="both_ways", title="Up and down", columns=columns, rows=tuple(rows), notes=notes), as_json, save)


def size_of(model: Parameters, codec: CodecOptions | None) -> int:
    """Return the size of an update or a step of this model in bytes."""
    if codec is None:
        return model.schema.file_size_bytes
    return sum(map(len, Format(codec, model.schema).encode(model, np.random.default_rng(1))))


def train_all(seeds: int) -> dict[str, float]:
    """Return the mean accuracy of each combination. Runs as many trainings at a time as there are cores."""
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {
            name: [pool.submit(update_codecs.train, up or update_codecs.Plain(), seed, down) for seed in range(seeds)]
            for name, (up, down) in WAYS.items()
        }
        return {name: statistics.mean(job.result() for job in jobs) for name, jobs in running.items()}


if __name__ == "__main__":
    typer.run(main)
