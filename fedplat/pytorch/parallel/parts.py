"""The parts of a step's batches that ranks compute, their micro-batches, and the scores of all ranks.

A part is cut into micro-batches of equal size, because the stages of a pipeline exchange tensors of fixed sizes; the
last ones are padded with copies of the last example, which have no weight. The size is that of the largest batch of a
plan, so that short batches have it too. Random numbers are seeded by the step, the part, the batch, the micro-batch and
the stage. All of this is the same in a pipeline and in a process that computes the stages in turn; so both have the
same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn
from typing_extensions import override

from fedplat.config.decoding import prepare_type
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.training import Indices, Loss, Scores, StepSchedule, Sums, use_seed
from fedplat.pytorch.training.stepper import Stepper


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


def choose_micro_batch_size(plan: StepSchedule, parallel: Parallel) -> int:
    """Return the number of examples in each micro-batch of a plan."""
    largest = min(plan.batch_size, plan.num_examples)
    return math.ceil(math.ceil(largest / parallel.num_parts) / parallel.num_micro_batches)


def pad_micro_batch(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `num_rows` rows: the given ones, and copies of the last."""
    missing = num_rows - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def stage_seed(part: RankBatch, micro_batch: int, stage: int) -> int:
    """Return the seed of the random numbers of a micro-batch in a stage."""
    return int(np.random.SeedSequence([part.seed, micro_batch, stage]).generate_state(1)[0])


@dataclass
class PartLoss:
    """The losses of the micro-batches of one part, which are called in their order; adds up their scores."""

    loss: Loss
    stepper: Stepper
    part: RankBatch
    size: int
    scores: Scores
    num_called: int = field(default=0, init=False)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the examples of a micro-batch, weighted by their share of the step's examples."""
        part, first = self.part, self.num_called * self.size
        self.num_called += 1
        num_rows = min(self.size, max(0, len(part.indices) - first)) if part.share else 0
        shown = max(1, num_rows)  # an empty micro-batch needs a loss too: all stages compute its backward pass
        with self.stepper.autocast():
            loss = self.loss(outputs[:shown], targets[:shown])
        if num_rows:
            self.scores.add(loss, outputs[:shown], targets[:shown])
        step_size = round(len(part.indices) / part.share) if part.share else 1
        return self.stepper.weigh(loss, num_rows / step_size)


def compute_stage(
    stage: nn.Module, values: torch.Tensor, seed: int, device: torch.device, autocast: AbstractContextManager[object]
) -> torch.Tensor:
    """Return the outputs of a stage for a micro-batch. Raises `TypeError` unless they are one tensor."""
    with use_seed(device, seed), autocast:
        outputs = stage(values)
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(f"a stage returned a {type(outputs).__name__}; expected one tensor")
    return outputs


class _Boundary(torch.autograd.Function):
    """The identity, with contiguous values and gradients, as messages have."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        return args[0].contiguous()

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> torch.Tensor:
        return grad_outputs[0].contiguous()


def cross_boundary(values: torch.Tensor) -> torch.Tensor:
    """Return what the next stage gets of the outputs of a stage; their gradients cross the boundary alike."""
    return _Boundary.apply(values) if values.is_floating_point() else values.contiguous()  # type: ignore[no-any-return]


def sum_scores(ranks: Ranks, scores: Scores) -> Sums:
    """Return the sum of the scores over all ranks, on all of them."""
    parts = ranks.all_gather(msgspec.msgpack.encode(scores.sums()))
    return Sums.total(msgspec.msgpack.decode(each, type=prepare_type(Sums)) for each in parts)
