"""Builders of the PyTorch models that papers use to measure federated learning.

Inputs are images [batch, channels, height, width], or vectors if the model does not start with a convolution. Each
builder draws new initial values from PyTorch's global generator, which `Learner` seeds.
"""

from __future__ import annotations

import torch
from torch import nn


def logistic_regression(num_inputs: int = 784, num_classes: int = 10) -> nn.Module:
    """Build multinomial logistic regression: 7,850 parameters for MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_classes))


def mcmahan_2nn(num_inputs: int = 784, num_classes: int = 10) -> nn.Module:
    """Build the "2NN" for MNIST: two hidden layers of 200 units, 199,210 parameters.

    Source: McMahan et al. 2017, arXiv 1602.05629, Section 3.
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(num_inputs, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, num_classes)
    )


def mcmahan_cnn(num_classes: int = 10) -> nn.Module:
    """Build the CNN for MNIST: two 5 x 5 convolutions (32, 64 channels), 512 units; 1,663,370 parameters.

    Source: McMahan et al. 2017, arXiv 1602.05629, Section 3.
    """
    return nn.Sequential(
        *_convolution(1, 32, padding=2),
        *_convolution(32, 64, padding=2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )


def lenet5(channels: int = 1, size: int = 28, num_classes: int = 10) -> nn.Module:
    """Build LeNet-5 as in NIID-Bench: 6 and 16 channels, 120 and 84 units; 44,426 parameters for MNIST.

    `size` is the height and width of an image. Source: Li et al. 2022, "Federated Learning on Non-IID Data Silos: An
    Experimental Study", arXiv 2102.02079, Section 5.
    """
    side = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        *_convolution(channels, 6),
        *_convolution(6, 16),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def cifar_cnn(num_classes: int = 10) -> nn.Module:
    """Build a small CNN for 32 x 32 colour images; 122,570 parameters.

    It has 3 x 3 convolutions (32, 64, 64 channels) and 64 units. Source: TensorFlow's tutorial "Convolutional Neural
    Network (CNN)".
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def digits_2nn() -> nn.Module:
    """Build two hidden layers of 50 units for scikit-learn's digits of 8 x 8 pixels: 6,310 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))


class NextCharacter(nn.Module):
    """Predicts the character that follows codes [batch, length]: an embedding of 8, and two LSTM layers."""

    def __init__(self, num_characters: int, num_units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, 8)
        self.lstm = nn.LSTM(8, num_units, num_layers=2, batch_first=True)
        self.output = nn.Linear(num_units, num_characters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, characters]."""
        states, _ = self.lstm(self.embedding(codes))
        return self.output(states[:, -1])


def mcmahan_lstm(num_characters: int = 85, num_units: int = 256) -> nn.Module:
    """Build the stacked character LSTM for Shakespeare's plays: 821,245 parameters with our loader's characters.

    Source: McMahan et al. 2017, arXiv 1602.05629, Section 3.
    """
    return NextCharacter(num_characters, num_units)


def _convolution(inputs: int, outputs: int, padding: int = 0) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)
