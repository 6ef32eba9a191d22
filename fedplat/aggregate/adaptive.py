"""The common part of the adaptive server optimizers, which differ only in the second moment.

Source: Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, Algorithm 2: m ← β₁ m + (1 -
β₁) Δ; v by the method's own rule; x += η m / (√v + τ). There is no bias correction, and v starts at τ².
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from fedplat.aggregate import algebra, optimizer
from fedplat.model import Vector, blocks

SecondMoment = Callable[[Vector, Vector], Vector]
"""A function from the last v and Δ² to the next v, entry by entry; modifies neither argument."""


class AdaptiveOptions(Protocol):
    """The options that all adaptive methods share; the options records explain them."""

    @property
    def learning_rate(self) -> float:
        """η."""
        ...

    @property
    def beta1(self) -> float:
        """β₁."""
        ...

    @property
    def tau(self) -> float:
        """τ."""
        ...


def server_adaptive(options: AdaptiveOptions, second_moment: SecondMoment) -> algebra.Wrapper:
    """Wrap a rule in Algorithm 2 of the paper, with `second_moment` as the rule for v.

    The state is `first_moment` (m) and `second_moment` (v), float32 of shape [size].
    """
    beta1, eta, tau = options.beta1, options.learning_rate, options.tau

    def init(size: int) -> algebra.State:
        return {"first_moment": np.zeros(size, np.float32), "second_moment": np.full(size, tau**2, np.float32)}

    def update(state: algebra.State, delta: Vector) -> tuple[Vector, algebra.State]:
        first, second, step = (np.empty_like(delta) for _ in range(3))
        for block in blocks(delta.size):  # temporaries of a block's size, not of the model's
            part = delta[block]
            first[block] = beta1 * state["first_moment"][block] + (1 - beta1) * part
            second[block] = second_moment(state["second_moment"][block], np.square(part))
            step[block] = eta * first[block] / (np.sqrt(second[block]) + tau)
        return step, {"first_moment": first, "second_moment": second}

    return optimizer.server_optimizer(init, update)
