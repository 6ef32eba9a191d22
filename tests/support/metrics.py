"""Metrics that are broken on purpose, and what is said of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct

from fedplat.metrics import Metric, Totals


class Count(Struct, frozen=True):
    """The mean of the targets, with a defect."""

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        return {"sum": targets.sum(), "count": len(targets)}

    def compute(self, totals: Totals) -> Mapping[str, Any]:
        return {"mean": totals["sum"] / totals["count"]}


class Text(Count, frozen=True):
    def compute(self, totals: Totals) -> Mapping[str, Any]:
        return {"mean": "high"}


class Loss(Count, frozen=True):
    def compute(self, totals: Totals) -> Mapping[str, Any]:
        return {"loss": 0.0}


class Nameless(Count, frozen=True):
    def compute(self, totals: Totals) -> Mapping[Any, Any]:
        return {3: 0.5}


class Single(Count, frozen=True):
    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return targets.sum()


class MeanOfBatches(Count, frozen=True):
    """The mean of the means of batches."""

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        return {"sum": targets.double().mean(), "count": 1}


class Writes(Count, frozen=True):
    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        outputs += 1.0
        return super().measure(outputs, targets)


class Remembers(Count, frozen=True):
    seen: list[float] = []

    def compute(self, totals: Totals) -> Mapping[str, Any]:
        self.seen.append(float(totals["sum"]))
        return {"mean": len(self.seen)}


class ByPosition(Count, frozen=True):
    """The first example counts ten times."""

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        return {"sum": targets.sum() + 9 * targets[0] * (len(targets) > 100), "count": len(targets)}


class NotFinite(Count, frozen=True):
    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        if outputs.isnan().any():
            raise ValueError("the outputs are NaN")
        return super().measure(outputs, targets)


class Infinite(Count, frozen=True):
    def compute(self, totals: Totals) -> Mapping[str, Any]:
        return {"mean": float("inf")}


BROKEN: dict[str, tuple[Metric, str]] = {
    "text for a value": (Text(), "compute() returned 'high' for 'mean'; expected a number"),
    "loss": (Loss(), "compute() returned 'loss', the name of another metric; expected a different name"),
    "no name": (Nameless(), "compute() returned the name 3; expected text of 1 to 64 characters"),
    "not a dict": (Single(), "measure() returned a Tensor; expected a dict of numbers and tensors"),
    "mean of means": (MeanOfBatches(), "expected sums that do not depend on the batches"),
    "writes": (Writes(), "measure() writes into the tensors that it receives"),
    "remembers": (Remembers(), "batches of 1 change mean from"),
    "by position": (ByPosition(), "batches of 1 change mean from"),
    "refuses NaN": (NotFinite(), "for outputs that are NaN, the metric"),
    "infinite": (Infinite(), "mean of 211 examples is inf; expected a finite number"),
}
