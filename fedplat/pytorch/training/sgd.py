"""Stochastic gradient descent on named tensors, for one client or for a stack of several."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Sgd:
    """SGD with momentum, also Nesterov's, and weight decay: the same numbers as `torch.optim.SGD`.

    PyTorch's class takes two seconds to import at its first use, and its construction takes as long as a step, which
    matters for short trainings.
    """

    def __init__(
        self, *, learning_rate: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
    ) -> None:
        self._learning_rate, self._momentum, self._weight_decay = learning_rate, momentum, weight_decay
        self._nesterov = nesterov
        self.velocities: dict[str, torch.Tensor] = {}
        """The momentum of each weight, in units of gradients: -1 / learning_rate times the movement."""

    def step(self, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        """Update, in place, the weights that have a gradient. The gradients may be changed."""
        with torch.no_grad():
            for name, slope in gradients.items():
                weight = weights[name]
                if self._weight_decay:
                    slope.add_(weight, alpha=self._weight_decay)
                weight.add_(self._apply_momentum(name, slope), alpha=-self._learning_rate)

    def look_ahead(self, weights: Mapping[str, torch.Tensor], sign: float = 1.0) -> None:
        """Move weights x to x + δ v, where Nesterov's momentum computes gradients; with the sign -1, back to x.

        With u = x + δ v, the steps v ← δ v - η g(u), x ← x + v are those of PyTorch on u. Without it nothing changes.
        """
        if not self._nesterov:
            return
        with torch.no_grad():
            for name, velocity in self.velocities.items():
                weights[name].add_(velocity, alpha=-sign * self._momentum * self._learning_rate)

    def _apply_momentum(self, name: str, slope: torch.Tensor) -> torch.Tensor:
        if not self._momentum:
            return slope
        velocity = self.velocities.get(name)
        if velocity is None:
            self.velocities[name] = velocity = slope.clone()
        else:
            velocity.mul_(self._momentum).add_(slope)
        return slope.add_(velocity, alpha=self._momentum) if self._nesterov else velocity
