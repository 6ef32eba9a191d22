"""The record of one local training, which plain and private training share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.local_options import LocalOptions
from fedplat.privacy.steps import StepLedger
from fedplat.pytorch.training.examples import Examples
from fedplat.pytorch.training.gradients import GradientComputation, SingleProcessGradients
from fedplat.pytorch.training.stepper import MakeOptimizer


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
