"""The examples of each local step: the same for every implementation of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.local_options import LocalOptions

Indices: TypeAlias = npt.NDArray[np.int64]


def iterate_batches(num_examples: int, batch_size: int) -> Iterator[Indices]:
    """Yield all examples once, in batches; the last may be short. A `batch_size` of 0 means one batch."""
    size = batch_size or num_examples
    for start in range(0, num_examples, size):
        yield np.arange(start, min(start + size, num_examples))


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """The local steps of one training: each epoch is a permutation, cut into steps; the last may be short.

    `seed` determines the order. `fraction` of the steps is done, at least one. The last batch is dropped if it has
    fewer than `smallest` examples and is not the only one: BatchNorm cannot train on a single example.
    """

    num_examples: int
    options: LocalOptions
    seed: int
    fraction: float = 1.0
    smallest: int = 1

    @property
    def batch_size(self) -> int:
        """Maximum number of examples in a batch."""
        return self.options.batch_size or self.num_examples

    @property
    def step_size(self) -> int:
        """Examples of a step, except for the last one of an epoch."""
        return self.batch_size * self.options.accumulate

    @property
    def used(self) -> int:
        """Examples used in an epoch."""
        last = self.num_examples % self.batch_size
        left_out = self.num_examples > self.batch_size and last < self.smallest
        return self.num_examples - (last if left_out else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.used / self.step_size)

    @property
    def num_steps(self) -> int:
        """Total number of steps."""
        whole = self.options.num_steps or self.options.epochs * self.steps_per_epoch
        return max(1, math.floor(self.fraction * whole + 1e-9))

    def steps(self) -> Iterator[Indices]:
        """Yield the examples of each step, epoch by epoch; every call yields the same."""
        rng = np.random.default_rng([self.seed, 0])
        left = self.num_steps
        while left:
            order = rng.permutation(self.num_examples)[: self.used]
            for start in range(0, min(self.used, left * self.step_size), self.step_size):
                yield order[start : start + self.step_size]
            left -= min(left, self.steps_per_epoch)

    def batches_of(self, step: Indices) -> list[Indices]:
        """Return the batches of one step, up to `accumulate` of them."""
        return [step[start : start + self.batch_size] for start in range(0, len(step), self.batch_size)]
