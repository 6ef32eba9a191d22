"""The randomness of private trainings: noise, and who is drawn for a step."""

from __future__ import annotations

import hashlib
import os
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from fedplat.privacy.noise import KEY_BYTES, Noise


class StepNoise:
    """Draws and noise, never the same twice."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._drawn = self._added = 0

    def draw_examples(self, num_examples: int, probability: float) -> npt.NDArray[np.int64]:
        """The examples of a step: each with this probability, independently of the others; perhaps none."""
        if probability >= 1.0:
            return np.arange(num_examples)
        numbers = self._noise.normal("draws", self._drawn, num_examples)
        self._drawn += num_examples
        return np.flatnonzero(numbers < NormalDist().inv_cdf(probability))

    def add_noise(self, total: torch.Tensor, deviation: float) -> torch.Tensor:
        """A tensor with noise of this standard deviation in each entry, as float64 on the CPU.

        What is rounded to float32 later has lost the last bits of the noise, which Mironov 2012, "On Significance of
        the Least Significant Bits for Differential Privacy", reads.
        """
        numbers = self._noise.normal("noise", self._added, total.numel())
        self._added += total.numel()
        return total.cpu().double() + deviation * torch.from_numpy(numbers).view(total.shape)


def noise_of(seed: int | None) -> StepNoise:
    """The randomness of a seed, for simulations; without one that of the operating system, which nobody can repeat."""
    if seed is None:
        return StepNoise(Noise(os.urandom(KEY_BYTES)))
    return StepNoise(Noise(hashlib.sha256(f"private training {seed}".encode()).digest()))
