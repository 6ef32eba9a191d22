"""Cryptography: primitives of the library `cryptography`, masks that cancel out, and encrypted shares.

Every derived key is bound to its purpose, to the context of the attempt (`Setup.context`) and to an ordered pair of
positions, so no key serves twice.

Step 2 (ShareKeys) of Bonawitz et al. 2017, Figure 4: authenticated encryption under a key that both clients agree on.

Step 3 (MaskedInputCollection) of Bonawitz et al. 2017, Figure 4. A mask is the stream of AES-256 in counter mode, from
counter 0, as little-endian 32-bit numbers modulo 2^modulus. All values of an entry are equally likely, because
2^modulus divides 2^32.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.errors import MissingExtraError, SecureAggregationError
from fedplat.extras import install_command
from fedplat.secure_aggregation import messages, shamir
from fedplat.secure_aggregation.messages import KEY_BYTES

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as exc:
    raise MissingExtraError(
        f"secure aggregation needs the extra `privacy`: {install_command('privacy')}; "
        "fedplat-client and fedplat-server include it"
    ) from exc

AES_BLOCK = 16
_FIELD = 2**255 - 19
_WEAK = frozenset(
    [
        0,
        1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
        _FIELD - 1,
    ]
)
"""The points of low order: secrets agreed with them are zero."""
_NONCE = bytes(12)
"""The nonce of AES-GCM. It is constant, because every key encrypts one message."""


class KeyPair:
    """A key pair of X25519 (RFC 7748) for one attempt."""

    def __init__(self, secret: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(secret)
        self._agreed: dict[bytes, bytes] = {}
        self.public = self._private.public_key().public_bytes_raw()

    @classmethod
    def draw(cls, random: Callable[[int], bytes]) -> KeyPair:
        """Draw a key pair."""
        return cls(random(KEY_BYTES))

    @property
    def secret(self) -> bytes:
        """The private key."""
        return self._private.private_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """Return the secret shared with the owner of a public key. Raises `SecureAggregationError` for a weak key.

        It is kept as long as the key pair, since a client needs it to encrypt shares and to decrypt those in return.
        """
        if public not in self._agreed:
            try:
                self._agreed[public] = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError as exc:  # the shared secret is zero: the point has a low order
                raise SecureAggregationError("a public key is weak: anyone can compute secrets agreed with it") from exc
        return self._agreed[public]


def check_public_key(public: bytes) -> None:
    """Raise `SecureAggregationError` for a weak key, or for one in another encoding than the canonical one.

    X25519 also accepts other encodings, with which a key could be used twice.
    """
    point = int.from_bytes(public, "little")
    if point >= _FIELD:
        raise SecureAggregationError("a public key is not in its canonical encoding")
    if point in _WEAK:
        raise SecureAggregationError("a public key is weak: anyone can compute secrets agreed with it")


def derive_key(secret: bytes, purpose: str, context: bytes, pair: tuple[int, int]) -> bytes:
    """Derive a 32-byte key for one purpose and an ordered pair of positions (HKDF, RFC 5869)."""
    first, second = pair
    info = b"".join((purpose.encode(), b"\0", context, first.to_bytes(4, "big"), second.to_bytes(4, "big")))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def encrypt(key: bytes, plaintext: bytes, data: bytes) -> bytes:
    """Encrypt the only message of a key, and authenticate it with `data` (AES-256-GCM)."""
    return AESGCM(key).encrypt(_NONCE, plaintext, data)


def decrypt(key: bytes, ciphertext: bytes, data: bytes) -> bytes:
    """Decrypt the message of a key. Raises `SecureAggregationError` if it or `data` is not what was encrypted."""
    try:
        return AESGCM(key).decrypt(_NONCE, ciphertext, data)
    except InvalidTag as exc:
        raise SecureAggregationError("a message was changed, or is not of this attempt, sender and receiver") from exc


def open_stream(key: bytes, first_block: int) -> CipherContext:
    """Open the key stream of a key (AES-256-CTR) at a block of `AES_BLOCK` bytes: the encryption of zeros."""
    return Cipher(algorithms.AES256(key), modes.CTR(first_block.to_bytes(AES_BLOCK, "big"))).encryptor()


@functools.lru_cache(maxsize=4096)  # a process with many clients verifies the signatures of a roster once
def is_signature(public_key: bytes, signature: bytes, payload: bytes) -> bool:
    """Return whether a signature is valid (Ed25519, RFC 8032)."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, payload)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclasses.dataclass(frozen=True)
class SharePair:
    """One holder's shares of the two secrets of a client: of the seed of its own mask, and of its masking key."""

    seed: bytes = dataclasses.field(repr=False)
    key: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class ShareLink:
    """The way of a message within an attempt: from the position of its sender to that of its holder."""

    context: bytes
    sender: int
    holder: int

    def seal(self, own: KeyPair, peer: bytes, shares: SharePair) -> bytes:
        """Encrypt shares at their sender. Raises `SecureAggregationError` for a weak key of the holder."""
        return encrypt(self._derive_key(own, peer), shares.seed + shares.key, self._data)

    def open(self, own: KeyPair, peer: bytes, sealed: bytes) -> SharePair:
        """Decrypt shares at their holder. Raises `SecureAggregationError` if they are not those of this link."""
        plaintext = decrypt(self._derive_key(own, peer), sealed, self._data)
        shares = SharePair(plaintext[: messages.SHARE_BYTES], plaintext[messages.SHARE_BYTES :])
        shamir.read_share(shares.seed)
        shamir.read_share(shares.key)
        return shares

    @property
    def _data(self) -> bytes:
        return self.context + self.sender.to_bytes(4, "big") + self.holder.to_bytes(4, "big")

    def _derive_key(self, own: KeyPair, peer: bytes) -> bytes:
        return derive_key(own.agree(peer), "fedplat shares 1", self.context, (self.sender, self.holder))


Vector: TypeAlias = npt.NDArray[np.uint32]

_BLOCK = 1 << 15
"""Entries that are masked at a time: they, the key stream and its zeros stay in the second-level cache of a core."""
_STREAMS = 256
"""Maximum number of streams that are open at a time."""
_ZEROS = memoryview(bytes(4 * _BLOCK))


def derive_pair_key(own: KeyPair, peer: bytes, context: bytes, pair: tuple[int, int]) -> bytes:
    """Derive the key of the mask that two positions share; both derive the same.

    Raises `SecureAggregationError` for a weak public key of the peer.
    """
    return derive_key(own.agree(peer), "fedplat pair mask 1", context, (min(pair), max(pair)))


def derive_own_key(seed: bytes, context: bytes, position: int) -> bytes:
    """Derive the key of a position's own mask from its seed."""
    return derive_key(seed, "fedplat own mask 1", context, (position, position))


def commit_seed(seed: bytes, context: bytes, position: int) -> bytes:
    """Return a digest by which the server recognises the seed of a position's own mask."""
    return hashlib.sha256(b"fedplat seed 1\0" + context + position.to_bytes(4, "big") + seed).digest()


def apply_masks(
    vector: Vector, modulus: int, added: Sequence[bytes], subtracted: Sequence[bytes], workers: int = 1
) -> None:
    """Add the masks of some keys to a vector modulo 2^modulus, and subtract those of others, in place.

    `workers` threads work on one part of the vector each; ciphers and additions release the interpreter lock.
    """
    check_vector(vector, modulus)
    keys = [*((key, np.add) for key in added), *((key, np.subtract) for key in subtracted)]
    step = -(-len(vector) // (workers * _BLOCK)) * _BLOCK
    parts = [(first, vector[first : first + step]) for first in range(0, len(vector), step)]
    if len(parts) == 1:
        _apply_to_part(0, vector, modulus, keys)
        return
    with concurrent.futures.ThreadPoolExecutor(len(parts), "masks") as pool:
        for done in [pool.submit(_apply_to_part, first, part, modulus, keys) for first, part in parts]:
            done.result()


def check_vector(vector: Vector, modulus: int) -> None:
    """Raise `SecureAggregationError` unless masks can be added to a vector in place."""
    if not 8 <= modulus <= 32:
        raise SecureAggregationError(f"the modulus has {modulus} bits; expected 8 to 32")
    if vector.dtype != np.uint32 or vector.ndim != 1 or not vector.size:
        raise SecureAggregationError(
            f"the vector has the type {vector.dtype} and the shape {vector.shape}; expected uint32 and one dimension"
        )


def _apply_to_part(first: int, part: Vector, modulus: int, keys: Sequence[tuple[bytes, np.ufunc]]) -> None:
    """Apply masks to the part of a vector that begins at its entry `first`."""
    room_bytes = bytearray(4 * _BLOCK + AES_BLOCK)  # older versions of the library ask for a block more than they write
    room = np.frombuffer(room_bytes, "<u4")
    for begin in range(0, len(keys), _STREAMS):
        batch = keys[begin : begin + _STREAMS]
        streams = [(open_stream(key, 4 * first // AES_BLOCK), operation) for key, operation in batch]
        for block in _blocks(part):
            for stream, operation in streams:
                stream.update_into(_ZEROS[: 4 * len(block)], room_bytes)
                operation(block, room[: len(block)], out=block)
    if modulus < 32:
        for block in _blocks(part):
            np.bitwise_and(block, np.uint32(2**modulus - 1), out=block)


def _blocks(part: Vector) -> Iterator[Vector]:
    for begin in range(0, len(part), _BLOCK):
        yield part[begin : begin + _BLOCK]
