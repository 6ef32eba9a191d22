"""Gaussian noise that cannot be distinguished from true noise without the key, also in a tree; and Skellam noise.

The key stream is AES-256 in counter mode (NIST SP 800-38A), of which every 16 bytes become two normal numbers (Box and
Muller 1958). So any part of a vector can be computed without the preceding entries, and repeatedly with the same
result. No number is beyond 8.6, which is rarer than 1e-17.

Source: Kairouz et al. 2021, "Practical and Private (Deep) Learning Without Sampling or Shuffling", arXiv 2103.00039,
Algorithm 1 (DP-FTRL) and Appendix B; the tree is that of Dwork et al. 2010 and Chan et al. 2011. Node (l, i) covers the
rounds i 2^l + 1 to (i + 1) 2^l. After round t the sum has the noise of the nodes that make up t in binary. So round t
adds the noise of the node that it completes, and subtracts that of the smaller nodes covered by it.

Each node's noise is generated from a seed, which must be stored until a larger node replaces it: the seeds of the open
nodes are part of the rule's state.

The noise of several clients adds up to Skellam noise again, of the sum of their variances. Sources: Agarwal, Kairouz
and Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning", arXiv 2110.04995, Section 3, for
the divergences; Kairouz, Liu and Steinke 2021, "The Distributed Discrete Gaussian Mechanism for Federated Learning with
Secure Aggregation", arXiv 2102.06387, Section 4, for conditional rounding and for the number of bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext


Normals: TypeAlias = npt.NDArray[np.float64]

KEY_BYTES = 32


class Noise:
    """Standard normal numbers from a key, in named streams. The key is a secret: with it, noise can be removed."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a noise key has {len(key)} bytes; expected {KEY_BYTES}")
        self._key = key

    def __repr__(self) -> str:
        return "Noise(...)"

    def derive_key(self, name: str) -> bytes:
        """Derive a key from this one, which it does not reveal."""
        return hmac.digest(self._key, name.encode(), hashlib.sha256)

    def normal(self, stream: str, first: int, size: int) -> Normals:
        """Return entries `first` to `first + size` of a stream, shape [size]."""
        begin, end = first // 2, (first + size + 1) // 2
        words = np.frombuffer(_key_stream(self.derive_key(stream), begin, end - begin), "<u8").reshape(-1, 2) >> 11
        radius = np.sqrt(-2.0 * np.log((words[:, 0] + 1.0) * 2.0**-53))  # from numbers in (0, 1]
        angle = words[:, 1] * (2.0 * np.pi * 2.0**-53)
        pairs = np.empty((end - begin, 2))
        np.multiply(radius, np.cos(angle), out=pairs[:, 0])
        np.multiply(radius, np.sin(angle), out=pairs[:, 1])
        return pairs.reshape(-1)[first - 2 * begin :][:size]


class KeyStream:
    """Random numbers from a key that is used once: the key stream of AES-256 in counter mode, from its beginning."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key of a stream has {len(key)} bytes; expected {KEY_BYTES}")
        self._encryptor = _encryptor(key, 0)

    def __repr__(self) -> str:
        return "KeyStream(...)"

    def words(self, count: int) -> npt.NDArray[np.uint32]:
        """Return the next `count` numbers of 32 bits."""
        return np.frombuffer(self._encryptor.update(bytes(4 * count)), "<u4")

    def uniform(self, count: int) -> Normals:
        """Return the next `count` multiples of 2^-53 in (0, 1)."""
        words = np.frombuffer(self._encryptor.update(bytes(8 * count)), "<u8") >> np.uint64(12)
        return (words.astype(np.float64) + 0.5) * 2.0**-52


def _key_stream(key: bytes, first: int, count: int) -> bytes:
    """Return 16-byte blocks of a key's stream."""
    return _encryptor(key, first).update(bytes(16 * count))


def _encryptor(key: bytes, first: int) -> CipherContext:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as exc:
        raise MissingExtraError(f"private jobs need the extra `privacy`: {install_command('privacy')}") from exc
    return Cipher(algorithms.AES(key), modes.CTR(first.to_bytes(16, "big"))).encryptor()


_STEP, _SEED = "tree step", "tree seed"
_WORDS = 6
"""Number of 43-bit integers in which a seed is stored; float64 holds them exactly."""
_BITS = 43


@dataclasses.dataclass(frozen=True)
class Tree:
    """The tree of a job, by its number of rounds."""

    rounds: int

    def first(self) -> Mapping[str, float]:
        """Return the state before the first round: no node is open."""
        words = {_word(level, index): 0.0 for level in range(self.rounds.bit_length()) for index in range(_WORDS)}
        return {_STEP: 0.0, **words}

    def step(self, scalars: Mapping[str, float], noise: Noise, first: int, size: int) -> Normals:
        """Return what the next round adds to the noise of the sum of all rounds, in units of a node's deviation."""
        level = self._find_completed_level(scalars)
        total = Noise(_fresh(noise)).normal("node", first, size)
        for covered in range(level):
            total -= Noise(_seed(scalars, covered)).normal("node", first, size)
        return total

    def after(self, scalars: Mapping[str, float], noise: Noise) -> Mapping[str, float]:
        """Return the state after the next round, without the seeds of covered nodes."""
        level = self._find_completed_level(scalars)
        forgotten = {_word(covered, index): 0.0 for covered in range(level) for index in range(_WORDS)}
        number = int.from_bytes(_fresh(noise), "big")
        words = {_word(level, index): float(number >> (_BITS * index) & (1 << _BITS) - 1) for index in range(_WORDS)}
        return {**scalars, **forgotten, **words, _STEP: scalars[_STEP] + 1.0}

    def _find_completed_level(self, scalars: Mapping[str, float]) -> int:
        """Return the level of the largest node that the next round completes."""
        step = int(scalars[_STEP]) + 1
        if step > self.rounds:
            raise ValueError(f"the tree is for {self.rounds} rounds, and this would be round {step}")
        return (step & -step).bit_length() - 1


def _fresh(noise: Noise) -> bytes:
    return noise.derive_key("node")


def _seed(scalars: Mapping[str, float], level: int) -> bytes:
    number = sum(int(scalars[_word(level, index)]) << (_BITS * index) for index in range(_WORDS))
    return number.to_bytes(KEY_BYTES, "big")


def _word(level: int, index: int) -> str:
    return f"{_SEED} {level} {index}"


def has_seeds(beginning: bytes) -> bool:
    """Return whether a file that begins like this is the state of a rule with seeds of nodes."""
    return f'"{_SEED} '.encode() in beginning


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


def draw_skellam(stream: KeyStream, variance: float, size: int) -> Integers:
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
