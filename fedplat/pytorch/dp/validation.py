"""Check that a model has gradients of single examples, by Opacus' validator."""

from __future__ import annotations

from opacus.validators import ModuleValidator
from torch import nn

from fedplat.errors import ModelError

_MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers that combine the examples of a batch even if their parameters are not trained."""
_SENTENCES = 2
"""Sentences to quote of Opacus' reason; the rest is about its own releases."""


def check(module: nn.Module) -> None:
    """Raise `ModelError`, with the reason and a replacement, for a layer that Opacus cannot handle.

    A `forward` that combines the examples of a batch is not detected: it has no privacy guarantee.
    """
    module.train()
    for name, part in module.named_modules():
        if not isinstance(part, _MIXING) and not any(each.requires_grad for each in part.parameters()):
            continue
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ModelError(
                f"the model cannot be trained with example-level privacy: its layer {name!r} has max_norm, which "
                "scales the rows that examples use, without noise; use max_norm=None"
            )
        validator = ModuleValidator.VALIDATORS.get(type(part))
        if reasons := validator(part) if validator is not None else []:
            raise ModelError(f"{_describe_problem(name, part)}. Opacus reports: {_shorten(str(reasons[0]))}")


def _describe_problem(name: str, part: nn.Module) -> str:
    kind, layer = type(part).__name__, f"its layer {name!r}" if name else "the module"
    problem = f"the model cannot be trained with example-level privacy: {layer} is {kind}"
    fixer = ModuleValidator.FIXERS.get(type(part))
    if fixer is None:
        return f"{problem}; expected another layer"
    replacement = " ".join(str(fixer(part)).split())
    return f"{problem}; use {replacement}, as opacus.validators.ModuleValidator.fix(module) does"


def _shorten(reason: str) -> str:
    sentences = " ".join(reason.split()).split(". ")
    return ". ".join(sentences[:_SENTENCES]).removesuffix(".") + "."
