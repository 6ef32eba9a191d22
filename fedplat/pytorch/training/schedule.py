"""Which examples a local step is made of: the same for all that train, on whatever hardware."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.pytorch.training.options import LocalOptions

Indices: TypeAlias = npt.NDArray[np.int64]


def in_order(num_examples: int, batch_size: int) -> Iterator[Indices]:
    """All examples once, in batches of which the last may be short; 0: in one."""
    size = batch_size or num_examples
    for start in range(0, num_examples, size):
        yield np.arange(start, min(start + size, num_examples))


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """The local steps of one training: each epoch is a permutation, cut into steps of which the last may be short.

    `seed` decides the order. `fraction` is the part of the steps that is done, at least one. A last batch of fewer
    examples than `smallest` is left out, if it is not the only one: BatchNorm cannot train on a single example.
    """

    num_examples: int
    options: LocalOptions
    seed: int
    fraction: float = 1.0
    smallest: int = 1

    @property
    def batch_size(self) -> int:
        """Most examples that are computed at once."""
        return self.options.batch_size or self.num_examples

    @property
    def step_size(self) -> int:
        """Examples of a step, but for the last one of an epoch."""
        return self.batch_size * self.options.accumulate

    @property
    def used(self) -> int:
        """Examples of an epoch."""
        last = self.num_examples % self.batch_size
        left_out = self.num_examples > self.batch_size and last < self.smallest
        return self.num_examples - (last if left_out else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.used / self.step_size)

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        whole = self.options.epochs * self.steps_per_epoch
        return max(1, math.floor(self.fraction * whole + 1e-9))

    def steps(self) -> Iterator[Indices]:
        """The examples of each step, epoch by epoch; the same whenever they are asked for."""
        rng = np.random.default_rng([self.seed, 0])
        left = self.num_steps
        while left:
            order = rng.permutation(self.num_examples)[: self.used]
            for start in range(0, min(self.used, left * self.step_size), self.step_size):
                yield order[start : start + self.step_size]
            left -= min(left, self.steps_per_epoch)

    def batches_of(self, step: Indices) -> list[Indices]:
        """The batches of one step, up to `accumulate` of them."""
        return [step[start : start + self.batch_size] for start in range(0, len(step), self.batch_size)]
