"""Metrics of evaluations, besides the loss and the accuracy: numbers over all examples, from sums over batches.

A metric measures each batch. Its measurements are added over all batches and processes, and its numbers are computed
once, from the sums; the mean of the F1 scores of batches, for instance, is not the F1 score of the examples. This
module does not import PyTorch.
"""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.config import plugins, user_code
from fedplat.errors import PluginError

if TYPE_CHECKING:
    import torch

Totals = Mapping[str, npt.NDArray[np.float64]]
MAX_NAME = 64
"""Length of a metric's name, in characters."""


@runtime_checkable
class Metric(Protocol):
    """One of the metrics of a model: its options, selected by the key `name`, or only its name.

    >>> F1().compute({"hits": np.array([3.0, 1.0]), "found": np.array([4.0, 2.0]), "real": np.array([4.0, 2.0])})
    {'f1': 0.625}
    """

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, torch.Tensor | float]:
        """Return numbers and tensors of a batch, whose sums over all batches determine the metric."""
        ...

    def compute(self, totals: Totals) -> Mapping[str, float]:
        """Return the values by name, from the sums of the measurements over all examples: arrays, float64."""
        ...


class F1(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="f1"):
    """`f1`: the mean of the F1 scores of all classes that occur, in the targets or the answers (macro average)."""

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, torch.Tensor | float]:
        """Count the answers of each class, those that are correct, and the targets."""
        _check_classes(outputs, targets)
        counts = targets >= 0
        found, real, classes = outputs.argmax(1)[counts], targets[counts], outputs.shape[1]
        hits = real[found == real]
        columns = {"hits": hits, "found": found, "real": real}
        return {name: column.bincount(minlength=classes) for name, column in columns.items()}

    def compute(self, totals: Totals) -> Mapping[str, float]:
        """Return the mean over the classes; no value without any."""
        counts = totals["found"] + totals["real"]
        occurs = counts > 0
        return {"f1": float((2.0 * totals["hits"][occurs] / counts[occurs]).mean())} if occurs.any() else {}


class TopKAccuracy(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="top_k"):
    """`top_5` with `k` = 5: the fraction of examples whose class is among the k most probable answers."""

    k: Annotated[int, Meta(ge=1, le=1_000_000)] = 5

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, torch.Tensor | float]:
        """Count the correct answers."""
        _check_classes(outputs, targets)
        if self.k > outputs.shape[1]:
            raise ValueError(f"k = {self.k}: the model has {outputs.shape[1]} classes; expected at most as many")
        hits = (outputs.topk(self.k, dim=1).indices == targets.unsqueeze(1)).sum()
        return {"hits": hits, "answers": (targets >= 0).sum()}

    def compute(self, totals: Totals) -> Mapping[str, float]:
        """Return the fraction; no value without answers."""
        return {f"top_{self.k}": float(totals["hits"] / totals["answers"])} if totals["answers"] else {}


class Perplexity(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="perplexity"):
    """`perplexity`: exp of the mean negative log-likelihood of the targets, such as the tokens of a text."""

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, torch.Tensor | float]:
        """Add up the negative log-likelihoods of the targets."""
        _check_classes(outputs, targets)
        counts = targets >= 0
        likelihoods = outputs.float().log_softmax(1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        return {"loss": -likelihoods[counts].double().sum(), "answers": counts.sum()}

    def compute(self, totals: Totals) -> Mapping[str, float]:
        """Return the perplexity; no value without answers."""
        return perplexity_of(float(totals["loss"] / totals["answers"])) if totals["answers"] else {}


class MeanAbsoluteError(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="mae"):
    """`mae`: the mean of |output - target|, over all examples and outputs."""

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, torch.Tensor | float]:
        """Add up the errors."""
        errors = (_match(outputs, targets) - targets).abs()
        return {"error": errors.double().sum(), "answers": targets.numel()}

    def compute(self, totals: Totals) -> Mapping[str, float]:
        """Return the mean."""
        return {"mae": float(totals["error"] / totals["answers"])}


class R2(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="r2"):
    """`r2`: the coefficient of determination, the mean of those of all outputs.

    It is 1 - Σ(t - o)² / Σ(t - mean of t)²; for constant targets 1 if the outputs are the targets, else 0.
    """

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, torch.Tensor | float]:
        """Add up the squares of the errors, the targets, and their squares, for each output."""
        errors, wide = _match(outputs, targets).double() - targets.double(), targets.double()
        columns = {"residual": errors**2, "targets": wide, "squares": wide**2}
        return {**{name: column.sum(0) for name, column in columns.items()}, "examples": len(targets)}

    def compute(self, totals: Totals) -> Mapping[str, float]:
        """Return the mean over the outputs."""
        residual, squares = np.atleast_1d(totals["residual"]), np.atleast_1d(totals["squares"])
        spread = squares - np.atleast_1d(totals["targets"]) ** 2 / totals["examples"]
        varies = spread > 1e-12 * squares  # a smaller one is rounding
        scores = np.where(varies, 1.0 - residual / np.where(varies, spread, 1.0), np.where(residual == 0.0, 1.0, 0.0))
        return {"r2": float(scores.mean())}


METRICS: Mapping[str, type[Metric]] = plugins.by_name(F1, TopKAccuracy, MeanAbsoluteError, R2, Perplexity)
"""The options record of each built-in metric, by its name in a simulation file."""

plugins.define(plugins.Kind("metrics", "name", "a metric", Metric, ("measure", "compute"), METRICS, plain=True))


def measure(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor, ignored: int = -1) -> dict[str, Any]:
    """Measure a batch. Raises `PluginError` or `UserCodeError` if the metric cannot.

    Targets that are `ignored`, which the loss ignores, do not count in metrics of classes.
    """
    if ignored >= 0 and isinstance(metric, F1 | TopKAccuracy | Perplexity) and not targets.is_floating_point():
        targets = targets.long()
        targets = targets.where(targets != ignored, -1)
    action = f'the metric "{plugins.name_of(metric)}": measure()'
    with user_code.wrap_errors(action):
        found = cast(object, metric.measure(outputs, targets))
    if not isinstance(found, Mapping):
        raise PluginError(f"{action} returned a {type(found).__name__}; expected a dict of numbers and tensors")
    return dict(cast(Mapping[str, Any], found))


def compute_all(metrics: Sequence[Metric], totals: Sequence[Totals], taken: Iterable[str] = ()) -> dict[str, float]:
    """Compute the values of all metrics. Raises `PluginError` or `UserCodeError` if one has no numbers.

    `taken` are the names of other values, which no metric may have.
    """
    values: dict[str, float] = {}
    for metric, total in zip(metrics, totals, strict=True):
        action = f'the metric "{plugins.name_of(metric)}": compute()'
        with user_code.wrap_errors(action):
            found: dict[Any, Any] = dict(metric.compute(total))
        for name, value in found.items():
            if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
                raise PluginError(
                    f"{action} returned the name {name!r:.99}; expected text of 1 to {MAX_NAME} characters"
                )
            if name in values or name in taken:
                raise PluginError(f"{action} returned {name!r}, the name of another metric; expected a different name")
            if not isinstance(value, numbers.Real):
                raise PluginError(f"{action} returned {value!r:.99} for {name!r}; expected a number")
            values[name] = float(value)
    return values


PERPLEXITY = "perplexity"


def perplexity_of(loss: float) -> dict[str, float]:
    """Return the metric `perplexity` of a mean loss: its exponential; none if that is not a float64."""
    return {PERPLEXITY: math.exp(loss)} if loss < math.log(sys.float_info.max) else {}


def average_metric(name: str, values: Iterable[tuple[float, float]]) -> float:
    """Return a metric of all examples, from (weight, value) of clients or parts whose weights have a positive sum.

    It is the mean, but of a perplexity the exponential of the mean loss: the perplexity of all tokens together if
    weights are numbers of tokens. The result is finite if all values are.

    >>> average_metric("loss", [(1.0, 2.0), (3.0, 4.0)])
    3.5
    >>> round(average_metric("perplexity", [(1.0, math.exp(2.0)), (3.0, math.exp(4.0))]) / math.exp(3.5), 12)
    1.0
    """
    pairs = list(values)
    total = math.fsum(weight for weight, _ in pairs)
    if name == PERPLEXITY:
        smallest = sys.float_info.min  # a perplexity is at least 1, but what is reported need not be
        pairs = [(weight, math.log(max(value, smallest))) for weight, value in pairs]
    # Weights are normalized first: weight * value could overflow for very large values.
    mean = sum(weight / total * value for weight, value in pairs)
    if name == PERPLEXITY:
        return perplexity_of(mean).get(PERPLEXITY, sys.float_info.max)
    return min(max(mean, -sys.float_info.max), sys.float_info.max)


def check_bounds(bounds: Mapping[str, tuple[float, float]], key: str) -> None:
    """Raise `ValueError` unless each metric whose values are only added, at `key`, has a lowest and a higher value."""
    for name, (low, high) in bounds.items():
        if not low < high:
            raise ValueError(f"{key}.{name} = [{low:g}, {high:g}]: expected the lowest value before the highest")
        if name == PERPLEXITY:
            raise ValueError(
                f"{key}.{name}: the mean of perplexities is not the perplexity of all tokens; expected loss, whose "
                "exponential is"
            )


def is_smaller_better(name: str) -> bool:
    """Return whether smaller values are better: for names that end in loss, error, mae, distance or perplexity."""
    return name.endswith(("loss", "error", "mae", "distance", PERPLEXITY))


def is_score(name: str) -> bool:
    """Return whether a metric has better and worse values: numbers of steps, rounds or examples have none.

    >>> is_score("accuracy"), is_score("local_steps"), is_score("server-round")
    (True, False, False)
    """
    return not name.endswith(("steps", "round", "examples", "epsilon", "noise_multiplier"))


_FRACTIONS = frozenset({"accuracy", "f1", "auc", "roc_auc", "precision", "recall", "iou", "dice", "top_1", "top_5"})


def find_range(name: str, values: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and the largest value that a metric can have, as far as that is known.

    A fraction, such as an accuracy, is from 0 to 1; so is `top_K`. A loss or an error is at least 0, unless one of the
    measured values is not. Infinite where nothing is known.
    """
    last = name.rpartition("/")[2].rpartition(".")[2]
    if last in _FRACTIONS or last.endswith(("_accuracy", "_f1", "_auc")) or re.fullmatch(r"top_\d+", last):
        return 0.0, 1.0
    is_positive = is_smaller_better(name) and all(value >= 0.0 for value in values if not math.isnan(value))
    return (0.0 if is_positive else -math.inf), math.inf


def _check_classes(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise `ValueError` unless dimension 1 has a number for each class; padding has negative targets."""
    _check_tensor(outputs)
    shape, classes = [*outputs.shape[:1], *outputs.shape[2:]], outputs.shape[1] if outputs.ndim > 1 else 0
    if shape != list(targets.shape) or targets.is_floating_point() or classes < 2:
        raise ValueError(
            f"outputs are {list(outputs.shape)}, targets {targets.dtype} {list(targets.shape)}; expected "
            "[examples, classes] with at least 2 classes, and a class for each example"
        )
    if targets.numel() and (largest := int(targets.max())) >= classes:
        raise ValueError(
            f"the class {largest} is among the targets, and outputs have {classes}; expected 0 to {classes - 1}"
        )


def _match(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the outputs in the shape of the targets."""
    _check_tensor(outputs)
    if outputs.numel() != targets.numel():
        raise ValueError(f"outputs are {list(outputs.shape)}, targets {list(targets.shape)}; expected as many numbers")
    return outputs.reshape(targets.shape)


def _check_tensor(outputs: object) -> None:
    if not hasattr(outputs, "argmax"):
        raise ValueError(
            f"the module returned a {type(outputs).__name__}; expected a tensor, or a metric of your own, whose "
            "measure() gets these outputs"
        )
