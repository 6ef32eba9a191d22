"""What a reader of the data folder learns of a private job whose noise is that of a tree: nothing, once it has ended.

The attack is that of the audit, number 24: seeds of nodes are read from whatever file has some, and their noise is
taken away from each published step. What is left is compared with what the client sent.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.aggregate import state_from_bytes
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.privacy import KEY_BYTES, Noise
from fedplat_server.verify.checker import verify
from server import harness
from server.harness import Site, job_file

ROUNDS, CLIP, NOISE, SIZE = 4, 1.0, 5.0, 20_000
TEXT = job_file(
    "tree",
    rounds=ROUNDS,
    goal=1,
    close="deadline",
    min_separation=1,
    more=f'[updates]\nweighting = "uniform"\nclip_norm = {CLIP}\n'
    f'[privacy]\nparticipation = "min_separation"\ndelta = 1e-6\nnoise_multiplier = {NOISE}\n',
)
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


def unmasked(folder: Path, models: list[Parameters]) -> list[float]:
    """For each published step the best correlation with the update in it that any sum of known noise gives."""
    known = [Noise(seed).normal("node", 0, SIZE) for seed in seeds(folder)]
    best: list[float] = []
    for round_, (before, after) in enumerate(itertools.pairwise(models), start=1):
        step, sent = after.to_vector().astype(float) - before.to_vector(), update(round_).to_vector()
        found = [
            step - NOISE * CLIP * sum((sign * one for sign, one in zip(signs, known, strict=True)), np.zeros(SIZE))
            for signs in itertools.product((-1, 0, 1), repeat=len(known))
        ]
        best.append(max(float(np.corrcoef(rest, sent)[0, 1]) for rest in found))
    return best


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


def holding(folder: Path, content: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


async def test_no_seed_is_left_when_a_job_has_ended(folder: Path) -> None:
    """The audit's attack: it found +1.000000 for every step."""
    async with harness.running(folder) as site:
        job = await train(site, range(1, ROUNDS + 1))
        models = [await site.operator.model(job, version) for version in range(ROUNDS + 1)]

        async def no_seed() -> bool:
            return not seeds(folder)

        with contextlib.suppress(AssertionError):  # the figures below say more
            await harness.until(no_seed, "the seeds to be gone")
        found = unmasked(folder, models)
        print("correlations:", *(f"{each:+.6f}" for each in found))
        assert max(found) < 0.1
        assert [one.state_removed_unix_s is not None for one in await site.store.inner.jobs.list_versions(job)] == [
            False,
            *[True] * ROUNDS,
        ]
    assert (await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []


@pytest.mark.fault("F48")
async def test_seeds_of_covered_nodes_are_gone_after_each_commit(folder: Path) -> None:
    """While the job goes on there are those of the open nodes; a restart goes on from them."""
    covered: list[list[float]] = []
    job = ""
    for round_ in range(1, ROUNDS + 1):
        async with harness.running(folder) as site:  # a new daemon for each round
            job = await train(site, range(round_, round_ + 1), job)
            state = (await site.store.inner.jobs.list_versions(job))[-1].version.state_digest
            path = folder / "blobs" / state[:2] / state[2:4] / state
            if round_ < ROUNDS:
                _, scalars = state_from_bytes(path.read_bytes())
                now = list(words(dict(scalars)))
                assert len(now) == round_.bit_count()
                covered = [*covered, *(seed for seed in now if seed not in covered)]

            async def only_open_nodes(round_: int = round_) -> bool:
                return len(seeds(folder)) == (round_.bit_count() if round_ < ROUNDS else 0)

            await harness.until(only_open_nodes, "the covered seeds to be gone")
    assert len(covered) == ROUNDS - 1
    for word in itertools.chain.from_iterable(covered):
        assert holding(folder, struct.pack("<d", word)) == []
    assert (await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []
