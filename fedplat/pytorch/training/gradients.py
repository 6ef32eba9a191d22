"""How the gradients of steps come about: alone, or with others that share the work (`fedplat.pytorch.server`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

from fedplat.pytorch.training.examples import Examples
from fedplat.pytorch.training.learner import Trainee
from fedplat.pytorch.training.metrics import Scores, Sums
from fedplat.pytorch.training.schedule import StepSchedule
from fedplat.pytorch.training.stepper import Stepper


class GradientComputation(Protocol):
    """Passes through a module, forward and back."""

    def smallest_batch(self, trainee: Trainee) -> int:
        """The fewest examples that a batch may have."""
        ...

    def over(self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples) -> Iterator[Scores]:
        """Computes the gradients of the plan's steps; after each, before the weights are moved, the scores of it."""
        ...

    def total(self, scores: Scores) -> Sums:
        """The scores of all who share the work."""
        ...


class SingleProcessGradients:
    """The passes of one process by itself."""

    def smallest_batch(self, trainee: Trainee) -> int:
        """The fewest examples that a batch may have."""
        return trainee.smallest_batch

    def over(self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples) -> Iterator[Scores]:
        """Computes the gradients of the plan's steps; after each, before the weights are moved, the scores of it."""
        module, loss_of = trainee.module.train(), trainee.learner.loss
        steps, ahead = itertools.tee(plan.steps())
        batches = examples.batches(itertools.chain.from_iterable(map(plan.batches_of, ahead)))
        for step in steps:
            scores = Scores()
            for batch in plan.batches_of(step):
                inputs, targets = next(batches)
                with stepper.forward():
                    outputs = module(inputs)
                    loss = loss_of(outputs, targets)
                stepper.backward(loss, len(batch) / len(step))
                scores.add(loss, outputs, targets)
            yield scores

    def total(self, scores: Scores) -> Sums:
        """The scores of all who share the work."""
        return scores.sums()
