"""The cryptographic primitives, all from `cryptography`: X25519, HKDF-SHA256, AES-256 (CTR, GCM) and Ed25519.

Every derived key is bound to its purpose, to the context of the attempt (`Setup.context`) and to an ordered pair of
positions, so no key serves twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from fedplat.errors import MissingExtraError, SecureAggregationError
from fedplat.extras import install_command
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
