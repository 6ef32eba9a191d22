"""Files through a relay that may do anything with them: it learns their size, and every change is detected."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    TAG_BYTES,
    RelayExchange,
    RelayKey,
    RelayLink,
    RelayMember,
    RelayMessage,
    sealed_bytes,
)
from support.secure_group import enrolled_key, public_key, random_of

SIZE = 3 * CHUNK_BYTES + 1000
SEALED_CHUNK = CHUNK_BYTES + TAG_BYTES
EXCHANGE = RelayExchange("job", 3, 1)


@functools.cache
def key_of(number: int, exchange: RelayExchange = EXCHANGE) -> KeyPair:
    return KeyPair.draw(random_of(f"{number} {exchange}"))


def member(number: int, exchange: RelayExchange = EXCHANGE) -> RelayMember:
    name = f"c-{number}"
    key = exchange.advertise(name, key_of(number, exchange), enrolled_key(number).sign)
    return RelayMember(name, public_key(number), key)


@functools.cache
def content(size: int = SIZE) -> bytes:
    return hashlib.shake_256(b"content").digest(size)


def link_of(size: int = SIZE, sender: int = 1, receiver: int = 2, exchange: RelayExchange = EXCHANGE) -> RelayLink:
    digest = hashlib.sha256(content(size)).hexdigest()
    return RelayLink(exchange, member(sender, exchange), member(receiver, exchange), digest, size)


def seal(link: RelayLink, own: KeyPair, plain: bytes) -> bytes:
    sealed = io.BytesIO()
    link.seal(own, io.BytesIO(plain), sealed)
    return sealed.getvalue()


def unseal(link: RelayLink, own: KeyPair, sealed: bytes) -> bytes:
    plain = io.BytesIO()
    link.open(own, io.BytesIO(sealed), plain)
    return plain.getvalue()


@functools.cache
def sealed_file() -> bytes:
    return seal(link_of(), key_of(1), content())


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, SIZE])
def test_the_receiver_gets_the_file(size: int) -> None:
    link = link_of(size)
    sealed = seal(link, key_of(1), content(size))
    assert len(sealed) == link.sealed_bytes
    assert unseal(link, key_of(2), sealed) == content(size)


def test_both_ends_may_know_the_members_from_messages() -> None:
    received = link_of()
    sender = RelayMember.from_bytes(received.sender.to_bytes())
    assert unseal(dataclasses.replace(received, sender=sender), key_of(2), sealed_file()) == content()


def test_the_encrypted_file_shows_nothing_of_the_content() -> None:
    """Equal chunks are different, and so are files of zeros and of other bytes."""
    zeros = bytes(2 * CHUNK_BYTES)
    digest = hashlib.sha256(zeros).hexdigest()
    sealed = seal(dataclasses.replace(link_of(), digest=digest, size_bytes=len(zeros)), key_of(1), zeros)
    assert sealed[:CHUNK_BYTES] != sealed[SEALED_CHUNK : SEALED_CHUNK + CHUNK_BYTES]
    assert 120 < sum(sealed) / len(sealed) < 135
    assert bytes(16) not in sealed


def test_the_same_file_is_encrypted_alike_and_another_one_with_other_keys() -> None:
    """An upload may resume after a restart, and no key encrypts two contents."""
    assert seal(link_of(), key_of(1), content()) == sealed_file()
    changed = bytes(CHUNK_BYTES) + content()[CHUNK_BYTES:]
    other = dataclasses.replace(link_of(), digest=hashlib.sha256(changed).hexdigest())
    assert seal(other, key_of(1), changed)[2 * SEALED_CHUNK :] != sealed_file()[2 * SEALED_CHUNK :]


def chunks_of(sealed: bytes) -> list[bytes]:
    return [sealed[start : start + SEALED_CHUNK] for start in range(0, len(sealed), SEALED_CHUNK)]


def flip(position: int) -> Callable[[bytes], bytes]:
    def change(sealed: bytes) -> bytes:
        changed = bytearray(sealed)
        changed[position] ^= 1
        return bytes(changed)

    return change


def reorder(*order: int) -> Callable[[bytes], bytes]:
    return lambda sealed: b"".join(chunks_of(sealed)[number] for number in order)


ORDERS = ((1, 0, 2, 3), (0, 0, 2, 3), (0, 1, 3, 2), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3, 3), (0,), ())
CHANGES: list[Callable[[bytes], bytes]] = [
    *map(flip, (0, CHUNK_BYTES, SEALED_CHUNK, SIZE, -1)),
    *(reorder(*order) for order in ORDERS),
    lambda sealed: sealed[:-1],
    lambda sealed: sealed + b"\0",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SecureAggregationError):
        unseal(link_of(), key_of(2), change(sealed_file()))


def test_a_file_cut_after_a_chunk_is_not_a_shorter_file() -> None:
    """Also if the server announces the shorter size."""
    short = dataclasses.replace(link_of(), size_bytes=CHUNK_BYTES, digest=link_of(CHUNK_BYTES).digest)
    with pytest.raises(SecureAggregationError):
        unseal(short, key_of(2), sealed_file()[:SEALED_CHUNK])


def test_a_file_is_for_one_receiver_sender_and_exchange() -> None:
    later = RelayExchange("job", 4, 1)
    for link, own in (
        (link_of(receiver=3), key_of(3)),
        (link_of(sender=3), key_of(2)),
        (link_of(sender=2, receiver=1), key_of(1)),
        (dataclasses.replace(link_of(), exchange=later), key_of(2)),
        (link_of(exchange=later), key_of(2, later)),
        (dataclasses.replace(link_of(), exchange=RelayExchange("other", 3, 1)), key_of(2)),
        (dataclasses.replace(link_of(), digest="0" * 64), key_of(2)),
    ):
        with pytest.raises(SecureAggregationError, match="was changed, or is not of this"):
            unseal(link, own, sealed_file())


def test_other_clients_cannot_open_it() -> None:
    with pytest.raises(SecureAggregationError, match="not the one that c-2 advertised"):
        unseal(link_of(), key_of(3), sealed_file())
    third = msgspec.structs.replace(member(2), key=member(3).key)
    with pytest.raises(SecureAggregationError):
        unseal(dataclasses.replace(link_of(), receiver=third), key_of(3), sealed_file())


@pytest.mark.parametrize("plain", [content()[:-1], content() + b"x", content()[:-1] + b"x", b""])
def test_a_sender_whose_file_changed_does_not_send_it(plain: bytes) -> None:
    with pytest.raises(SecureAggregationError, match="the file has changed"):
        seal(link_of(), key_of(1), plain)


def test_a_file_with_another_digest_than_announced_is_refused() -> None:
    """It encrypts with the chunks' keys, which `seal` would refuse at the end."""
    link = dataclasses.replace(link_of(5), digest="0" * 64)
    sealed = io.BytesIO()
    with pytest.raises(SecureAggregationError):
        link.seal(key_of(1), io.BytesIO(content(5)), sealed)
    with pytest.raises(SecureAggregationError, match="does not have the digest"):
        unseal(link, key_of(2), sealed.getvalue())


def test_keys_are_verified() -> None:
    EXCHANGE.verify(member(1))
    EXCHANGE.verify(member(1), {public_key(1), public_key(2)})
    own = member(1)
    weak = RelayKey(bytes(32), enrolled_key(1).sign(b""))
    for exchange, shown, reason in (
        (RelayExchange("job", 4, 1), own, "not signed for this exchange"),
        (RelayExchange("job", 3, 2), own, "not signed for this exchange"),
        (EXCHANGE, msgspec.structs.replace(own, client_id="c-2"), "not signed for this exchange"),
        (EXCHANGE, msgspec.structs.replace(own, public_key=public_key(2)), "not signed for this exchange"),
        (EXCHANGE, msgspec.structs.replace(own, key=member(2).key), "not signed for this exchange"),
        (EXCHANGE, msgspec.structs.replace(own, key=weak), "weak"),
    ):
        with pytest.raises(SecureAggregationError, match=reason):
            exchange.verify(shown)
    with pytest.raises(SecureAggregationError, match="not one of the trusted clients"):
        EXCHANGE.verify(own, {public_key(2)})


def test_a_server_in_the_middle_needs_the_enrolled_keys_of_trusted_clients() -> None:
    """It puts a client of its own, with a valid signature, in the place of another one."""
    forged = RelayMember("c-2", public_key(9), EXCHANGE.advertise("c-2", key_of(9), enrolled_key(9).sign))
    EXCHANGE.verify(forged)
    with pytest.raises(SecureAggregationError, match="trusted"):
        EXCHANGE.verify(forged, {public_key(1), public_key(2)})


def test_links_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="expected two clients"):
        link_of(receiver=1)
    for size in (-1, MAX_CHUNKS * CHUNK_BYTES + 1):
        with pytest.raises(ValueError, match="expected at most"):
            dataclasses.replace(link_of(), size_bytes=size)


def message_of(sender: int = 1, receiver: int = 2, name: str = "ring/1/0", **more: RelayExchange) -> RelayMessage:
    exchange = more.get("exchange", EXCHANGE)
    return RelayMessage(exchange, member(sender, exchange), member(receiver, exchange), name)


def test_a_message_has_the_size_that_a_file_would_have() -> None:
    for size in (0, 1, 1000):
        sealed = message_of().seal(key_of(1), content(size))
        assert len(sealed) == sealed_bytes(size)
        assert message_of().open(key_of(2), sealed) == content(size)
    assert len(message_of().seal(key_of(1), content())) <= sealed_bytes(SIZE)


@pytest.mark.parametrize(
    "other",
    [
        {"name": "ring/1/1"},
        {"name": "ring/2/0"},
        {"sender": 3},
        {"sender": 2, "receiver": 1},
        {"exchange": RelayExchange("job", 3, 2)},
    ],
)
def test_a_message_is_read_as_what_it_is_only(other: dict[str, Any]) -> None:
    sealed = message_of().seal(key_of(1), b"chunk")
    opened = message_of(**other)
    own = key_of(other.get("receiver", 2), other.get("exchange", EXCHANGE))
    with pytest.raises(SecureAggregationError):
        opened.open(own, sealed)


def test_a_message_that_was_changed_is_refused() -> None:
    sealed = bytearray(message_of().seal(key_of(1), b"chunk"))
    sealed[2] ^= 1
    with pytest.raises(SecureAggregationError, match="was changed"):
        message_of().open(key_of(2), bytes(sealed))


def test_each_message_has_a_key_of_its_own() -> None:
    """Also the two directions, and a file of the same name: else the difference of two contents could be read."""
    plain = content(64)
    sealed = [message_of(name=name).seal(key_of(1), plain) for name in ("a", "b")]
    sealed.append(message_of(2, 1, name="a").seal(key_of(2), plain))
    digest = hashlib.sha256(plain).hexdigest()
    sealed.append(message_of(name=digest).seal(key_of(1), plain))
    sealed.append(seal(link_of(64), key_of(1), plain))
    assert len({each[:16] for each in sealed}) == 5
