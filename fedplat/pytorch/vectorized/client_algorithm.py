"""What an algorithm makes of a client's training on flat vectors: its correction before, its ending after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fedplat.aggregate.local import Arrays, Correction, LocalEnding, UpdateDirection, effective_steps
from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training.options import LocalOptions
from fedplat.pytorch.training.work import LocalTraining
from fedplat.pytorch.vectorized.layout import Base, ParameterLayout


class ClientAlgorithmState:
    """Where one client's training begins, and by which algorithm."""

    def __init__(self, layout: ParameterLayout, options: LocalOptions, base: Base, memory: ClientState) -> None:
        self._layout, self._base, self._memory = layout, base, memory
        self._half, self._note = options.client_half(), options.algorithm
        note = memory.get(self._note)
        self._remembered: Arrays = {} if note is None else backend.to_torch(note)
        control = layout.as_dict(base.control) if self._half.needs_control else {}
        self.correction: Correction = self._half.begin(control, self._remembered)

    @property
    def drift(self) -> torch.Tensor | None:
        """The correction's drift as a vector of the shared weights."""
        drift = self.correction.drift
        return torch.cat([drift[name].reshape(-1) for name in self._layout.shared_names]) if drift else None

    def end(self, weights: torch.Tensor, num_steps: int, work: LocalTraining, update: Parameters) -> dict[str, float]:
        """Notes what the client remembers, and adds to its update what the algorithm adds; returns the metrics."""
        rate, pull = work.learning_rate, self.correction.pull
        steps = effective_steps(num_steps, learning_rate=rate, momentum=work.options.momentum, pull=pull)
        moved = _Moved(self._layout, self._base.weights, weights)
        ending: LocalEnding = self._half.end(self.correction, self._remembered, UpdateDirection(moved, rate, steps))
        metrics = {"local_steps": float(num_steps)}
        if steps != num_steps:
            metrics["effective_steps"] = steps
        if ending.remember:
            self._memory.put(self._note, backend.from_state_dict(ending.remember))
        for name, change in backend.to_arrays(ending.update).items():
            update[name] += change
        return metrics


class _Moved(Mapping[str, torch.Tensor]):
    """How far each shared parameter went; computed for those algorithms only that ask."""

    def __init__(self, layout: ParameterLayout, start: torch.Tensor, weights: torch.Tensor) -> None:
        self._layout, self._start, self._weights = layout, start, weights
        self._found: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._found is None:
            self._found = self._layout.as_dict(self._start - self._weights[: len(self._start)])
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.shared_names)

    def __len__(self) -> int:
        return len(self._layout.shared_names)
