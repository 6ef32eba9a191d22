"""The parts of a step's batches that ranks compute, with their weights and seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedplat.pytorch.training import Indices, StepSchedule


class RankBatch(NamedTuple):
    """One logical rank's part of one batch of a step."""

    rank: int
    seed: int
    indices: Indices
    share: float
    """Share of the step's examples; 0 if there are fewer examples than ranks, and `indices` repeats another rank's."""


def divide(
    plan: StepSchedule, num_ranks: int, wanted: Sequence[int], seed: int, begin: int = 0
) -> Iterator[list[RankBatch]]:
    """Yield, for each step from `begin` on, the parts of the logical ranks `wanted` out of `num_ranks`.

    Each batch of a step is cut into as many parts as there are logical ranks, as equal as possible.
    """
    for number, step in enumerate(itertools.islice(plan.steps(), begin, None), begin):
        batches = [np.array_split(batch, num_ranks) for batch in plan.batches_of(step)]
        yield [
            _part(seed, number, rank, place, batch[rank], step)
            for rank in wanted
            for place, batch in enumerate(batches)
        ]


def _part(seed: int, number: int, rank: int, place: int, indices: Indices, step: Indices) -> RankBatch:
    own = int(np.random.SeedSequence([seed, number, rank, place]).generate_state(1)[0])
    return RankBatch(rank, own, indices if len(indices) else step[:1], len(indices) / len(step))
