"""The loss of local steps: the learner's, or the own loss of a local algorithm."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedplat.aggregate.local import Arrays, LocalAlgorithm, LossContext, LossFunction
from fedplat.pytorch.training.examples import Examples
from fedplat.pytorch.training.learner import Learner, Trainee, use_seed
from fedplat.pytorch.training.schedule import iterate_batches

_READ_BATCH_SIZE = 1024


def make_loss(learner: Learner) -> LossFunction:
    """Return the loss of a learner as a function of its module and a batch."""
    loss_of = learner.batch_loss

    def compute(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = module(inputs)
        return loss_of(outputs, targets), outputs

    return compute


def make_own_loss(
    algorithm: LocalAlgorithm, trainee: Trainee, examples: Examples, remembered: Arrays, seed: int
) -> LossFunction:
    """Return the loss of an algorithm for one client's training, or the learner's if it has none of its own.

    The module must have the received values. Random draws of `make_loss` follow from `seed`, and leave those of the
    training as they are.
    """
    if algorithm.make_loss is None:
        return make_loss(trainee.learner)
    context = LossContext(
        loss=trainee.learner.batch_loss,
        read_targets=lambda: read_targets(examples),
        copy_module=lambda: copy.deepcopy(trainee.module).eval().requires_grad_(False),
        remembered=remembered,
    )
    with use_seed(trainee.device, seed):
        return algorithm.make_loss(context)


def read_targets(examples: Examples) -> torch.Tensor:
    """Return the targets of all examples, in their order."""
    order = iterate_batches(len(examples), _READ_BATCH_SIZE)
    return torch.cat([targets for _, targets in examples.batches(order)])


def forward_features(module: nn.Module, inputs: torch.Tensor, layer: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a module's outputs and its features: the inputs of the layer of that name, by default its last linear one.

    Shapes: [batch, ...] and [batch, size]. Raises `ValueError` if the module has no such layer, or does not use it.
    """
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layer and not linear:
        raise ValueError(
            f"{type(module).__name__} has no linear layer; expected the name of the layer after its features"
        )
    chosen = module.get_submodule(layer) if layer else linear[-1]
    found: list[torch.Tensor] = []
    handle = chosen.register_forward_pre_hook(lambda part, arguments: found.append(arguments[0]))
    try:
        outputs = module(inputs)
    finally:
        handle.remove()
    if not found:
        raise ValueError(f"the layer {layer or 'of the features'} is not used by {type(module).__name__}")
    return outputs, found[-1].flatten(1)
