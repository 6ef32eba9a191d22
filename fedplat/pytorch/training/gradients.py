"""The computation of a step's gradients: in one process, or shared among several (`fedplat.pytorch.server`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from fedplat.pytorch.training.examples import Examples
from fedplat.pytorch.training.learner import Trainee
from fedplat.pytorch.training.metrics import Scores, Sums
from fedplat.pytorch.training.schedule import StepSchedule
from fedplat.pytorch.training.stepper import Stepper


class GradientComputation(Protocol):
    """Forward and backward passes through a module."""

    def smallest_batch(self, trainee: Trainee) -> int:
        """Return the minimum number of examples of a batch."""
        ...

    def compute_steps(
        self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        """Compute the gradients of each step of the plan; yield the step's scores before the weights change."""
        ...

    def sum_scores(self, scores: Scores) -> Sums:
        """Return the sum of the scores over all processes."""
        ...

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> object:
        """Scale the gradients of a step so that their total L2 norm is at most `max_norm`."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)


class SingleProcessGradients(GradientComputation):
    """Forward and backward passes in one process."""

    @override
    def smallest_batch(self, trainee: Trainee) -> int:
        return trainee.smallest_batch

    @override
    def compute_steps(
        self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        module = trainee.module.train()
        steps, ahead = itertools.tee(plan.steps())
        batches = examples.batches(itertools.chain.from_iterable(map(plan.batches_of, ahead)))
        for step in steps:
            scores, again = Scores(trainee.learner.count_answers), list[tuple[torch.Tensor, torch.Tensor, float]]()
            for batch in plan.batches_of(step):
                inputs, targets = next(batches)
                share = len(batch) / len(step)
                loss, outputs = stepper.forward(module, inputs, targets)
                stepper.backward(loss, share)
                scores.add(loss, outputs, targets)
                if stepper.perturbs:
                    again.append((inputs, targets, share))
            if again:
                with stepper.offset_weights(module):
                    for inputs, targets, share in again:
                        stepper.backward(stepper.forward(module, inputs, targets)[0], share)
            yield scores

    @override
    def sum_scores(self, scores: Scores) -> Sums:
        return scores.sums()
