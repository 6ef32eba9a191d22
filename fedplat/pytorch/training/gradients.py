"""One local training as a record, and the computation of the gradients of its steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from fedplat.client_state import ClientState
from fedplat.local_options import LocalOptions
from fedplat.privacy.steps import StepLedger
from fedplat.pytorch.training import examples, learner, meaning
from fedplat.pytorch.training.examples import Examples
from fedplat.pytorch.training.stepper import MakeOptimizer, Stepper


class GradientComputation(Protocol):
    """Forward and backward passes through a module."""

    def smallest_batch(self, trainee: learner.Trainee) -> int:
        """Return the minimum number of examples of a batch."""
        ...

    def compute_steps(
        self, trainee: learner.Trainee, stepper: Stepper, plan: examples.StepSchedule, examples: Examples
    ) -> Iterator[meaning.Scores]:
        """Compute the gradients of each step of the plan; yield the step's scores before the weights change."""
        ...

    def sum_scores(self, scores: meaning.Scores) -> meaning.Sums:
        """Return the sum of the scores over all processes."""
        ...

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> object:
        """Scale the gradients of a step so that their total L2 norm is at most `max_norm`."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)


class SingleProcessGradients(GradientComputation):
    """Forward and backward passes in one process."""

    @override
    def smallest_batch(self, trainee: learner.Trainee) -> int:
        return trainee.smallest_batch

    @override
    def compute_steps(
        self, trainee: learner.Trainee, stepper: Stepper, plan: examples.StepSchedule, examples: Examples
    ) -> Iterator[meaning.Scores]:
        module = trainee.module.train()
        steps, ahead = itertools.tee(plan.steps())
        batches = examples.batches(itertools.chain.from_iterable(map(plan.batches_of, ahead)))
        for step in steps:
            scores, again = trainee.learner.make_scores(), list[tuple[torch.Tensor, torch.Tensor, float]]()
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
    def sum_scores(self, scores: meaning.Scores) -> meaning.Sums:
        return scores.sums()


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """One local training: the work of one client in one round.

    `seed` seeds all randomness except that of DP-SGD. `fraction` is the part of the steps that the client has time for.
    `after_step(done, total)` is called after each step; the training ends when it returns False. `make_optimizer`
    replaces the optimizer of the options. `gradients` computes the gradients of the steps.

    With DP-SGD, `ledger` counts the privacy loss, by default in `client_state`, and `noise_seed` seeds the draws and
    the noise. It is None except in simulations: with the seed, the noise can be subtracted again.
    """

    examples: Examples
    options: LocalOptions
    seed: int
    round_number: int = 1
    fraction: float = 1.0
    client_state: ClientState = field(default_factory=ClientState)
    after_step: Callable[[int, int], bool] = lambda done, total: True
    make_optimizer: MakeOptimizer | None = None
    gradients: GradientComputation = field(default_factory=SingleProcessGradients)
    ledger: StepLedger | None = None
    noise_seed: int | None = None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the round."""
        return self.options.rate(self.round_number)

    @property
    def optimizer_factory(self) -> MakeOptimizer | None:
        """Creates the optimizer of the steps; None for SGD."""
        return (
            self._make_adamw
            if self.make_optimizer is None and self.options.optimizer == "adamw"
            else self.make_optimizer
        )

    def _make_adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.options.weight_decay)
