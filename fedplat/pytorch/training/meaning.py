"""What a module's outputs mean, and the means of metrics over examples that follow from it.

A loss of the owner's may take any outputs: one logit, distances, a mean and a variance, a dict. So it says nothing
about which answers are correct, and without the owner's word there is no accuracy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from msgspec import Struct
from torch import nn
from torch.nn import functional

from fedplat.errors import ModelError
from fedplat.metrics import Metric, compute_all, measure
from fedplat.pytorch.training.broadcasts import RefuseBroadcasts

Loss: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor]
Correct: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor]
"""Returns, for outputs and targets, a tensor of booleans: which answers are correct, without those that do not count,
such as padding."""
Accuracy: TypeAlias = Correct | Literal["auto", "classes", "none"]
_CLASS_LOSSES: tuple[Any, ...] = (functional.cross_entropy, functional.nll_loss)
_CLASS_LOSS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_PAIRED_LOSSES: tuple[Any, ...] = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.poisson_nll_loss,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
    functional.kl_div,
    functional.multilabel_soft_margin_loss,
)
_PAIRED_LOSS_MODULES = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.HingeEmbeddingLoss,
    nn.KLDivLoss,
    nn.MultiLabelSoftMarginLoss,
)
_IGNORED = -100
"""The target that PyTorch's losses ignore, unless another is given."""


@dataclass(frozen=True)
class GuardedLoss:
    """One of PyTorch's losses; what it would misunderstand is an error.

    `is_paired` is for losses of one target for each output: PyTorch would compare each of the outputs [n, 1] with each
    of the targets [n].
    """

    loss: Loss
    is_paired: bool

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch. Raises `ModelError` if the outputs do not fit the loss."""
        if not isinstance(outputs, torch.Tensor):
            raise ModelError(
                f"the module returned a {type(outputs).__name__}, and {_name(self.loss)} takes a tensor; expected a "
                "loss of your own, such as loss=lambda outputs, targets: cross_entropy(outputs.logits, targets)"
            )
        if self.is_paired:
            targets = _pair(outputs, targets, self.loss)
        elif not targets.is_floating_point():  # booleans, and integers of any width, which only PyTorch refuses
            targets = targets.long()
        try:
            return self.loss(outputs, targets)
        except (IndexError, RuntimeError, AssertionError) as exc:
            if not self.is_paired and (reason := _explain_classes(outputs, targets)):
                raise ModelError(f"{_name(self.loss)}: {reason}") from exc
            raise


class OwnLoss:
    """A loss of the author's own; its first batches are searched for a mistake that no exception shows."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._is_checked = loss, False

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch. Raises `ModelError` unless it is one number that depends on the outputs."""
        if self._is_checked:
            loss = self._loss(outputs, targets)
        else:
            with RefuseBroadcasts(outputs, targets, _PAIRED_LOSSES):
                loss = self._loss(outputs, targets)
            self._is_checked = len(targets) > 1
        found = cast(object, loss)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            kind = f"a tensor {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise ModelError(f"the loss returned {kind}; expected a tensor of one number, the mean of the batch")
        if isinstance(outputs, torch.Tensor) and outputs.requires_grad and not found.requires_grad:
            raise ModelError(
                "the loss has no gradient; expected one that is computed from the outputs, without detach(), item(), "
                "argmax() or NumPy"
            )
        return found


@dataclass(frozen=True)
class CountClasses:
    """Counts answers that are classes: the largest of dimension 1 of the outputs; `ignored` is the target of others."""

    ignored: int = _IGNORED

    def suits(self, outputs: Any, targets: torch.Tensor) -> bool:
        """Return whether the targets are classes. Raises `ModelError` if the outputs are no tensor."""
        if not isinstance(outputs, torch.Tensor):
            raise ModelError(
                f'accuracy = "classes": the module returned a {type(outputs).__name__}; expected a tensor [examples, '
                "classes, ...], or a function of (outputs, targets) that returns which answers are correct"
            )
        return outputs.ndim == targets.ndim + 1 and not targets.is_floating_point()

    def __call__(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the numbers of correct answers and of answers; None if the targets are no classes."""
        if not self.suits(outputs, targets):
            return None
        targets = targets.long()  # a smaller type could not be compared with -100
        counts, hits = targets != self.ignored, outputs.detach().argmax(1) == targets
        return (hits & counts if self.ignored >= 0 else hits).sum(), counts.sum()  # no answer is below 0


@dataclass(frozen=True)
class CountCorrect:
    """Counts answers with a function of the owner's."""

    correct: Correct

    def __call__(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of correct answers and of answers. Raises `ModelError` for other results."""
        answers = cast(object, self.correct(detach(outputs), targets))
        if not isinstance(answers, torch.Tensor) or answers.dtype != torch.bool:
            kind = answers.dtype if isinstance(answers, torch.Tensor) else type(answers).__name__
            raise ModelError(
                f"the function of the accuracy returned {kind}; expected a tensor of booleans, one for each answer"
            )
        return answers.sum(), torch.tensor(answers.numel(), device=answers.device)


CountAnswers: TypeAlias = CountClasses | CountCorrect


@dataclass(frozen=True, eq=False)
class ClassWeights:
    """The weights in the mean that a loss of classes is: 0 for `ignored` targets, else those of `classes`, or 1."""

    ignored: int
    classes: torch.Tensor | None

    def __call__(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each target; None for probabilities, where each example has the same one."""
        if targets.is_floating_point():
            return None
        targets = targets.long()
        counts = targets != self.ignored
        if self.classes is None:
            return counts
        return self.classes.detach().to(targets.device)[targets.where(counts, 0)] * counts

    def are_answers(self, count: CountAnswers | None) -> bool:
        """Return whether the sum of the weights is the number of answers, which need not be counted twice."""
        return self.classes is None and count == CountClasses(self.ignored)


def guard(loss: Loss) -> Loss:
    """Return a loss that refuses what PyTorch would misunderstand."""
    function = _plain(loss)
    if function in _CLASS_LOSSES or type(loss) in _CLASS_LOSS_MODULES:
        return GuardedLoss(loss, is_paired=False)
    if function in _PAIRED_LOSSES or type(loss) in _PAIRED_LOSS_MODULES:
        return GuardedLoss(loss, is_paired=True)
    return OwnLoss(loss)


def check_reduction(loss: Loss) -> None:
    """Raise `ValueError` for one of PyTorch's losses that is not a mean over the batch: it would be reported as one."""
    if type(loss).__module__ == nn.CrossEntropyLoss.__module__:
        reduction = getattr(loss, "reduction", "mean")
    elif isinstance(loss, functools.partial) and getattr(loss.func, "__module__", "") == functional.__name__:
        reduction = loss.keywords.get("reduction", "mean")
    else:
        return
    if reduction not in ("mean", "batchmean"):
        raise ValueError(
            f'loss: {_name(loss)} has reduction = {reduction!r}; expected "mean", since batches have different sizes'
        )


def choose_count(accuracy: Accuracy, loss: Loss) -> CountAnswers | None:
    """Return how correct answers are counted, or None without an accuracy. Raises `ValueError` for another value."""
    if callable(accuracy):
        return CountCorrect(accuracy)
    if accuracy not in ("auto", "classes", "none"):
        raise ValueError(f'accuracy = {accuracy!r}: expected "auto", "classes", "none", or a function')
    ignored = _ignored_target(loss)
    if accuracy == "none" or (accuracy == "auto" and ignored is None):
        return None
    return CountClasses(_IGNORED if ignored is None else ignored)


def choose_weights(loss: Loss) -> ClassWeights | None:
    """Return the weights of targets in one of PyTorch's losses of classes; None for others, the mean over examples."""
    ignored = _ignored_target(loss)
    if ignored is None:
        return None
    if type(loss) in _CLASS_LOSS_MODULES:
        return ClassWeights(ignored, cast(Any, loss).weight)
    return ClassWeights(ignored, loss.keywords.get("weight") if isinstance(loss, functools.partial) else None)


def weighs_classes(loss: Loss) -> bool:
    """Return whether a loss of classes is the weighted mean of a batch: that of one example does not depend on them."""
    weights = choose_weights(loss)
    return weights is not None and weights.classes is not None


def _plain(loss: Loss) -> Loss:
    """Return the function of a `functools.partial` with keywords, else the loss."""
    return cast(Loss, loss.func) if isinstance(loss, functools.partial) and not loss.args else loss


def _ignored_target(loss: Loss) -> int | None:
    """Return the target that a loss of classes ignores; None for other losses."""
    if type(loss) in _CLASS_LOSS_MODULES:
        return int(cast(Any, loss).ignore_index)
    if _plain(loss) in _CLASS_LOSSES:
        return int(loss.keywords.get("ignore_index", _IGNORED)) if isinstance(loss, functools.partial) else _IGNORED
    return None


def detach(outputs: Any) -> Any:
    """Return outputs without their gradients, if they are a tensor."""
    return outputs.detach() if isinstance(outputs, torch.Tensor) else outputs


def _pair(outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Return the targets as numbers in the shape of the outputs, which has dimensions of length 1 more or less."""
    if not targets.is_floating_point():
        targets = targets.to(outputs.dtype)
    if outputs.shape == targets.shape:
        return targets
    if outputs.squeeze().shape != targets.squeeze().shape:
        raise ModelError(
            f"the module returned outputs {list(outputs.shape)} for targets {list(targets.shape)}, and {_name(loss)} "
            "compares each output with one target; expected equal shapes"
        )
    return targets.reshape(outputs.shape)


def _explain_classes(outputs: torch.Tensor, targets: torch.Tensor) -> str:
    """Return why a loss of classes cannot take these outputs and targets, or ""."""
    found, classes = f"targets {targets.dtype} {list(targets.shape)}", outputs.shape[1] if outputs.ndim > 1 else 0
    expected = [*outputs.shape[:1], *outputs.shape[2:]]
    if targets.is_floating_point() or list(targets.shape) != expected:
        return f"outputs are {list(outputs.shape)}, {found}; expected whole numbers {expected}, the classes"
    try:
        low, high = int(targets.min()), int(targets.max())
    except RuntimeError:  # in `vmap`, where no value can be read
        return ""
    return f"the targets are {low} to {high}; expected the classes 0 to {classes - 1}, one for each output"


def _name(loss: Loss) -> str:
    return str(getattr(_plain(loss), "__name__", type(loss).__name__))


class Sums(Struct, frozen=True, array_like=True):
    """Sums over `num_examples` examples; `hits` of `num_answers` answers were correct.

    `loss` is divided by `weight`: the examples, or the targets that count in the loss, with the weights of their
    classes. `totals` are the sums of each metric's measurements: numbers, and lists of them.
    """

    loss: float
    num_examples: int
    hits: int
    num_answers: int
    weight: float
    totals: list[dict[str, Any]] = []

    def means(self, metrics: Sequence[Metric] = ()) -> dict[str, float]:
        """Return `loss`, `accuracy` if there are answers, and the values of the metrics that were measured.

        There is no loss if no target counts in it, such as in a batch of padding.
        """
        means = {"loss": self.loss / self.weight} if self.weight else {}
        if self.num_answers:
            means["accuracy"] = self.hits / self.num_answers
        arrays = [{name: np.array(total, np.float64) for name, total in each.items()} for each in self.totals]
        return means | compute_all(metrics, arrays, means)

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Add up parts, in their order."""
        parts = list(parts)
        rows = ((each.loss, each.num_examples, each.hits, each.num_answers, each.weight) for each in parts)
        columns = zip(*rows, strict=True)
        measured = zip(*(each.totals for each in parts), strict=True)
        return cls(*(sum(column) for column in columns), totals=[_add_up(each) for each in measured])


class Scores:
    """Sums of a loss, of correct answers if these can be counted, and of the measurements of metrics.

    They stay on the device until they are read.
    """

    def __init__(
        self, count: CountAnswers | None = None, metrics: Sequence[Metric] = (), weights: ClassWeights | None = None
    ) -> None:
        self._count, self._metrics, self._class_weights = count, metrics, weights
        self._ignored = _IGNORED if weights is None else weights.ignored
        self._is_weight_counted = weights is not None and weights.are_answers(count)
        self._totals: list[dict[str, torch.Tensor]] = [{} for _ in metrics]
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | int] = []
        self._hits: list[torch.Tensor] = []
        self._answers: list[torch.Tensor] = []
        self._num_examples = 0

    def add(self, loss: torch.Tensor, outputs: Any, targets: torch.Tensor) -> None:
        """Add a batch, where `loss` is its mean."""
        self._losses.append(loss.detach())
        self._num_examples += len(targets)
        counted = None if self._count is None else self._count(outputs, targets)
        if counted is not None:
            self._hits.append(counted[0])
            self._answers.append(counted[1])
        if counted is not None and self._is_weight_counted:
            self._weights.append(counted[1])
        else:
            weights = None if self._class_weights is None else self._class_weights(targets)
            self._weights.append(len(targets) if weights is None else weights.sum())
        for metric, totals in zip(self._metrics, self._totals, strict=True):
            measured = measure(metric, detach(outputs), targets, self._ignored)
            _add_to(totals, {name: torch.as_tensor(value).double() for name, value in measured.items()})

    def extend(self, others: Scores) -> None:
        """Add the scores of other batches."""
        self._losses += others._losses
        self._weights += others._weights
        self._hits += others._hits
        self._answers += others._answers
        self._num_examples += others._num_examples
        for totals, more in zip(self._totals, others._totals, strict=True):
            _add_to(totals, more)

    def sums(self) -> Sums:
        """Return the sums so far."""
        loss, weight = self._add_losses() if self._losses else (0.0, 0.0)
        hits, num_answers = (int(torch.stack(each).sum().item()) if each else 0 for each in (self._hits, self._answers))
        totals = [{name: total.tolist() for name, total in each.items()} for each in self._totals]
        return Sums(loss, self._num_examples, hits, num_answers, weight, totals)

    def _add_losses(self) -> tuple[float, float]:
        """Return the sum of the losses, weighted, and of the weights; the loss of padding alone, NaN, has none."""
        losses = torch.stack(self._losses)
        if all(isinstance(each, int) for each in self._weights):
            weights = torch.tensor(self._weights, device=losses.device)
        else:
            weights = torch.stack([torch.as_tensor(each, device=losses.device) for each in self._weights])
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        losses = losses * weights.to(losses.dtype)
        return losses.where(weights > 0, 0.0).double().sum().item(), weights.double().sum().item()

    def means(self) -> dict[str, float]:
        """Return `loss`, `accuracy` if there are answers, and the values of the metrics."""
        return self.sums().means(self._metrics)


def _add_to(totals: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def _add_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: np.sum([each[name] for each in parts], axis=0, dtype=np.float64).tolist() for name in parts[0]}
