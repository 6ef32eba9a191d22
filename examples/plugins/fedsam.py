"""FedSAM: local steps of sharpness-aware minimization, so that the models of different clients are in flat minima.

Sources: Qu et al. 2022, "Generalized Federated Learning via Sharpness Aware Minimization", arXiv 2206.02618,
Algorithm 1; Caldarola et al. 2022, arXiv 2203.11834. A step uses the gradient at w + rho g / ‖g‖, where g is the
gradient at w.
"""

from typing import Annotated

import msgspec
import torch

from fedplat.aggregate import LocalAlgorithm
from fedplat.aggregate.local import Arrays


class FedSAM(msgspec.Struct, frozen=True):
    """Options of FedSAM."""

    rho: Annotated[float, msgspec.Meta(gt=0, le=100)] = 0.1

    def build(self) -> LocalAlgorithm:
        """Return the algorithm with these options."""

        def perturb(gradients: Arrays) -> Arrays:
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            return {name: self.rho / (norm + 1e-12) * gradient for name, gradient in gradients.items()}

        return LocalAlgorithm(perturb=perturb)
