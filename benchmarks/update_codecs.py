"""Measure the time, the size and the error of compressing updates, and the effect on a training.

    python benchmarks/update_codecs.py [--size 1000000 --size 25000000] [--repeats 5] [--seeds 3] [--json] [--save]

Each codec encodes and decodes a vector of normal numbers, block by block in one thread, in turns with the others and
with a plain copy in the same blocks. Then the ten clients of the digits job (examples/digits) train for 20 rounds, and
their updates go through the codec before the aggregation. The trainings use the functions of client and server without
their processes, so codecs are the only difference.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from fedplat.aggregate import Accumulator, Contribution, Rule, compress_step
from fedplat.cli import job_files
from fedplat.codecs import Bf16, Codec, CodecOptions, Eden, Plain, Quantize, TopK, with_error_feedback
from fedplat.job import build_rule
from fedplat.model import BLOCK, Blocks, Parameters, Vector, VectorBlocks
from report import Cell, JsonOption, Report, SaveOption, finish

DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits"
CODECS: dict[str, Plain | Bf16 | Quantize | TopK | Eden] = {
    "float32": Plain(),
    "float32, zstd": Plain(zstd=True),
    "bf16": Bf16(),
    "bf16, zstd": Bf16(zstd=True),
    "quantize, 8 bits": Quantize(bits=8),
    "quantize, 4 bits": Quantize(bits=4),
    "quantize, 4 bits, zstd": Quantize(bits=4, zstd=True),
    "topk, 10 %": TopK(fraction=0.1),
    "topk, 1 %": TopK(fraction=0.01),
    "eden, 4 bits": Eden(bits=4),
    "eden, 3 bits": Eden(bits=3),
    "eden, 2 bits": Eden(bits=2),
    "eden, 1 bit": Eden(bits=1),
}
COPY = "plain copy"
NOTES = (
    "GB/s are bytes of the float32 vector by seconds that one core worked. The error is the squared one divided by the "
    "vector's squared length, for normal numbers; that of random rotation (eden) is the same for all vectors. Top-k "
    "sends the rest later: each client keeps what was not sent, and adds it to its next update.",
)


def main(
    size: Annotated[list[int] | None, typer.Option(min=1, help="Number of parameters.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements; the median is shown.")] = 5,
    seeds: Annotated[int, typer.Option(min=0, help="Number of trainings with each codec; 0 omits the accuracy.")] = 3,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure all codecs."""
    sizes = size or [1_000_000, 25_000_000]
    speeds = {count: measure(count, repeats) for count in sizes}
    accuracies = train_all(seeds) if seeds else {}
    rows: list[tuple[Cell, ...]] = []
    for name in (*CODECS, COPY):
        bits, error = small_facts(CODECS[name].build(), sizes[0]) if name in CODECS else (32.0, 0.0)
        timed = (speed for count in sizes for speed in speeds[count][name])
        rows.append((name, bits, error, *timed, accuracies.get(name)))
    timed_columns = (f"{what}, {count / 1e6:g} M, GB/s" for count in sizes for what in ("encode", "decode"))
    columns = ("codec", "bits a parameter", "error", *timed_columns, "accuracy")
    notes = (*NOTES, f"Accuracy: of the digits job on held-out images after 20 rounds, mean of {seeds} trainings.")
    finish(Report(name="codecs", title="Codecs", columns=columns, rows=tuple(rows), notes=notes), as_json, save)


def vector_of(size: int) -> Vector:
    """Return a vector with the size of values of an update, but without its structure."""
    return np.random.default_rng(1).normal(0, 0.01, size).astype(np.float32)


def small_facts(codec: Codec, size: int) -> tuple[float, float]:
    """Return the bits per parameter, and the normalised squared error."""
    vector = vector_of(size)
    payload = b"".join(codec.encode(VectorBlocks(vector), np.random.default_rng(1)))
    difference = whole(codec.decode(payload, size)).astype(np.float64) - vector
    return len(payload) * 8 / size, float(np.square(difference).sum() / np.square(vector, dtype=np.float64).sum())


def whole(blocks: Blocks) -> Vector:
    """Return all blocks as one vector."""
    return np.concatenate([block.copy() for block in blocks])


def measure(size: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the GB/s of encoding and decoding, by codec."""
    vector, codecs = vector_of(size), {name: options.build() for name, options in CODECS.items()}
    payloads: dict[str, bytes] = {}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*CODECS, COPY)}
    for _ in range(repeats + 1):
        for name, codec in codecs.items():
            began = time.thread_time()
            parts = list(codec.encode(VectorBlocks(vector), np.random.default_rng(1)))
            encoded = time.thread_time()
            payloads[name] = b"".join(parts)
            joined = time.thread_time()
            draw(codec.decode(payloads[name], size))
            seconds[name].append((encoded - began, time.thread_time() - joined))
        began = time.thread_time()
        copy_in_blocks(vector)
        took = time.thread_time() - began
        seconds[COPY].append((took, took))
    # The first measurement is omitted, because it includes page faults of new memory.
    return {
        name: (
            vector.nbytes / 1e9 / statistics.median(one for one, _ in times[1:]),
            vector.nbytes / 1e9 / statistics.median(two for _, two in times[1:]),
        )
        for name, times in seconds.items()
    }


def draw(blocks: Iterable[Vector]) -> None:
    """Decode all blocks, without storing them."""
    for _ in blocks:
        pass


def copy_in_blocks(vector: Vector) -> None:
    """Read a vector in the blocks of the codecs."""
    scratch = np.empty(BLOCK, np.float32)
    for block in VectorBlocks(vector):
        scratch[: block.size] = block


def train_all(seeds: int) -> dict[str, float]:
    """Return the mean accuracy by codec. Runs as many trainings at a time as there are cores."""
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # zstd is lossless, so its accuracy is that of the training without it.
        lossy = dict.fromkeys(msgspec.structs.replace(options, zstd=False) for options in CODECS.values())
        running = {options: [pool.submit(train, options, seed) for seed in range(seeds)] for options in lossy}
        means = {options: statistics.mean(job.result() for job in jobs) for options, jobs in running.items()}
        return {name: means[msgspec.structs.replace(options, zstd=False)] for name, options in CODECS.items()}


def train(options: CodecOptions, seed: int, downlink: CodecOptions | None = None) -> float:
    """Return the accuracy on held-out digits after all rounds with a codec for updates, and one for versions."""
    import torch

    from fedplat_client import Task
    from fedplat_client.trainers.torch import TorchTrainer

    sys.path.insert(0, str(DIGITS))
    digits, evaluate = importlib.import_module("model"), importlib.import_module("evaluate").evaluate
    torch.set_num_threads(1)
    job = job_files.load(DIGITS / "job.toml")
    current, inner = job.parameters, build_rule(job.spec)
    rules = [rule_of(inner, downlink, 100 * seed + number) for number in range(job.spec.rounds + 1)]
    state = rules[0].init(current.schema.num_floating)
    clients = range(digits.NUM_CLIENTS)
    trainers = [
        TorchTrainer(model=digits.build, data=digits.client_data(client), seed=100 * seed + client)
        for client in clients
    ]
    senders = [Sender(options.build(), current.schema.num_floating, 100 * seed + client) for client in clients]
    for number in range(1, job.spec.rounds + 1):
        accumulator = Accumulator(current.schema, rules[number])
        for trainer, sender in zip(trainers, senders, strict=True):
            task = Task(name="digits", parameters=current.copy(), config=job.spec.config, round=number)
            result = trainer(task)
            update = result.to_update(current)
            accumulator.fold(sender.sent(update), Contribution(job.spec.weight(result.num_examples)))
        current, state = accumulator.finish(current, state)
    return evaluate(current)["accuracy"]


def rule_of(inner: Rule, downlink: CodecOptions | None, seed: int) -> Rule:
    """Return the job's rule, with encoded steps if there is a downlink."""
    return inner if downlink is None else compress_step(downlink.build(), seed, lambda _: None)(inner)


class Sender:
    """A client's side of a codec: its randomness, and its residual if the codec needs feedback."""

    def __init__(self, codec: Codec, size: int, seed: int) -> None:
        self._codec = codec
        self._rng = np.random.default_rng(seed)
        self._feedback = with_error_feedback(codec)
        self._residual = self._feedback.init(size)

    def sent(self, update: Parameters) -> Any:
        """Return the update as the server decodes it."""
        vector = VectorBlocks(update.to_vector())
        if self._codec.needs_feedback:
            payload, self._residual = self._feedback.encode(self._residual, vector, self._rng)
        else:
            payload = b"".join(self._codec.encode(vector, self._rng))
        arrived = update.copy()
        arrived.to_vector()[:] = whole(self._codec.decode(payload, vector.size))
        return arrived


if __name__ == "__main__":
    typer.run(main)
