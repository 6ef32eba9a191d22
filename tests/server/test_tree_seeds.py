"""What a reader of the data folder learns about a private job with tree noise: nothing, once it has ended.

The attack is that of the audit, number 24: seeds of nodes are read from whatever file has some, and their noise is
taken away from each published step. What is left is compared with what the client sent.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest

from fedplat.aggregate import state_from_bytes
from fedplat.model import Parameters
from fedplat.privacy import Noise
from fedplat_server.verify.inspection import verify
from support import daemons
from support.trees import CLIP, NOISE, ROUNDS, SIZE, seeds, train, update, words


def unmasked(folder: Path, models: list[Parameters]) -> list[float]:
    """For each published step, the best correlation with its update after removing any sum of known noise."""
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


def holding(folder: Path, content: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


async def test_no_seed_is_left_when_a_job_has_ended(folder: Path) -> None:
    """The audit's attack: it found +1.000000 for every step."""
    async with daemons.running(folder) as site:
        job = await train(site, range(1, ROUNDS + 1))
        models = [await site.operator.model(job, version) for version in range(ROUNDS + 1)]

        async def no_seed() -> bool:
            return not seeds(folder)

        with contextlib.suppress(AssertionError):  # the correlations below show more
            await daemons.until(no_seed, "the seeds to be gone")
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
    """While the job runs, only the seeds of open nodes are kept; a restart continues from them."""
    covered: list[list[float]] = []
    job = ""
    for round_ in range(1, ROUNDS + 1):
        async with daemons.running(folder) as site:  # a new daemon for each round
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

            await daemons.until(only_open_nodes, "the covered seeds to be gone")
    assert len(covered) == ROUNDS - 1
    for word in itertools.chain.from_iterable(covered):
        assert holding(folder, struct.pack("<d", word)) == []
    assert (await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []
