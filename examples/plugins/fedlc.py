"""FedLC: a client calibrates its logits by how often each class occurs in its data.

Source: Zhang et al. 2022, "Federated Learning with Label Distribution Skew via Logits Calibration", arXiv 2209.00189,
Section 4: cross-entropy of the logits f_c - τ n_c^(-1/4), where n_c is the client's number of examples of the class c.
"""

from typing import Annotated

import msgspec
import torch
from torch import nn

from fedplat.aggregate import LocalAlgorithm, LossContext
from fedplat.aggregate.local import LossFunction

ABSENT = 1e-8
"""n_c of a class without examples: τ n_c^(-1/4) is then 100 τ, which removes the class from the softmax."""


class FedLC(msgspec.Struct, frozen=True):
    """Options of FedLC."""

    tau: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.5

    def build(self) -> LocalAlgorithm:
        """Return the algorithm with these options."""

        def make_loss(context: LossContext) -> LossFunction:
            classes = context.read_targets()

            def compute(
                module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                outputs = module(inputs)
                counts = torch.bincount(classes, minlength=outputs.shape[1]).float()
                margins = self.tau * counts.clamp(min=ABSENT).pow(-0.25)
                return context.loss(outputs - margins, targets), outputs

            return compute

        return LocalAlgorithm(make_loss=make_loss, loss_is_mean=True)
