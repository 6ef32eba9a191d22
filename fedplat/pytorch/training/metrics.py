"""Means over examples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from msgspec import Struct


class Sums(Struct, frozen=True, array_like=True):
    """Sums over `num_examples` examples; `hits` of `num_answers` answers were correct."""

    loss: float
    num_examples: int
    hits: int
    num_answers: int

    def means(self) -> dict[str, float]:
        """Return `loss`, and `accuracy` for classification."""
        means = {"loss": self.loss / self.num_examples}
        if self.num_answers:
            means["accuracy"] = self.hits / self.num_answers
        return means

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Add up parts, in their order."""
        columns = zip(*((each.loss, each.num_examples, each.hits, each.num_answers) for each in parts), strict=True)
        return cls(*(sum(column) for column in columns))


class Scores:
    """Sums of a loss and, if the targets are classes, of correct answers; on the device until they are read."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._hits: list[torch.Tensor] = []
        self._num_examples = 0
        self._num_answers = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch, where `loss` is its mean."""
        self._losses.append(loss.detach() * len(targets))
        self._num_examples += len(targets)
        if outputs.ndim == targets.ndim + 1 and not targets.is_floating_point():
            self._hits.append((outputs.detach().argmax(1) == targets).sum())
            self._num_answers += targets.numel()

    def extend(self, others: Scores) -> None:
        """Add the scores of other batches."""
        self._losses += others._losses
        self._hits += others._hits
        self._num_examples += others._num_examples
        self._num_answers += others._num_answers

    def sums(self) -> Sums:
        """Return the sums so far."""
        loss = torch.stack(self._losses).double().sum().item() if self._losses else 0.0
        hits = int(torch.stack(self._hits).sum().item()) if self._hits else 0
        return Sums(loss, self._num_examples, hits, self._num_answers)

    def means(self) -> dict[str, float]:
        """Return `loss`, and `accuracy` for classification."""
        return self.sums().means()
