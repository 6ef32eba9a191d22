"""Means over examples, computed once at the end: between short steps, every operation takes noticeable time."""

from __future__ import annotations

import torch

from fedplat.pytorch.training.meaning import CountAnswers, CountClasses

_MAX_KEPT_ENTRIES = 1 << 20
"""Entries of outputs that are kept before the correct answers are counted."""


class LateScores:
    """Collects losses, and counts correct answers, with `count` if there is one."""

    def __init__(self, count: CountAnswers | None) -> None:
        self._answers = count
        self._losses: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._kept = self._hits = self._num_answers = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch, where `loss` is its mean."""
        self._losses.append(loss)
        self._sizes.append(len(targets))
        if isinstance(self._answers, CountClasses):
            if not self._answers.suits(outputs, targets):
                return
            self._outputs.append(outputs)
            self._targets.append(targets)
            self._kept += outputs.numel()
            if self._kept > _MAX_KEPT_ENTRIES:
                self._count()
        elif self._answers is not None:
            self._add(outputs, targets)

    def means(self) -> dict[str, float]:
        """Return `loss`, and `accuracy` if there are answers."""
        self._count()
        sizes = torch.tensor(self._sizes, dtype=torch.float64)
        losses = torch.stack(self._losses).to("cpu", torch.float64)
        means = {"loss": (losses @ sizes).item() / sum(self._sizes)}
        if self._num_answers:
            means["accuracy"] = self._hits / self._num_answers
        return means

    def _count(self) -> None:
        if self._outputs:
            self._add(torch.cat(self._outputs), torch.cat(self._targets))
            self._outputs, self._targets, self._kept = [], [], 0

    def _add(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert self._answers is not None
        if (counted := self._answers(outputs, targets)) is not None:
            self._hits += int(counted[0])
            self._num_answers += int(counted[1])
