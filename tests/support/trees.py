"""Jobs whose noise is a tree, and the seeds that are left of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedplat.aggregate import state_from_bytes
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.privacy import KEY_BYTES
from support.daemons import Site
from support.jobs import job_file

ROUNDS, CLIP, NOISE, SIZE = 4, 1.0, 5.0, 20_000


def text(rounds: int) -> str:
    """The file of a job with so many rounds."""
    more = f'[updates]\nweighting = "uniform"\nclip_norm = {CLIP}\n'
    more += f'[privacy]\nparticipation = "min_separation"\ndelta = 1e-6\nnoise_multiplier = {NOISE}\n'
    return job_file("tree", rounds=rounds, goal=1, close="deadline", min_separation=1, more=more)


TEXT = text(ROUNDS)

_WORDS, _BITS = 6, 43


def model_of(values: np.ndarray[Any, Any]) -> Parameters:
    return Parameters.from_arrays({"weight": values.astype("f4")})


def update(round_: int) -> Parameters:
    values = np.random.default_rng(round_).normal(size=SIZE)
    return model_of(values * CLIP / np.linalg.norm(values))


def words(scalars: dict[str, float]) -> Iterator[list[float]]:
    """The words of each seed that a rule remembers."""
    for level in range(ROUNDS.bit_length()):
        seed = [scalars.get(f"tree seed {level} {index}", 0.0) for index in range(_WORDS)]
        if any(seed):
            yield seed


def seeds(folder: Path) -> list[bytes]:
    """Every seed in every file of a folder."""
    found = set[bytes]()
    for path in folder.rglob("*"):
        if not path.is_file() or path.suffix in (".sqlite", ".lock"):
            continue
        with contextlib.suppress(FedplatError, ValueError, KeyError, OSError):
            _, scalars = state_from_bytes(path.read_bytes())
            for seed in words(dict(scalars)):
                number = sum(int(word) << (_BITS * index) for index, word in enumerate(seed))
                found.add(number.to_bytes(KEY_BYTES, "big"))
    return sorted(found)


async def train(site: Site, rounds: range, job: str = "") -> str:
    """Two clients take turns; the job's id."""
    job = job or await site.operator.start(TEXT, model_of(np.zeros(SIZE)))
    clients = [await site.enroll(key=f"client {number}") for number in range(2)]
    for round_ in rounds:
        client = clients[round_ % 2]
        work = await client.assignment()
        assert (await client.deliver(work.token, update(round_))).HasField("receipt")
        await site.operator.until(job, "version", str(round_))
    return job
