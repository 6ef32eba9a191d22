"""Scores of a model of transformers: sums over the tokens, or the examples, whose labels count."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedplat import metrics
from fedplat.errors import DataError

IGNORED = -100
"""The label of tokens that do not count, such as padding."""


def is_causal(model: object) -> bool:
    """Return whether a model of transformers continues texts, so that its labels are the tokens themselves.

    The library knows such classes as GPT2LMHeadModel only by their names.
    """
    from transformers.models.auto import modeling_auto  # run.py reports a missing package

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return getattr(model, "loss_type", None) == "ForCausalLM" or type(model).__name__ in names


class LabelScores:
    """Sums over the tokens, or the examples, whose labels count."""

    def __init__(self, module: torch.nn.Module) -> None:
        base = getattr(module, "get_base_model", lambda: module)()
        self._module, self._shifts = module, is_causal(base)
        self._are_tokens, self.has_labels = False, False
        self._loss = self._hits = self._answers = 0.0
        self.count = 0.0
        """The number of labels that count."""

    def add_scaled(self, loss: torch.Tensor, labels: torch.Tensor | None, num_items: torch.Tensor | int | None) -> None:
        """Add a batch's loss, the mean over its labels, or a part of the mean over `num_items` of several batches."""
        count = self._count(labels)
        self.count += count
        self._loss += float(loss) * (count if num_items is None else float(num_items))

    def score(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Add the loss and the correct answers of the model for a batch."""
        outputs, labels = self._module(**batch), batch.get("labels")
        loss = getattr(outputs, "loss", None)
        if labels is None or loss is None:
            raise DataError('an evaluation needs labels; expected a collator whose batches have "labels"')
        count = self._count(labels)
        if not count:
            return  # the loss of padding alone is NaN
        self.count += count
        self._loss += float(loss) * count
        logits = outputs.logits
        if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
            return
        if self._shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        self._hits += float(((logits.argmax(-1) == labels) & (labels != IGNORED)).sum())
        self._answers += count

    def means(self) -> dict[str, float]:
        """Return `loss`, `perplexity` if the labels are tokens, and `accuracy` if answers were counted."""
        means = {"loss": self._loss / self.count} if self.count else {}
        if self._are_tokens and self.count:
            means |= metrics.perplexity_of(means["loss"])
        return means | ({"accuracy": self._hits / self._answers} if self._answers else {})

    def _count(self, labels: torch.Tensor | None) -> float:
        if labels is None:
            return 0.0
        self.has_labels = True
        if labels.is_floating_point():
            return float(len(labels))
        self._are_tokens = self._are_tokens or labels.ndim > 1
        return float((labels[..., 1:] if self._shifts else labels).ne(IGNORED).sum())
