"""Our SGD is that of PyTorch."""

from __future__ import annotations

import pytest
import torch

from fedplat.pytorch.training import Sgd


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_steps_equal_those_of_pytorch(momentum: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = {name: torch.nn.Parameter(torch.randn(3, 4, generator=generator)) for name in "abc"}
    ours = {name: weight.detach().clone() for name, weight in theirs.items()}
    torch_sgd = torch.optim.SGD(theirs.values(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    sgd = Sgd(learning_rate=0.1, momentum=momentum, weight_decay=weight_decay)
    for step in range(6):
        gradients = {name: torch.randn(3, 4, generator=generator) for name in ours if (name, step) != ("b", 2)}
        for name, weight in theirs.items():  # a parameter that a step did not use has no gradient
            weight.grad = gradients[name].clone() if name in gradients else None
        torch_sgd.step()
        sgd.step(ours, gradients)
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight.detach(), rtol=0, atol=1e-6)
