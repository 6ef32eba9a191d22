"""Whom a silo believes: other silos by their signatures, and only those that its owner trusts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat.gossip.messages import BeginRing, RingPlace
from fedplat.gossip.ring import key_payload
from fedplat.gossip.steps import Contact
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import RelayExchange, RelayMember
from fedplat_client import ClientOptions
from fedplat_client._protocols.gossip.fetching import BrokenRingError, RingRun
from fedplat_client._protocols.gossip.network import ByteCounter, PeerNetwork, RemoteFile
from fedplat_client._work.peers.fetch import PeerFetcher
from fedplat_client._work.peers.port import PeerPort
from fedplat_client.errors import PeerError
from fedplat_client.task import Control
from support.secure_group import enrolled_key, public_key

EXCHANGE = RelayExchange("job-1", 3, 1)
REMOTE = RemoteFile("0" * 64, 100)
VECTOR = np.linspace(-1.0, 1.0, 30, dtype=np.float32)
replace = msgspec.structs.replace


def pair_of(number: int) -> KeyPair:
    return KeyPair(bytes([number]) * 32)


def contact_of(number: int, address: str = "", exchange: RelayExchange = EXCHANGE) -> Contact:
    key = exchange.advertise(f"c-{number}", pair_of(number), enrolled_key(number).sign)
    return Contact(f"c-{number}", public_key(number), address, key.encryption_key, key.signature)


@pytest.fixture
def network(tmp_path: Path) -> PeerNetwork:
    """That of silo 1, without a server and without a certificate."""
    own = RelayMember("c-1", public_key(1), EXCHANGE.advertise("c-1", pair_of(1), enrolled_key(1).sign))
    connection: Any = None
    return PeerNetwork(
        connection=connection,
        token="token",
        exchange=EXCHANGE,
        own=own,
        key=pair_of(1),
        trusted=None,
        port=PeerPort(),
        fetcher=PeerFetcher(tmp_path / "received", ClientOptions()),
        folder=tmp_path / "received",
        counter=ByteCounter(),
    )


@pytest.mark.parametrize(
    ("contact", "text"),
    [
        (contact_of(2, exchange=RelayExchange("job-1", 2, 1)), "not signed for this exchange"),
        (replace(contact_of(2), public_key=public_key(3)), "not signed for this exchange"),
        (replace(contact_of(2), relay_key=b""), "neither a port nor a key"),
        (replace(contact_of(2), relay_key=bytes(32)), "weak"),
        (replace(contact_of(2), relay_key=bytes(5)), "weak|not signed"),
        (contact_of(1), "named c-1, this silo itself, as another one"),
    ],
)
def test_keys_for_the_relay_are_those_of_the_enrolled_silo(network: PeerNetwork, contact: Contact, text: str) -> None:
    path = network.folder / "model"
    path.write_bytes(b"model")
    with pytest.raises(PeerError, match=text):
        network.receive(contact, REMOTE, 1.0, Control())
    with pytest.raises(PeerError, match=text):
        network.send(contact, REMOTE.digest, path, Control())
    assert [each.name for each in network.folder.iterdir()] == ["model"]


def test_only_trusted_silos_exchange_files(network: PeerNetwork) -> None:
    network = dataclasses.replace(network, trusted={public_key(2)})
    stranger = contact_of(3)
    assert [network.is_trusted(each) for each in (contact_of(2), stranger)] == [True, False]
    with pytest.raises(PeerError, match="not one of the trusted clients"):
        network.receive(stranger, REMOTE, 1.0, Control())
    with pytest.raises(PeerError, match="not one of the trusted clients"):
        network.fetch(replace(stranger, address="127.0.0.1:1"), REMOTE, Control())


def test_a_client_without_a_certificate_fetches_nothing_from_ports(network: PeerNetwork) -> None:
    with pytest.raises(PeerError, match="its server has no TLS"):
        network.fetch(contact_of(2, "127.0.0.1:1"), REMOTE, Control())


# --- rings -----------------------------------------------------------------------------------------------------------


def make_ring(*numbers: int, attempt: int = 2, bound: float = 2.0) -> BeginRing:
    places: list[RingPlace] = []
    for number in numbers:
        key = pair_of(number + 100).public
        signature = enrolled_key(number).sign(key_payload("job-1", 3, attempt, f"c-{number}", key))
        places.append(RingPlace(f"c-{number}", "", key, 1 / len(numbers), signature))
    return BeginRing(3, attempt, tuple(places), bound)


def open_ring(network: PeerNetwork, ring: BeginRing, contacts: list[Contact], **more: Any) -> RingRun:
    given: dict[str, Any] = {"is_secret": True, "key": pair_of(101), **more}
    return RingRun("job-1", ring, contacts, model=VECTOR, network=network, **given)


def test_a_ring_of_silos_with_signed_keys(network: PeerNetwork) -> None:
    contacts = [contact_of(number) for number in (2, 1, 3)]
    open_ring(network, make_ring(2, 1, 3), contacts)
    two = make_ring(1, 2)
    open_ring(network, two, contacts[1::-1], is_secret=False)
    with pytest.raises(BrokenRingError, match="fewer than 3 models"):
        open_ring(network, two, contacts[1::-1])


RING = make_ring(1, 2, 3)


@pytest.mark.parametrize(
    ("ring", "changes", "text"),
    [
        (replace(RING, attempt=3), {}, "the key of c-1 is not signed by it"),
        (replace(RING, members=(*RING.members[:2], replace(RING.members[2], key=os.urandom(32)))), {}, "of c-3 is not"),
        (make_ring(1, 3, 2), {}, "not those of the contacts"),
        (RING, {"key": pair_of(7)}, "not on the ring with the key that it offered"),
        (make_ring(1, 2, 3, bound=0.5), {}, "expected at most the bound"),
        (replace(RING, members=tuple(replace(each, share=0.5) for each in RING.members)), {}, "add up to 1.5"),
    ],
)
def test_rings_that_are_refused(network: PeerNetwork, ring: BeginRing, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BrokenRingError, match=text) as caught:
        open_ring(network, ring, [contact_of(number) for number in (1, 2, 3)], **changes)
    assert (caught.value.sender, caught.value.step) == ("c-1", 0)


def with_shares(*shares: float) -> BeginRing:
    ring = make_ring(*range(1, len(shares) + 1))
    return replace(
        ring, members=tuple(replace(each, share=share) for each, share in zip(ring.members, shares, strict=True))
    )


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ((1e-10, 1e-10, 1e-10, 1e-10, 1 - 4e-10), "one model is 1 of the mean"),
        ((0.2, 0.2, 0.6), "one model is 0.6 of the mean, and would be seen in it; expected at most 0.5"),
        ((1e-10, 0.5, 0.5 - 1e-10), "another one 0.5, so that each of these two silos would see the other's"),
        ((0.45, 0.45, 0.05, 0.05), "one model is 0.45 of the mean and another one 0.45"),
        ((0.5, 0.3, 0.2), ""),
    ],
)
def test_shares_that_would_show_one_model_are_refused(network: PeerNetwork, shares: Any, text: str) -> None:
    contacts = [contact_of(number) for number in range(1, len(shares) + 1)]
    open_ring(network, with_shares(*shares), contacts, is_secret=False)  # neighbours have seen the models anyway
    if not text:
        open_ring(network, with_shares(*shares), contacts)
        return
    with pytest.raises(BrokenRingError, match=text):
        open_ring(network, with_shares(*shares), contacts)


def test_an_owner_may_allow_less_or_more(network: PeerNetwork) -> None:
    contacts = [contact_of(number) for number in range(1, 4)]
    open_ring(dataclasses.replace(network, max_share=1.0), with_shares(0.6, 0.2, 0.2), contacts)
    for limit, shares in ((1.0, (0.7, 0.15, 0.15)), (0.4, (0.5, 0.3, 0.2))):
        with pytest.raises(BrokenRingError, match="of the mean"):
            open_ring(dataclasses.replace(network, max_share=limit), with_shares(*shares), contacts)


def test_a_ring_whose_steps_would_lose_the_model_is_refused(network: PeerNetwork) -> None:
    contacts = [contact_of(number) for number in (1, 2, 3)]
    open_ring(network, make_ring(1, 2, 3, bound=4096.0), contacts)
    with pytest.raises(BrokenRingError, match=r"the bound is 3.4e\+38, and the largest number of the own model 1"):
        open_ring(network, make_ring(1, 2, 3, bound=3.4e38), contacts)


def test_a_ring_with_a_silo_that_the_owner_does_not_trust_is_refused(network: PeerNetwork) -> None:
    contacts = [contact_of(number) for number in (1, 2, 3)]
    open_ring(dataclasses.replace(network, trusted={public_key(2), public_key(3)}), RING, contacts)
    with pytest.raises(BrokenRingError, match="c-3 is not one of the trusted clients"):
        open_ring(dataclasses.replace(network, trusted={public_key(2)}), RING, contacts)
