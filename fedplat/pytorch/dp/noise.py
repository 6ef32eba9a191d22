"""The randomness of private trainings: the noise, and the draw of examples for each step."""

from __future__ import annotations

import hashlib
import os
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from fedplat.privacy.noise import KEY_BYTES, Noise


class StepNoise:
    """Draws of examples and noise; never repeats a number."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._drawn = self._added = 0

    def draw_examples(self, num_examples: int, probability: float) -> npt.NDArray[np.int64]:
        """Draw the examples of a step, each independently with this probability; the result may be empty."""
        if probability >= 1.0:
            return np.arange(num_examples)
        numbers = self._noise.normal("draws", self._drawn, num_examples)
        self._drawn += num_examples
        return np.flatnonzero(numbers < NormalDist().inv_cdf(probability))

    def add_noise(self, total: torch.Tensor, deviation: float) -> torch.Tensor:
        """Return a tensor with noise of standard deviation `deviation` added to each entry, as float64 on the CPU.

        A later rounding to float32 removes the last bits of the noise, which the attack of Mironov 2012, "On
        Significance of the Least Significant Bits for Differential Privacy", uses.
        """
        numbers = self._noise.normal("noise", self._added, total.numel())
        self._added += total.numel()
        return total.cpu().double() + deviation * torch.from_numpy(numbers).view(total.shape)


def make_noise(seed: int | None) -> StepNoise:
    """Return the randomness of a seed, for simulations; without one, that of the operating system, unrepeatable."""
    if seed is None:
        return StepNoise(Noise(os.urandom(KEY_BYTES)))
    return StepNoise(Noise(hashlib.sha256(f"private training {seed}".encode()).digest()))
