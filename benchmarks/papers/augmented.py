"""Local training on pictures of digits that are cropped, flipped and covered in part at random, as plugins.

Source: the published code of Lee et al. 2022, arXiv 2106.03097 (`Lee-Gihun/FedNTD`, `train_tools/preprocessing/mnist`).
Its transformations of a training picture, in order: four black pixels around it and a random crop to its size; a
horizontal flip of every second picture; normalization to mean 0 and deviation 1; and a square of 16 pixels around a
random one, cut off at the borders, set to 0. Test pictures are only normalized. Here the network normalizes
(`network`), so the square is set to the mean of all pixels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional

from fedplat.aggregate import LocalAlgorithm, LossContext
from fedplat.aggregate.local import LossFunction
from fedplat.pytorch.models import mcmahan_cnn

MEAN, DEVIATION = 0.1307, 0.3081
"""Of the pixels of MNIST, between 0 and 1, as in the published code."""
MARGIN, SQUARE = 4, 16


class Normalize(nn.Module):
    """Maps pixels between 0 and 1 to values with mean 0 and deviation 1."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the normalized pixels, of the same shape."""
        return (inputs - MEAN) / DEVIATION


def network() -> nn.Module:
    """Build McMahan's CNN behind the normalization."""
    return nn.Sequential(Normalize(), mcmahan_cnn())


def augment(pictures: torch.Tensor) -> torch.Tensor:
    """Return a random crop, flip and cover of each picture. Shape (examples, 1, height, width), pixels from 0 to 1."""
    number, _, height, width = pictures.shape
    wide = functional.pad(pictures, (MARGIN, MARGIN, MARGIN, MARGIN))
    rows, columns = torch.arange(height), torch.arange(width)
    tops = torch.randint(2 * MARGIN + 1, (number, 1))
    lefts = torch.randint(2 * MARGIN + 1, (number, 1))
    flipped = torch.rand(number, 1) < 0.5
    taken = torch.where(flipped, columns.flip(0), columns) + lefts
    cropped = wide[torch.arange(number)[:, None, None], 0, (rows + tops)[:, :, None], taken[:, None, :]]

    def cover(length: int, cells: torch.Tensor) -> torch.Tensor:
        middle = torch.randint(length, (number, 1))
        return (cells >= middle - SQUARE // 2) & (cells < middle + SQUARE // 2)

    covered = cover(height, rows)[:, :, None] & cover(width, columns)[:, None, :]
    return torch.where(covered, MEAN, cropped)[:, None]


def _augment_loss(algorithm: LocalAlgorithm) -> LocalAlgorithm:
    """Return the algorithm on augmented pictures."""

    def make_loss(context: LossContext) -> LossFunction:
        def compute_own(module: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
            outputs = module(inputs)
            return context.loss(outputs, targets), outputs

        compute = compute_own if algorithm.make_loss is None else algorithm.make_loss(context)
        return lambda module, inputs, targets: compute(module, augment(inputs), targets)

    return LocalAlgorithm(make_loss=make_loss, loss_is_mean=True)


class AugmentedSgd(msgspec.Struct, frozen=True):
    """Plain local steps."""

    def build(self) -> LocalAlgorithm:
        """Return the algorithm."""
        return _augment_loss(LocalAlgorithm())


class AugmentedNotTrueDistillation(msgspec.Struct, frozen=True):
    """The FedNTD of `examples/plugins` with the paper's options."""

    def build(self) -> LocalAlgorithm:
        """Return the algorithm."""
        path = Path(__file__).resolve().parents[2] / "examples/plugins/fedntd.py"
        spec = importlib.util.spec_from_file_location("fedntd", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is missing")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return _augment_loss(module.FedNTD().build())
