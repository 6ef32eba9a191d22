"""Gaussian noise that cannot be distinguished from true noise without the key, alone or in a tree over the rounds.

The key stream is AES-256 in counter mode (NIST SP 800-38A), of which every 16 bytes become two normal numbers (Box and
Muller 1958). So any part of a vector can be computed without the preceding entries, and repeatedly with the same
result. No number is beyond 8.6, which is rarer than 1e-17.

Source: Kairouz et al. 2021, "Practical and Private (Deep) Learning Without Sampling or Shuffling", arXiv 2103.00039,
Algorithm 1 (DP-FTRL) and Appendix B; the tree is that of Dwork et al. 2010 and Chan et al. 2011. Node (l, i) covers the
rounds i 2^l + 1 to (i + 1) 2^l. After round t the sum has the noise of the nodes that make up t in binary. So round t
adds the noise of the node that it completes, and subtracts that of the smaller nodes covered by it.

Each node's noise is generated from a seed, which must be stored until a larger node replaces it: the seeds of the open
nodes are part of the rule's state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
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
