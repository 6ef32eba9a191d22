"""Language models of transformers as modules that fedplat's own trainers and simulations train."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def causal_lm(model: Module) -> Module:
    """Change a model of transformers, with or without adapters, to return logits [batch, tokens, time]; return it.

    Its inputs are tokens [batch, time], and the targets of the cross entropy the tokens that follow each of them, -100
    for what does not count, such as padding at the end. The tensors keep their names, so `HuggingFaceTrainer` and
    `fedplat model export` take the same job's model from the function that makes the model without this change.
    """
    model.register_forward_hook(_take_logits)
    return model


def _take_logits(module: torch.nn.Module, arguments: Any, outputs: Any) -> torch.Tensor:
    return outputs.logits.transpose(1, 2)
