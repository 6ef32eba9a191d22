"""Files from one client to another through a server that stores them and cannot read them.

For clients that cannot open a port. Each client draws a key pair (X25519) for one exchange, and signs its public key
with the key with which it is enrolled. Sender and receiver derive keys from their common secret, bound to the
exchange, to both clients with all their keys, and to the digest and the size of the file. The file is encrypted in
chunks (AES-256-GCM), each with a key of its own, bound to the position of the chunk and to whether it is the last one:
chunks that were changed, moved, left out or added do not decrypt (STREAM, Hoang et al. 2015, section 7, with derived
keys in place of nonces). Public are the ids, the keys, the digest and the size; private is the content.

A key encrypts one message only, also if a sender encrypts a file twice: other content has another digest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, BinaryIO

from msgspec import Meta

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation import messages, setup
from fedplat.secure_aggregation.primitives import KeyPair, check_public_key, decrypt, derive_key, encrypt, is_signature

CHUNK_BYTES = 2**20
"""Bytes of a chunk before encryption; the last one may be shorter."""
TAG_BYTES = 16
MAX_CHUNKS = 2**31
_PURPOSE = "fedplat relay chunk 1"
_MESSAGE_PURPOSE = "fedplat relay message 1"


def sealed_bytes(size_bytes: int) -> int:
    """Return the size of an encrypted file of this size."""
    return size_bytes + TAG_BYTES * max(1, -(-size_bytes // CHUNK_BYTES))


class RelayKey(messages.Message, frozen=True):
    """The public key of a client for one exchange, signed with the key with which it is enrolled."""

    encryption_key: messages.Key
    signature: messages.Signature


class RelayMember(messages.Message, frozen=True):
    """A client of an exchange: its id, the public key with which it is enrolled, and its key for the exchange."""

    client_id: Annotated[str, Meta(min_length=1, max_length=100)]
    public_key: messages.Key
    key: RelayKey


@dataclasses.dataclass(frozen=True)
class RelayExchange:
    """The attempt of a round of a job in which clients exchange files."""

    job_id: str
    round: int
    attempt: int

    def advertise(self, client_id: str, own: KeyPair, sign: Callable[[bytes], bytes]) -> RelayKey:
        """Sign the client's public key for this exchange; `sign` signs with the key with which it is enrolled."""
        return RelayKey(own.public, sign(self._payload(client_id, own.public)))

    def verify(self, member: RelayMember, trusted: Collection[bytes] | None = None) -> None:
        """Check the key of another client.

        `trusted`: the public keys of the clients that the owner trusts; without them the server, which names the
        public keys, may put its own in the place of a client's. Raises `SecureAggregationError`.
        """
        if trusted is not None and member.public_key not in trusted:
            raise SecureAggregationError(f"the client {member.client_id} is not one of the trusted clients")
        check_public_key(member.key.encryption_key)
        payload = self._payload(member.client_id, member.key.encryption_key)
        if not is_signature(member.public_key, member.key.signature, payload):
            raise SecureAggregationError(
                f"the key of the client {member.client_id} is not signed for this exchange with the key with which the "
                "client is enrolled"
            )

    def to_bytes(self) -> bytes:
        """Encode the exchange; equal ones have equal bytes."""
        return setup.hash_parts(self.job_id.encode(), self.round.to_bytes(8, "big"), self.attempt.to_bytes(8, "big"))

    def _payload(self, client_id: str, encryption_key: bytes) -> bytes:
        return setup.hash_parts(b"fedplat relay keys 1", self.to_bytes(), client_id.encode(), encryption_key)


@dataclasses.dataclass(frozen=True)
class RelayLink:
    """The way of one file: from its sender to its receiver, of which `RelayExchange.verify` has checked the keys.

    `digest` is the file's SHA-256, hexadecimal. Raises `ValueError` for one client at both ends, or too large a file.
    """

    exchange: RelayExchange
    sender: RelayMember
    receiver: RelayMember
    digest: str
    size_bytes: int

    def __post_init__(self) -> None:
        if self.sender.client_id == self.receiver.client_id:
            raise ValueError(f"{self.sender.client_id} is sender and receiver; expected two clients")
        if not 0 <= self.size_bytes <= MAX_CHUNKS * CHUNK_BYTES:
            raise ValueError(f"the file has {self.size_bytes} bytes; expected at most {MAX_CHUNKS * CHUNK_BYTES}")

    @property
    def sealed_bytes(self) -> int:
        """Size of the encrypted file."""
        return sealed_bytes(self.size_bytes)

    def seal(self, own: KeyPair, plain: BinaryIO, sealed: BinaryIO) -> None:
        """Encrypt a file at its sender, with the key pair of the exchange; the same file gives the same bytes.

        Raises `SecureAggregationError` if the file is not that of the link: then the encrypted bytes must be deleted.
        """
        secret = _agree(own, self.sender, self.receiver)
        sha256 = hashlib.sha256()
        for pair, size in self._chunks():
            data = plain.read(size)
            sha256.update(data)
            sealed.write(encrypt(self._derive_key(secret, pair), data, b""))
        if plain.read(1) or sha256.hexdigest() != self.digest:
            raise SecureAggregationError(
                f"the file has changed: it does not have the {self.size_bytes} bytes and the digest {self.digest} that "
                "were announced"
            )

    def open(self, own: KeyPair, sealed: BinaryIO, plain: BinaryIO) -> None:
        """Decrypt a file at its receiver, with the key pair of the exchange.

        Raises `SecureAggregationError` if it is not the sender's file for this receiver, whole and in order: then the
        decrypted bytes must be deleted.
        """
        secret = _agree(own, self.receiver, self.sender)
        sha256 = hashlib.sha256()
        for pair, size in self._chunks():
            data = sealed.read(size + TAG_BYTES)
            if len(data) != size + TAG_BYTES:
                raise SecureAggregationError(
                    f"the encrypted file ends in chunk {pair[0]}; expected {self.sealed_bytes} bytes"
                )
            chunk = decrypt(self._derive_key(secret, pair), data, b"")
            sha256.update(chunk)
            plain.write(chunk)
        if sealed.read(1):
            raise SecureAggregationError(f"the encrypted file has more than {self.sealed_bytes} bytes")
        if sha256.hexdigest() != self.digest:  # only the sender can cause it
            raise SecureAggregationError(f"the decrypted file does not have the digest {self.digest}")

    @property
    def _num_chunks(self) -> int:
        return max(1, -(-self.size_bytes // CHUNK_BYTES))

    def _chunks(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield for each chunk its position, with 1 for the last chunk, and its size."""
        last = self._num_chunks - 1
        for position in range(last):
            yield (position, 0), CHUNK_BYTES
        yield (last, 1), self.size_bytes - last * CHUNK_BYTES

    def _derive_key(self, secret: bytes, pair: tuple[int, int]) -> bytes:
        return derive_key(secret, _PURPOSE, self._context, pair)

    @functools.cached_property
    def _context(self) -> bytes:
        return setup.hash_parts(
            b"fedplat relay context 1",
            self.exchange.to_bytes(),
            self.sender.to_bytes(),
            self.receiver.to_bytes(),
            self.digest.encode(),
            self.size_bytes.to_bytes(8, "big"),
        )


@dataclasses.dataclass(frozen=True)
class RelayMessage:
    """The way of one short message of known size, by its name, which both ends know.

    The keys are those of the exchange. A name must be used once only in an exchange, from one sender to one receiver.
    """

    exchange: RelayExchange
    sender: RelayMember
    receiver: RelayMember
    name: str

    def seal(self, own: KeyPair, content: bytes) -> bytes:
        """Encrypt the message at its sender."""
        return encrypt(self._derive_key(_agree(own, self.sender, self.receiver)), content, b"")

    def open(self, own: KeyPair, sealed: bytes) -> bytes:
        """Decrypt the message at its receiver. Raises `SecureAggregationError` if it is another one, or was changed."""
        return decrypt(self._derive_key(_agree(own, self.receiver, self.sender)), sealed, b"")

    def _derive_key(self, secret: bytes) -> bytes:
        parts = (self.exchange.to_bytes(), self.sender.to_bytes(), self.receiver.to_bytes(), self.name.encode())
        return derive_key(secret, _MESSAGE_PURPOSE, setup.hash_parts(b"fedplat relay message 1", *parts), (0, 0))


def _agree(own: KeyPair, at: RelayMember, peer: RelayMember) -> bytes:
    """Return the secret that both ends share. Raises `SecureAggregationError` for the key pair of another exchange."""
    if own.public != at.key.encryption_key:
        raise SecureAggregationError(f"the key pair is not the one that {at.client_id} advertised for this exchange")
    return own.agree(peer.key.encryption_key)
