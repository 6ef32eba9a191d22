"""Which models have gradients of single examples at all, as Opacus' validator says it."""

from __future__ import annotations

from opacus.validators import ModuleValidator
from torch import nn

from fedplat.errors import ModelError

_MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""They look at other examples of the batch even where nothing of them is trained."""
_SENTENCES = 2
"""Of Opacus' reason; the rest is about its own releases."""


def check(module: nn.Module) -> None:
    """Raises `ModelError`, with the reason and what to put there instead, for a layer that Opacus cannot handle.

    What no validator sees is a `forward` that lets examples of a batch look at each other: nothing is promised for it.
    """
    module.train()
    for name, part in module.named_modules():
        if not isinstance(part, _MIXING) and not any(each.requires_grad for each in part.parameters()):
            continue
        validator = ModuleValidator.VALIDATORS.get(type(part))
        if reasons := validator(part) if validator is not None else []:
            raise ModelError(f"{_proposal(name, part)}. Opacus says: {_shorten(str(reasons[0]))}")


def _proposal(name: str, part: nn.Module) -> str:
    kind, where = type(part).__name__, f"its layer {name!r}" if name else "the module"
    said = f"the model cannot be trained with example-level privacy: {where} is {kind}"
    fixer = ModuleValidator.FIXERS.get(type(part))
    if fixer is None:
        return f"{said}; expected another layer there"
    instead = " ".join(str(fixer(part)).split())
    return f"{said}; put {instead} there, as opacus.validators.ModuleValidator.fix(module) does"


def _shorten(reason: str) -> str:
    sentences = " ".join(reason.split()).split(". ")
    return ". ".join(sentences[:_SENTENCES]).removesuffix(".") + "."
