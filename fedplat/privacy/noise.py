"""Gaussian noise that cannot be distinguished from true noise without the key, with random access to its entries.

The key stream is AES-256 in counter mode (NIST SP 800-38A), of which every 16 bytes become two normal numbers (Box and
Muller 1958). So any part of a vector can be computed without the preceding entries, and repeatedly with the same
result. No number is beyond 8.6, which is rarer than 1e-17.
"""

from __future__ import annotations

import hashlib
import hmac
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
