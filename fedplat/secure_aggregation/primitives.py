"""Cryptography: primitives of the library `cryptography`, masks that cancel out, and encrypted shares.

Every derived key is bound to its purpose, to the context of the attempt (`Setup.context`) and to an ordered pair of
positions, so no key serves twice.

Step 2 (ShareKeys) of Bonawitz et al. 2017, Figure 4: authenticated encryption under a key that both clients agree on.

Step 3 (MaskedInputCollection) of Bonawitz et al. 2017, Figure 4. A mask is the stream of AES-256 in counter mode, from
counter 0, as little-endian words modulo 2^modulus: of 32 bits, or of 64 for a modulus of 64 bits. All values of an
entry are equally likely, because 2^modulus divides the number of values of a word. The code for AES-GCM generates the
same stream, and faster (`MaskStream`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.errors import MissingExtraError, SecureAggregationError
from fedplat.extras import install_command
from fedplat.secure_aggregation import messages, shamir
from fedplat.secure_aggregation.messages import KEY_BYTES, MODULI, word_of

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
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


Vector: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Entries in words of `messages.word_of`, of which the lowest bits count."""
_Mask: TypeAlias = tuple[bytes, np.ufunc]
"""The key of a mask, and whether it is added or subtracted."""

_BLOCK = 1 << 17
"""Bytes that are masked at a time: they, the key stream and its zeros stay in the second-level cache of a core."""
_STREAMS = 256
"""Maximum number of streams that are open at a time."""
_PIECE = 8 * _BLOCK
"""Bytes for which several threads work before their sums are added."""
_LEAST_WORK = 64 * _BLOCK
"""Bytes of masks that are worth a thread."""
_ZEROS = memoryview(bytes(_BLOCK))
_HEAD = b"".join(counter.to_bytes(AES_BLOCK, "big") for counter in range(2))
"""The counters of the blocks that AES-GCM with `_NONCE` does not use for its key stream (NIST SP 800-38D, 7.1)."""
_GCM_BYTES = range(_BLOCK // 4, 2**35)
"""Sizes of vectors whose masks AES-GCM may generate: smaller ones are not worth it, and its counter has 32 bits."""


class MaskStream:
    """The key stream of a key (AES-256 in counter mode) from counter 0, piece by piece.

    With `with_gcm`, AES-GCM generates the same bytes: with a nonce of zeros its key stream is that of the counters from
    2. OpenSSL has code for it, but not for counter mode alone, that computes several blocks in one instruction (VAES):
    it is twice as fast, in spite of the authentication tag, which nothing reads. On processors without instructions for
    AES the tag costs time. The nonce protects nothing here: only zeros are encrypted.
    """

    def __init__(self, key: bytes, *, with_gcm: bool) -> None:
        cipher = algorithms.AES256(key)
        self._head = Cipher(cipher, modes.ECB()).encryptor().update(_HEAD) if with_gcm else b""
        self._rest = Cipher(cipher, modes.GCM(_NONCE) if with_gcm else modes.CTR(bytes(AES_BLOCK))).encryptor()

    def read_into(self, room: memoryview, size_bytes: int) -> None:
        """Write the next bytes to the beginning of `room`, which has `ROOM_BYTES` more or larger.

        Only the last piece may have fewer bytes than `_HEAD`.
        """
        head, self._head = self._head, b""
        room[: len(head)] = head
        self._rest.update_into(_ZEROS[: max(0, size_bytes - len(head))], room[len(head) :])


ROOM_BYTES = len(_HEAD) + AES_BLOCK
"""Bytes beyond a piece of a key stream: older versions of the library ask for a block more than they write."""


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

    `workers` threads generate the masks of some keys each; ciphers and additions release the interpreter lock.
    """
    check_vector(vector, modulus)
    keys = [*((key, np.add) for key in added), *((key, np.subtract) for key in subtracted)]
    workers = max(1, min(workers, len(keys), len(keys) * vector.nbytes // _LEAST_WORK))
    if workers == 1:
        _apply_keys(vector, keys, 1, map)
    else:
        with concurrent.futures.ThreadPoolExecutor(workers, "masks") as pool:
            _apply_keys(vector, keys, workers, pool.map)
    if modulus < 8 * vector.itemsize:
        np.bitwise_and(vector, np.uint32(2**modulus - 1), out=vector)


def check_vector(vector: Vector, modulus: int) -> None:
    """Raise `SecureAggregationError` unless masks can be added to a vector in place."""
    if modulus not in MODULI:
        raise SecureAggregationError(f"the modulus has {modulus} bits; expected 8 to 32, or 64")
    word = word_of(modulus)
    if vector.dtype != word or vector.ndim != 1 or not vector.size:
        raise SecureAggregationError(
            f"the vector has the type {vector.dtype} and the shape {vector.shape}; expected {word} and one dimension"
        )


def _apply_keys(vector: Vector, keys: Sequence[_Mask], workers: int, run: Callable[..., Iterable[Vector]]) -> None:
    """Apply masks to a vector; `run` maps a function over the sums of the masks that each worker generates."""
    with_gcm = vector.nbytes in _GCM_BYTES
    size = (_BLOCK if workers == 1 else _PIECE) // vector.itemsize
    for begin in range(0, len(keys), workers * _STREAMS):
        batch = keys[begin : begin + workers * _STREAMS]
        sums = [
            _MaskSum(batch[place::workers], np.empty(size, vector.dtype), with_gcm=with_gcm) for place in range(workers)
        ]
        for first in range(0, len(vector), size):
            piece = vector[first : first + size]
            for part in run(functools.partial(_MaskSum.next, count=len(piece)), sums):
                piece += part


class _MaskSum:
    """The sum of some masks, piece by piece, in the memory of `total`."""

    def __init__(self, masks: Sequence[_Mask], total: Vector, *, with_gcm: bool) -> None:
        self._streams = [(MaskStream(key, with_gcm=with_gcm), operation) for key, operation in masks]
        self._room = memoryview(bytearray(_BLOCK + ROOM_BYTES))
        self._total = total

    def next(self, count: int) -> Vector:
        """Return the next `count` entries, until the next call."""
        total = self._total[:count]
        mask = np.frombuffer(self._room, total.dtype.newbyteorder("<"))
        size = _BLOCK // total.itemsize
        total.fill(0)
        for begin in range(0, count, size):
            block = total[begin : begin + size]
            for stream, operation in self._streams:
                stream.read_into(self._room, block.nbytes)
                operation(block, mask[: len(block)], out=block)
        return total
