"""Means over examples, computed once at the end: while steps are short, every operation between them counts."""

from __future__ import annotations

import torch

_AT_ONCE = 1 << 20
"""Entries of outputs that are kept until answers are counted."""


class LateScores:
    """Collects losses, and counts right answers where the targets are classes."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._kept = self._hits = self._num_answers = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds a batch, of which `loss` is the mean."""
        self._losses.append(loss)
        self._sizes.append(len(targets))
        if outputs.ndim == targets.ndim + 1 and not targets.is_floating_point():
            self._outputs.append(outputs)
            self._targets.append(targets)
            self._kept += outputs.numel()
            if self._kept > _AT_ONCE:
                self._count()

    def means(self) -> dict[str, float]:
        """`loss`, and `accuracy` where there are classes."""
        self._count()
        sizes = torch.tensor(self._sizes, dtype=torch.float64)
        losses = torch.stack(self._losses).to("cpu", torch.float64)
        means = {"loss": (losses @ sizes).item() / sum(self._sizes)}
        if self._num_answers:
            means["accuracy"] = self._hits / self._num_answers
        return means

    def _count(self) -> None:
        if self._outputs:
            targets = torch.cat(self._targets)
            self._hits += int((torch.cat(self._outputs).argmax(1) == targets).sum())
            self._num_answers += targets.numel()
            self._outputs, self._targets, self._kept = [], [], 0
