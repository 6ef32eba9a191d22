"""FedNTD: a client keeps what the received model says about the classes that an example does not belong to.

Source: Lee et al. 2022, "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", arXiv
2106.03097, Section 4: cross-entropy + β KL(q ‖ p), where q and p are the softmax of the logits / τ without the true
class, of the received model and of the model in training; with the factor τ² of the published code.
"""

from typing import Annotated

import msgspec
import torch
from torch import nn
from torch.nn import functional

from fedplat.aggregate import LocalAlgorithm, LossContext
from fedplat.aggregate.local import LossFunction


class FedNTD(msgspec.Struct, frozen=True):
    """Options of FedNTD."""

    beta: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    tau: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0

    def build(self) -> LocalAlgorithm:
        """Return the algorithm with these options."""

        def take_not_true(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            """Return the log-probabilities of the other classes, shape (examples, classes - 1)."""
            others = torch.arange(outputs.shape[1], device=outputs.device) != targets[:, None]
            return functional.log_softmax(outputs[others].view(len(outputs), -1) / self.tau, dim=1)

        def make_loss(context: LossContext) -> LossFunction:
            received = context.copy_module()

            def compute(
                module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                outputs = module(inputs)
                with torch.no_grad():
                    kept = take_not_true(received(inputs), targets)
                trained = take_not_true(outputs, targets)
                distance = functional.kl_div(trained, kept, reduction="batchmean", log_target=True)
                return context.loss(outputs, targets) + self.beta * self.tau**2 * distance, outputs

            return compute

        return LocalAlgorithm(make_loss=make_loss, loss_is_mean=True)
