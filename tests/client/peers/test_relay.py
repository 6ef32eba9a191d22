"""Encrypted files for the server's relay, on disk; what is detected: tests/core/secure_aggregation/test_relay.py."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import RelayExchange, RelayLink, RelayMember
from fedplat_client._state.data_dir import SigningKey, new_signing_key
from fedplat_client._work.peers.fetch import open_file, seal_file
from support.secure_group import random_of

CONTENT = bytes(range(256)) * 10_000
EXCHANGE = RelayExchange("job", 1, 1)
OWN, PEER = KeyPair.draw(random_of("own")), KeyPair.draw(random_of("peer"))


def member(name: str, key: KeyPair) -> RelayMember:
    enrolled = SigningKey(new_signing_key())
    made = RelayMember(name, enrolled.public, EXCHANGE.advertise(name, key, enrolled.sign))
    EXCHANGE.verify(made, {enrolled.public})
    return made


@pytest.fixture
def link() -> RelayLink:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return RelayLink(EXCHANGE, member("c-1", OWN), member("c-2", PEER), digest, len(CONTENT))


def test_a_file_goes_through_the_relay(link: RelayLink, tmp_path: Path) -> None:
    plain, sealed, opened = (tmp_path / name for name in ("plain", "sealed", "opened"))
    plain.write_bytes(CONTENT)
    seal_file(link, OWN, plain, sealed)
    assert sealed.stat().st_size == link.sealed_bytes
    open_file(link, PEER, sealed, opened)
    assert opened.read_bytes() == CONTENT
    assert stat.S_IMODE(opened.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["opened", "plain", "sealed"]


def test_nothing_is_left_of_a_file_that_is_refused(link: RelayLink, tmp_path: Path) -> None:
    plain, sealed, opened = (tmp_path / name for name in ("plain", "sealed", "opened"))
    plain.write_bytes(CONTENT[:-1])
    with pytest.raises(SecureAggregationError, match="has changed"):
        seal_file(link, OWN, plain, sealed)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    plain.write_bytes(CONTENT)
    seal_file(link, OWN, plain, sealed)
    damaged = bytearray(sealed.read_bytes())
    damaged[-1] ^= 1
    sealed.write_bytes(damaged)
    with pytest.raises(SecureAggregationError):
        open_file(link, PEER, sealed, opened)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "sealed"]
