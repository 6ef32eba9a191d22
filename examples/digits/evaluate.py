"""The server's evaluator: accuracy and loss on the held-out fifth of the digits."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import model
from fedplat import Parameters
from fedplat.pytorch.convert import load_into


@cache
def _set_up() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.set_num_threads(1)
    images, labels = model.held_out().tensors
    return model.build().eval(), images, labels


def evaluate(parameters: Parameters) -> dict[str, float]:
    """Score a model version. The server calls this function in a separate process."""
    network, images, labels = _set_up()
    load_into(network, parameters)
    with torch.no_grad():
        scores = network(images)
    return {
        "accuracy": (scores.argmax(1) == labels).float().mean().item(),
        "loss": nn.functional.cross_entropy(scores, labels).item(),
    }
