"""The models of the papers that federated learning is measured by, as builders of PyTorch modules.

Inputs are images [batch, channels, height, width], or vectors where no convolution comes first. Each builder makes new
initial values from PyTorch's global generator; `Learner` gives it a seed.
"""

from __future__ import annotations

from torch import nn


def logistic_regression(num_inputs: int = 784, num_classes: int = 10) -> nn.Module:
    """Multinomial logistic regression: 7,850 parameters for MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_classes))


def mcmahan_2nn(num_inputs: int = 784, num_classes: int = 10) -> nn.Module:
    """The "2NN" for MNIST: two hidden layers of 200 units, 199,210 parameters.

    Source: McMahan et al. 2017, arXiv 1602.05629, Section 3.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, num_classes),
    )


def mcmahan_cnn(num_classes: int = 10) -> nn.Module:
    """The CNN for MNIST: two 5 x 5 convolutions (32, 64 channels), 512 units; 1,663,370 parameters.

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
    """LeNet-5 as NIID-Bench has it: 6 and 16 channels, 120 and 84 units; 44,426 parameters for MNIST.

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
    """A small CNN for 32 x 32 colour images: 3 x 3 convolutions (32, 64, 64 channels), 64 units; 122,570 parameters.

    Source: the tutorial of TensorFlow, "Convolutional Neural Network (CNN)".
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


def _convolution(inputs: int, outputs: int, padding: int = 0) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)
