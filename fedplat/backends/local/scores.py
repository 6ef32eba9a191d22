"""Means over examples."""

from __future__ import annotations

import torch


class Scores:
    """Sums of a loss, and of the right answers where the targets are classes; on the device until they are read."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._hits: list[torch.Tensor] = []
        self._num_examples = 0
        self._num_answers = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds a batch, of which `loss` is the mean."""
        self._losses.append(loss.detach() * len(targets))
        self._num_examples += len(targets)
        if outputs.ndim == targets.ndim + 1 and not targets.is_floating_point():
            self._hits.append((outputs.detach().argmax(1) == targets).sum())
            self._num_answers += targets.numel()

    def means(self) -> dict[str, float]:
        """`loss`, and `accuracy` where there are classes."""
        means = {"loss": torch.stack(self._losses).double().sum().item() / self._num_examples}
        if self._num_answers:
            means["accuracy"] = torch.stack(self._hits).sum().item() / self._num_answers
        return means
