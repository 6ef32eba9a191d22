"""The papers' models have the papers' numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedplat.pytorch import models
from fedplat.simulation.data.sources.common import CHARACTERS

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    ("make", "shape", "count"),
    [
        (models.logistic_regression, MNIST, 784 * 10 + 10),
        (models.mcmahan_2nn, MNIST, 199_210),
        (models.mcmahan_cnn, MNIST, 1_663_370),
        (models.lenet5, MNIST, 44_426),
        (lambda: models.lenet5(channels=3, size=32), CIFAR, 62_006),
        (models.cifar_cnn, CIFAR, 122_570),
        (models.digits_2nn, (1, 8, 8), 6_310),
    ],
)
def test_number_of_parameters(make: Callable[[], nn.Module], shape: tuple[int, ...], count: int) -> None:
    module = make()
    assert sum(parameter.numel() for parameter in module.parameters()) == count
    assert module(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_lstm_knows_the_characters_of_the_loader() -> None:
    module = models.mcmahan_lstm()
    assert sum(parameter.numel() for parameter in module.parameters()) == 821_245
    codes = torch.zeros(2, 80, dtype=torch.int64)
    assert module(codes).shape == (2, len(CHARACTERS))
