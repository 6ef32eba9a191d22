"""Where calls come from, and what neighbours at one address can do to each other."""

from __future__ import annotations

import contextlib
import doctest
import ipaddress
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import aio

from fedplat.wire import auth
from fedplat.wire.v1 import admin_pb2
from fedplat_server.auth import addresses
from fedplat_server.auth.addresses import ForwardedCall, Origin, Origins, origin, parse_network
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.config import Limits
from fedplat_server.errors import ConfigError, RefusedError
from fedplat_server.records import audit
from support import daemons
from support.access import ADMIN_TOKEN
from support.raw_client import CHALLENGE, RawClient, private_key

TRUSTED = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]


async def code_of(call: Any) -> str:
    """The code of a refusal, or "ok"."""
    try:
        await call
    except aio.AioRpcError as exc:
        return str(dict(exc.trailing_metadata() or ())[auth.METADATA_CODE])
    return "ok"


# --- addresses -------------------------------------------------------------------------------------------------------


def test_the_examples_of_the_docstrings_are_true() -> None:
    assert doctest.testmod(addresses).failed == 0


@pytest.mark.parametrize(
    ("peer", "address", "network"),
    [
        ("ipv4:192.0.2.7:4242", "ipv4:192.0.2.7", "ipv4:192.0.2.7"),
        ("ipv6:%5B::1%5D:4242", "ipv6:::1", "ipv6:::/64"),
        ("ipv6:%5B2001:db8:1:2:3::7%5D:4242", "ipv6:2001:db8:1:2:3::7", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4242", "ipv6:fe80::1", "ipv6:fe80::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:4242", "ipv4:192.0.2.7", "ipv4:192.0.2.7"),
        ("unix:/tmp/socket", "unix:/tmp/socket", "unix:/tmp/socket"),
        ("ipv4:rubbish", "ipv4:rubbish", "ipv4:rubbish"),
        ("", "", ""),
    ],
)
def test_an_address_is_the_same_from_every_port_and_ipv6_is_counted_by_64_bits(
    peer: str, address: str, network: str
) -> None:
    assert origin(peer, ["1.1.1.1"], []) == Origin(address, network)


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("ipv4:10.0.0.1:4", ["192.0.2.7"], "ipv4:192.0.2.7"),
        ("ipv4:10.0.0.1:4", ["192.0.2.7:80"], "ipv4:192.0.2.7"),
        ("ipv4:10.0.0.1:4", [" [2001:db8::7]:80 "], "ipv6:2001:db8::7"),
        ("ipv4:10.0.0.1:4", ["2001:db8::7"], "ipv6:2001:db8::7"),
        ("ipv4:10.0.0.1:4", ["1.1.1.1", "192.0.2.7"], "ipv4:192.0.2.7"),  # the first one is the caller's own claim
        ("ipv4:10.0.0.1:4", ["192.0.2.7", "10.0.0.2", "fd00::3"], "ipv4:192.0.2.7"),  # three proxies in a row
        ("ipv4:192.0.2.9:4", ["192.0.2.7"], "ipv4:192.0.2.9"),  # an untrusted peer is not believed
        ("ipv4:10.0.0.1:4", [], "ipv4:10.0.0.1"),
        ("ipv4:10.0.0.1:4", ["rubbish"], "ipv4:10.0.0.1"),
        ("ipv4:10.0.0.1:4", ["192.0.2.7", "unknown"], "ipv4:10.0.0.1"),
        ("unix:/tmp/socket", ["192.0.2.7"], "unix:/tmp/socket"),
    ],
)
def test_what_trusted_proxies_say_is_believed_and_nothing_else(peer: str, forwarded: list[str], address: str) -> None:
    assert origin(peer, forwarded, TRUSTED).address == address


class Context:
    """A call that came with this metadata."""

    def __init__(self, metadata: addresses.Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> addresses.Metadata:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.99:1"


def test_a_call_by_a_proxy_and_a_gateway_comes_from_its_caller() -> None:
    """The gateway passes on the proxy's header and the proxy's own address."""
    given = [("x-forwarded-for", "1.1.1.1, 192.0.2.7")]
    passed_on = addresses.add_forwarding(given, "secret", ForwardedCall("d-1", "", "ipv4:10.0.0.1:4"))
    assert Origins(["10.0.0.0/8"], "secret").of(cast(Any, Context(passed_on))).address == "ipv4:192.0.2.7"
    assert Origins([], "secret").of(cast(Any, Context(passed_on))).address == "ipv4:10.0.0.1"


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "everybody", "10.0.0.0/33"])
def test_networks_that_cannot_be_trusted(text: str) -> None:
    with pytest.raises(ConfigError, match="expected an address or a network"):
        parse_network(text)


# --- neighbours ------------------------------------------------------------------------------------------------------


async def failing(thief: RawClient) -> str:
    """Asks for a session of another client, with a signature by the wrong key."""
    return await code_of(thief.open_session())


@pytest.mark.slow
@pytest.mark.calm("counts requests, and what failed counts too")
@pytest.mark.fault("F41")
async def test_a_neighbour_that_fails_does_not_keep_clients_from_opening_sessions(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(anonymous_per_minute=20.0)) as site:
        honest = [await site.enroll() for _ in range(60)]
        thief = RawClient(site.channel, private_key("a thief"))
        thief.client_id = honest[0].client_id
        answers = [await failing(thief) for _ in range(60)]
        assert answers[0] == "BAD_SIGNATURE"
        assert answers[-1] == "TOO_MANY_REQUESTS"
        assert [await code_of(client.open_session()) for client in honest] == ["ok"] * 60
        while await failing(thief) != "TOO_MANY_REQUESTS":  # the limit allows one more each 3 s
            pass
        assert await code_of(site.enroll()) == "TOO_MANY_REQUESTS"  # each costs a transaction before it fails


@pytest.mark.calm("counts requests, and what failed counts too")
@pytest.mark.fault("F41")
async def test_nonces_that_are_not_used_have_a_bound_for_all(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(anonymous_per_minute=5.0, challenges_per_minute=7.0)) as site:
        thief = RawClient(site.channel, private_key("a thief"))
        answers = [await code_of(thief.stub.GetChallenge(CHALLENGE)) for _ in range(20)]
        assert 12 <= answers.count("ok") <= 14  # a few more come with time
        assert set(answers) == {"ok", "TOO_MANY_REQUESTS"}


@pytest.mark.fault("F41")
def test_a_network_that_takes_what_all_share_takes_nothing_of_the_others_own() -> None:
    quotas = Quotas(Limits(anonymous_per_minute=5.0, challenges_per_minute=7.0), lambda: 0.0)
    for _ in range(12):
        quotas.challenge("ipv4:192.0.2.7")
    with pytest.raises(RefusedError, match="at most 7 a minute"):
        quotas.challenge("ipv4:192.0.2.7")
    for _ in range(5):
        quotas.challenge("ipv4:192.0.2.8")


@pytest.mark.calm("counts requests, and what failed counts too")
@pytest.mark.fault("F41")
async def test_behind_a_trusted_proxy_each_caller_has_its_own_address(folder: Path) -> None:
    limits = Limits(anonymous_per_minute=5.0, challenges_per_minute=1.0, refusal_delay_s=0.0)
    async with daemons.running(folder, limits=limits, trusted_proxies=("127.0.0.0/8",)) as site:
        stub = RawClient(site.channel, private_key("a thief")).stub

        def asked(address: str) -> Any:
            return stub.GetChallenge(CHALLENGE, metadata=[("x-forwarded-for", f"9.9.9.9, {address}")])

        answers = [await code_of(asked("192.0.2.7")) for _ in range(10)]
        assert answers[-1] == "TOO_MANY_REQUESTS"
        assert await code_of(asked("192.0.2.8")) == "ok"
        bad = [("authorization", f"Bearer {ADMIN_TOKEN[:-1]}y"), ("x-forwarded-for", "2001:db8::7")]
        admin = site.channel.unary_unary("/fedplat.wire.v1.Jobs/ListJobs")
        assert await code_of(admin(admin_pb2.ListJobsRequest().SerializeToString(), metadata=bad)) == "NO_OPERATOR"
        rows = await site.store.inner.audit.list_rows()
        assert [row.actor for row in rows if row.action == audit.AuditAction.LOGIN_REFUSED] == ["ipv6:2001:db8::7"]


@pytest.mark.parametrize(("others", "num_admitted"), [("2001:db8:0:{:x}::/64", 40), ("2001:db8:0:{:x}00::/64", 160)])
def test_the_networks_that_one_host_may_own_have_tokens_together(others: str, num_admitted: int) -> None:
    """A /56 has 256 networks and a /48 has 65,536, each with 5 tokens of its own."""
    quotas = Quotas(Limits(anonymous_per_minute=5.0, challenges_per_minute=0.01), lambda: 0.0)
    admitted = 0
    with contextlib.suppress(RefusedError):
        for number in range(256):
            for _ in range(5):
                quotas.challenge(f"ipv6:{others.format(number)}")
                admitted += 1
    assert admitted == num_admitted
    quotas.challenge("ipv6:2001:db8:1::/64")  # of another customer
    for _ in range(5):
        quotas.refund_anonymous(f"ipv6:{others.format(0)}")
        quotas.challenge(f"ipv6:{others.format(0)}")
