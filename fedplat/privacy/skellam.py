"""Skellam noise, the difference of two Poisson draws, on numbers that were rounded; all in steps of the quantizer.

The noise of several clients adds up to Skellam noise again, of the sum of their variances. Sources: Agarwal, Kairouz
and Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning", arXiv 2110.04995, Section 3, for
the divergences; Kairouz, Liu and Steinke 2021, "The Distributed Discrete Gaussian Mechanism for Federated Learning with
Secure Aggregation", arXiv 2102.06387, Section 4, for conditional rounding and for the number of bits.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.privacy.noise import KeyStream, Normals

Integers: TypeAlias = npt.NDArray[np.int64]

BETA = math.exp(-0.5)
"""Bound on the probability that a vector is rounded once more, because its norm is above `rounded_sensitivity`."""
HEADROOM = 4.0
"""Standard deviations of an entry of a sum that fit the modulus; beyond them it wraps around."""
_TABLE_MEAN = 1000.0
_TABLE_DEVIATIONS = 40.0


def renyi_divergence(order: npt.NDArray[np.float64], l1: float, l2: float, variance: float) -> npt.NDArray[np.float64]:
    """Return the Rényi divergences of whole orders between Skellam noise and the same noise on a shifted vector.

    The vectors are of whole numbers, and differ by `l1` and `l2` in these norms; `variance` is that of the noise.
    """
    surplus = np.minimum(((2.0 * order - 1.0) * l2**2 + 6.0 * l1) / (4.0 * variance**2), 1.5 * l1 / variance)
    return order * l2**2 / (2.0 * variance) + surplus


def rounded_sensitivity(norm: float, size: int, beta: float = BETA) -> float:
    """Return the bound on the L2 norm of a vector of `size` entries and norm `norm`, after conditional rounding."""
    always = norm + math.sqrt(size)
    if not beta:
        return always
    likely = norm**2 + size / 4.0 + math.sqrt(-2.0 * math.log(beta)) * (norm + math.sqrt(size) / 2.0)
    return min(always, math.sqrt(likely))


def fit_norm(most: float, size: int, modulus: int, num_clients: int, variance_factor: float) -> float:
    """Return the largest norm, at most `most`, with which the sum of `num_clients` rotated vectors fits a modulus.

    The noise of the sum has the variance `variance_factor` times the square of the rounded sensitivity. Returns 0 if no
    norm fits.
    """
    # HEADROOM^2 (spread x^2 + variance_factor x + rest) = (2^(modulus - 1))^2, where x is the norm
    spread = num_clients**2 / 2 ** (size.bit_length() - 1) + variance_factor
    rest = num_clients / 4.0 + variance_factor * (size / 4.0 + math.sqrt(size) / 2.0)
    rest -= (2.0 ** (modulus - 1) / HEADROOM) ** 2
    if rest >= 0.0:
        return 0.0
    return min(most, -2.0 * rest / (variance_factor + math.sqrt(variance_factor**2 - 4.0 * spread * rest)))


def least_sensitivity(most: float, modulus: int, num_clients: int, variance_factor: float) -> float:
    """Return a lower bound of the rounded sensitivity after `fit_norm`, for models of any size; 0 if no norm fits."""
    room = (2.0 ** (modulus - 1) / HEADROOM) ** 2 - num_clients / 4.0
    return min(most, math.sqrt(max(room, 0.0) / (num_clients**2 + variance_factor)))


def draw(stream: KeyStream, variance: float, size: int) -> Integers:
    """Return Skellam noise of mean 0, shape [size]."""
    return _draw_poisson(stream, variance / 2.0, size) - _draw_poisson(stream, variance / 2.0, size)


def _draw_poisson(stream: KeyStream, mean: float, size: int) -> Integers:
    """Return Poisson draws less the whole part of their mean, shape [size]."""
    return (_draw_from_table if mean < _TABLE_MEAN else _draw_by_rejection)(stream, mean, size)


def _draw_from_table(stream: KeyStream, mean: float, size: int) -> Integers:
    """Draw by inversion of the distribution function."""
    counts = np.arange(1.0, mean + _TABLE_DEVIATIONS * (1.0 + math.sqrt(mean)))
    log_ratios = math.log(mean) - np.log(counts)
    cumulative = np.cumsum(np.exp(np.cumsum([-mean, *log_ratios])))
    return np.searchsorted(cumulative, stream.uniform(size)) - math.floor(mean)


def _draw_by_rejection(stream: KeyStream, mean: float, size: int) -> Integers:
    """Draw by transformed rejection: algorithm PTRS of Hörmann 1993.

    "The Transformed Rejection Method for Generating Poisson Random Variables", Insurance: Mathematics and Economics 12.
    The numbers are counted from the whole part of the mean, so that none is too large for the 53 bits of a float.
    """
    part = mean - math.floor(mean)
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = 0.02483 * b - 0.059
    inverse_alpha, sure = 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2.0)
    drawn, missing = np.empty(size, np.int64), np.arange(size)
    while missing.size:
        u, v = stream.uniform(missing.size) - 0.5, stream.uniform(missing.size)
        s = 0.5 - np.abs(u)
        k = np.floor((2.0 * a / s + b) * u + (part + 0.43))
        accepted = (s >= 0.07) & (v <= sure)
        [unsure] = np.nonzero(~accepted & ((s >= 0.013) | (v <= s)) & (k - part > -mean))
        bound = np.log(v[unsure] * inverse_alpha / (a / s[unsure] ** 2 + b))
        accepted[unsure] = bound <= _log_probability(k[unsure] - part, mean)
        drawn[missing[accepted]] = k[accepted]
        missing = missing[~accepted]
    return drawn


def _log_probability(distance: Normals, mean: float) -> Normals:
    """Return the logarithm of the Poisson probability at a distance from a mean that is large.

    In this form, of Loader 2000, "Fast and Accurate Computation of Binomial Probabilities", large numbers do not cancel
    each other. Its series is not accurate far below the mean, where the probability is nearly 0 anyway.
    """
    relative, count = distance / mean, distance + mean
    deviance = mean * ((1.0 + relative) * np.log1p(relative) - relative)
    return -deviance - 0.5 * np.log(2.0 * math.pi * count) - 1.0 / (12.0 * count)
