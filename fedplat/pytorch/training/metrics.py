"""Means over examples, and the values of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from fedplat.metrics import Metric, compute_all, measure
from fedplat.pytorch.training.meaning import CountAnswers, detach


class Sums(Struct, frozen=True, array_like=True):
    """Sums over `num_examples` examples; `hits` of `num_answers` answers were correct.

    `totals` are the sums of each metric's measurements: numbers, and lists of them.
    """

    loss: float
    num_examples: int
    hits: int
    num_answers: int
    totals: list[dict[str, Any]] = []

    def means(self, metrics: Sequence[Metric] = ()) -> dict[str, float]:
        """Return `loss`, `accuracy` if there are answers, and the values of the metrics that were measured."""
        means = {"loss": self.loss / self.num_examples}
        if self.num_answers:
            means["accuracy"] = self.hits / self.num_answers
        arrays = [{name: np.array(total, np.float64) for name, total in each.items()} for each in self.totals]
        return means | compute_all(metrics, arrays, means)

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Add up parts, in their order."""
        parts = list(parts)
        columns = zip(*((each.loss, each.num_examples, each.hits, each.num_answers) for each in parts), strict=True)
        measured = zip(*(each.totals for each in parts), strict=True)
        return cls(*(sum(column) for column in columns), totals=[_add_up(each) for each in measured])


class Scores:
    """Sums of a loss, of correct answers if these can be counted, and of the measurements of metrics.

    They stay on the device until they are read.
    """

    def __init__(self, count: CountAnswers | None = None, metrics: Sequence[Metric] = ()) -> None:
        self._count, self._metrics = count, metrics
        self._totals: list[dict[str, torch.Tensor]] = [{} for _ in metrics]
        self._losses: list[torch.Tensor] = []
        self._hits: list[torch.Tensor] = []
        self._answers: list[torch.Tensor] = []
        self._num_examples = 0

    def add(self, loss: torch.Tensor, outputs: Any, targets: torch.Tensor) -> None:
        """Add a batch, where `loss` is its mean."""
        self._losses.append(loss.detach() * len(targets))
        self._num_examples += len(targets)
        if self._count is not None and (counted := self._count(outputs, targets)) is not None:
            self._hits.append(counted[0])
            self._answers.append(counted[1])
        for metric, totals in zip(self._metrics, self._totals, strict=True):
            measured = measure(metric, detach(outputs), targets)
            _add_to(totals, {name: torch.as_tensor(value).double() for name, value in measured.items()})

    def extend(self, others: Scores) -> None:
        """Add the scores of other batches."""
        self._losses += others._losses
        self._hits += others._hits
        self._answers += others._answers
        self._num_examples += others._num_examples
        for totals, more in zip(self._totals, others._totals, strict=True):
            _add_to(totals, more)

    def sums(self) -> Sums:
        """Return the sums so far."""
        loss = torch.stack(self._losses).double().sum().item() if self._losses else 0.0
        hits, num_answers = (int(torch.stack(each).sum().item()) if each else 0 for each in (self._hits, self._answers))
        totals = [{name: total.tolist() for name, total in each.items()} for each in self._totals]
        return Sums(loss, self._num_examples, hits, num_answers, totals)

    def means(self) -> dict[str, float]:
        """Return `loss`, `accuracy` if there are answers, and the values of the metrics."""
        return self.sums().means(self._metrics)


def _add_to(totals: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def _add_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: np.sum([each[name] for each in parts], axis=0, dtype=np.float64).tolist() for name in parts[0]}
