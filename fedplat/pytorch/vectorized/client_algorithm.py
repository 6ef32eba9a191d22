"""A client's half of an algorithm on flat vectors: its correction, its SGD steps, and its ending."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fedplat.aggregate.local import Arrays, Correction, LocalEnding, UpdateDirection, effective_steps
from fedplat.client_state import ClientState
from fedplat.local_options import LocalOptions
from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training.algorithm import build_guarded_algorithm, check_drift
from fedplat.pytorch.training.gradients import LocalTraining
from fedplat.pytorch.vectorized import layout
from fedplat.pytorch.vectorized.layout import Base, ParameterLayout, Tensors, UnsuitableError


def check_algorithm(options: LocalOptions) -> None:
    """Raise `UnsuitableError` for an algorithm that does more than correct the gradients of the learner's loss."""
    algorithm = options.build_algorithm()
    reasons = {
        "has its own loss": algorithm.make_loss is not None,
        "computes gradients at other weights": algorithm.perturb is not None,
        "begins at a model of the client's own": algorithm.start is not None,
        "has Nesterov's momentum": algorithm.nesterov,
        "keeps the state of its optimizer": algorithm.keeps_optimizer,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UnsuitableError(f'algorithm = "{options.algorithm_name}" {what}, which needs one client at a time')
    if options.optimizer != "sgd":
        raise UnsuitableError(f'optimizer = "{options.optimizer}" needs one client at a time; expected "sgd"')
    if options.keep_optimizer:
        raise UnsuitableError("keep_optimizer = true needs one client at a time; expected false")


class ClientAlgorithmState:
    """The algorithm's state at the start of one client's training."""

    def __init__(self, layout: ParameterLayout, options: LocalOptions, base: Base, client_state: ClientState) -> None:
        self._layout, self._base, self._client_state = layout, base, client_state
        self._half, self._note = build_guarded_algorithm(options), options.state_name
        note = client_state.get(self._note)
        self._state: Arrays = {} if note is None else backend.to_torch(note)
        control = layout.as_dict(base.control) if self._half.needs_control else {}
        self.correction: Correction = self._half.begin(control, self._state)
        shapes = dict(zip(layout.shared_names, map(torch.Size, layout.shapes), strict=False))
        check_drift(self.correction.drift, shapes, f'config.algorithm = "{options.algorithm_name}"')

    @property
    def drift(self) -> torch.Tensor | None:
        """The correction's drift as a vector of the shared weights; None if it is empty."""
        drift = self.correction.drift
        if not drift:
            return None
        parts = zip(self._layout.shared_names, self._layout.sizes, strict=False)
        return torch.cat([drift[name].reshape(-1) if name in drift else torch.zeros(size) for name, size in parts])

    def end(self, weights: torch.Tensor, num_steps: int, work: LocalTraining, update: Parameters) -> dict[str, float]:
        """Store the client state, and add the algorithm's part to the update; return the metrics."""
        rate, pull = work.learning_rate, self.correction.pull
        steps = effective_steps(num_steps, learning_rate=rate, momentum=work.options.momentum, pull=pull)
        moved = _LazyDifference(self._layout, self._base.weights, weights)
        ending: LocalEnding = self._half.end(self.correction, self._state, UpdateDirection(moved, rate, steps))
        metrics = {"local_steps": float(num_steps)}
        if steps != num_steps:
            metrics["effective_steps"] = steps
        if ending.remember:
            self._client_state.put(self._note, backend.store_tensors(ending.remember))
        for name, change in backend.to_arrays(ending.update).items():
            update[name] += change
        return metrics


class _LazyDifference(Mapping[str, torch.Tensor]):
    """The difference `start - weights` of each shared parameter, computed at the first access."""

    def __init__(self, layout: ParameterLayout, start: torch.Tensor, weights: torch.Tensor) -> None:
        self._layout, self._start, self._weights = layout, start, weights
        self._difference: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._difference is None:
            self._difference = self._layout.as_dict(self._start - self._weights[: len(self._start)])
        return self._difference[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.shared_names)

    def __len__(self) -> int:
        return len(self._layout.shared_names)


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
            layout.add_tensors(views, gradients, -self._learning_rate)
            return
        if self._gradient is None:
            self._gradient = torch.empty_like(self._weights)
        rows = slice(len(gradients[0])) if self._weights.ndim == 2 else slice(None)
        weights, gradient = self._weights[rows], self._gradient[rows]
        layout.copy_tensors(self._layout.views(gradient), gradients)
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
