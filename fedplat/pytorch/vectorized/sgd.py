"""SGD steps on flat vectors, for one client or for several whose vectors are stacked."""

from __future__ import annotations

import torch

from fedplat.local_options import LocalOptions
from fedplat.pytorch.vectorized import foreach
from fedplat.pytorch.vectorized.foreach import Tensors
from fedplat.pytorch.vectorized.layout import ParameterLayout


class FlatSgd:
    """SGD on weights [size], or [clients, size] where the first rows are still in training.

    Per step: the gradient's norm is bounded, then `pull (w - w₀) + drift` is added to its shared part, then SGD updates
    the weights, with weight decay and momentum as in `torch.optim.SGD`.
    """

    def __init__(
        self, layout: ParameterLayout, options: LocalOptions, learning_rate: float, weights: torch.Tensor
    ) -> None:
        self._layout, self._options, self._learning_rate = layout, options, learning_rate
        self._weights = weights
        self._pull, self._start, self._drift = 0.0, weights, None
        self._gradient: torch.Tensor | None = None
        self._velocity: torch.Tensor | None = None
        self._is_plain = not (options.momentum or options.weight_decay or options.max_grad_norm)

    def correct(self, pull: float, start: torch.Tensor, drift: torch.Tensor | None) -> None:
        """Set the algorithm's correction of the gradients of the shared weights; `start` is w₀."""
        self._pull, self._start, self._drift = pull, start, drift
        self._is_plain = self._is_plain and not pull and drift is None

    def step(self, views: Tensors, gradients: Tensors) -> None:
        """Update the weights; `views` are the parameters in the rows that are still in training."""
        if self._is_plain:  # copying the gradients into one vector would take longer than the whole update
            foreach.add(views, gradients, -self._learning_rate)
            return
        if self._gradient is None:
            self._gradient = torch.empty_like(self._weights)
        rows = slice(len(gradients[0])) if self._weights.ndim == 2 else slice(None)
        weights, gradient = self._weights[rows], self._gradient[rows]
        foreach.copy(self._layout.views(gradient), gradients)
        self._correct(weights, gradient, rows)
        if self._options.weight_decay:
            gradient.add_(weights, alpha=self._options.weight_decay)
        weights.sub_(self._with_momentum(gradient, rows), alpha=self._learning_rate)

    def _correct(self, weights: torch.Tensor, gradient: torch.Tensor, rows: slice) -> None:
        if limit := self._options.max_grad_norm:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        shared = gradient[..., : self._layout.num_shared]
        if self._pull:
            shared.add_(weights[..., : self._layout.num_shared] - self._start, alpha=self._pull)
        if self._drift is not None:
            shared.add_(self._drift[rows])

    def _with_momentum(self, gradient: torch.Tensor, rows: slice) -> torch.Tensor:
        if not self._options.momentum:
            return gradient
        if self._velocity is None:
            self._velocity = torch.zeros_like(self._weights)
        return self._velocity[rows].mul_(self._options.momentum).add_(gradient)
