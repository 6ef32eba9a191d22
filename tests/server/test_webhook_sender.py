"""One request of a webhook: what it contains, which addresses it may reach, and what a bad receiver can do."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import pytest
import standardwebhooks

from fedplat_server.auth import tls
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.errors import ConfigError
from fedplat_server.records import events
from fedplat_server.records.events import EventRow, SendResult, WebhookRecord, parse_url
from fedplat_server.webhooks.addresses import Network, parse_network, select_addresses
from fedplat_server.webhooks.delivery import MAX_BODY_BYTES, MAX_HEAD_BYTES, WebhookSender
from support.receiver import Delivered, Receiver, answer, receiving

LOOPBACK: list[Network] = [ipaddress.ip_network("127.0.0.0/8")]
EVENT = EventRow(7, 1_700_000_000.25, "round.committed", "j-1", "digits", "demo", round=3, attempt=1, text="loss 0.25")
SECRET = events.new_secret()


def record(url: str) -> WebhookRecord:
    return WebhookRecord("w-0123456789ab", url, (), SECRET, 1.0)


async def send(url: str, allowed: Sequence[Network] = LOOPBACK, **options: object) -> SendResult:
    sender = WebhookSender(allowed, **options)  # pyright: ignore[reportArgumentType]
    try:
        return await sender.send(record(url), EVENT, "msg_1_7", time.time())
    finally:
        sender.close()


@pytest.fixture
async def receiver() -> AsyncGenerator[Receiver]:
    async with receiving() as made:
        yield made


async def test_a_receiver_can_verify_the_request_with_the_library_of_the_standard(receiver: Receiver) -> None:
    assert await send(receiver.url) == SendResult(True, "204")
    (request,) = receiver.delivered
    request.verify(SECRET)
    assert request.line == "POST /hooks?key=path-secret HTTP/1.1"
    assert (request.event_id, request.headers["content-type"]) == ("msg_1_7", "application/json")
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.payload == {
        "type": "round.committed",
        "timestamp": "2023-11-14T22:13:20.250Z",
        "data": {"sequence": 7, "job_id": "j-1", "job_name": "digits", "population": "demo", "round": 3, "attempt": 1},
    }
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        request.verify(events.new_secret())
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        Delivered("", request.headers, request.body.replace(b"digits", b"digitz")).verify(SECRET)


@pytest.mark.parametrize("status", [200, 204, 301, 302, 307, 400, 410, 500, 503])
async def test_only_a_status_of_2xx_is_a_success_and_redirects_are_not_followed(
    receiver: Receiver, status: int
) -> None:
    receiver.respond = lambda _: answer(status, f"location: {receiver.url}")
    result = await send(receiver.url)
    assert result.accepted is (status < 300)
    assert result.text.startswith(str(status))
    assert ("redirects are not followed" in result.text) is (300 <= status < 400)
    assert len(receiver.delivered) == 1


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "the response is not HTTP/1.1"),
        (b"", "the response is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n", "the response is not HTTP/1.1"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * MAX_HEAD_BYTES, "the response is not HTTP/1.1"),
        (answer(200, body=b"z" * 50 * MAX_BODY_BYTES), "200"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", "200"),
    ],
)
async def test_what_a_receiver_sends_is_bounded(receiver: Receiver, response: bytes, said: str) -> None:
    receiver.respond = lambda _: response
    result = await send(receiver.url)
    # A body that ends too early changes nothing: the receiver has accepted the event.
    assert result.text in (said, "the response is not HTTP/1.1") if said == "200" else result.text == said


async def test_a_silent_receiver_is_given_up(receiver: Receiver) -> None:
    receiver.respond = lambda _: None
    result = await send(receiver.url, timeout_s=0.05)
    assert result == SendResult(False, "no response within 0.05 s")


async def test_nothing_listens_or_the_name_is_not_known() -> None:
    async with receiving() as made:
        url = made.url
    assert await send(url) == SendResult(False, "connection refused")

    async def resolve(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    assert await send("https://example.org/", resolve=resolve) == SendResult(False, "the host name is not known")


async def test_no_proxy_of_the_environment_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await send(receiver.url)).accepted


# --- addresses -----------------------------------------------------------------------------------------------

REFUSED = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1"),
    *("::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:a00:1::1", "2001:db8::1"),
    *("192.88.99.1", "192.31.196.1", "192.175.48.1", "3fff::1", "5f00::1"),
]


@pytest.mark.parametrize("address", REFUSED)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(PermissionError, match=r"is not a public address; --webhook-network"):
        select_addresses([address], [], is_secure=True)


def test_allowed_networks_and_public_addresses_may_be_reached() -> None:
    allowed = [parse_network("10.0.0.0/8"), parse_network("fc00::/7")]
    mixed = ["10.1.2.3", "192.168.1.1", "93.184.215.14", "fc00::1", "2606:2800:21f::1", "::ffff:10.0.0.9"]
    assert select_addresses(mixed, allowed, is_secure=True) == [mixed[0], *mixed[2:]]
    assert select_addresses(mixed, allowed, is_secure=False) == [mixed[0], mixed[3], mixed[5]]
    embedded = ["64:ff9b::5db8:d70e", "2002:5db8:d70e::1"]  # of a public address
    assert select_addresses(embedded, [], is_secure=True) == embedded
    with pytest.raises(PermissionError, match=r"93.184.215.14 may not be reached without TLS"):
        select_addresses(["93.184.215.14"], allowed, is_secure=False)
    with pytest.raises(ConfigError, match=r"webhook network '10\.0\.0\.0/33'"):
        parse_network("10.0.0.0/33")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1", "[::1]", "[::ffff:127.0.0.1]"])
async def test_a_private_receiver_gets_no_connection(receiver: Receiver, host: str) -> None:
    """However its address is written: what counts is the address that would be connected to."""
    result = await send(f"https://{host}:{receiver.port}/", allowed=())
    assert not result.accepted
    assert "is not a public address" in result.text
    assert receiver.delivered == []


async def test_a_name_that_changes_its_address_gains_nothing(receiver: Receiver) -> None:
    """DNS rebinding: the name is resolved once, and the checked address is the one that is connected to."""
    answers = iter([["93.184.215.14"], ["127.0.0.1"]])
    connected: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        return next(answers)

    async def refuse(host: str, *_: object, **__: object) -> None:
        connected.append(host)
        raise ConnectionRefusedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "open_connection", refuse)
        await send("https://rebind.example/", allowed=(), resolve=resolve)
    assert connected == ["93.184.215.14"]
    result = await send(f"https://rebind.example:{receiver.port}/", allowed=(), resolve=resolve)
    assert result.text.startswith("127.0.0.1 is not a public address")
    assert receiver.delivered == []


# --- TLS -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pki(tmp_path: Path) -> PkiFolder:
    """A private authority and a certificate for localhost."""
    folder = PkiFolder.of(tmp_path)
    folder.make_authority(tls.utc_now())
    folder.make_server(["localhost"], tls.utc_now())
    return folder


async def test_certificates_are_checked(pki: PkiFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki.files.certificate, pki.files.key)
    async with receiving(context=context) as receiver:
        url = f"https://localhost:{receiver.port}/hooks"
        untrusted = await send(url)
        assert untrusted.text.startswith("the certificate is not valid: ")
        monkeypatch.setenv("SSL_CERT_FILE", str(pki.ca))
        assert await send(url) == SendResult(True, "204")

        async def resolve(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        other = await send(f"https://example.org:{receiver.port}/", resolve=resolve)
        assert other.text.startswith("the certificate is not valid: ")
        assert [request.line for request in receiver.delivered] == ["POST /hooks HTTP/1.1"]
        receiver.delivered[0].verify(SECRET)


# --- URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://example.org/", "another scheme"),
        ("example.org/hooks", "another scheme"),
        ("https://", "no valid host name"),
        ("https://exa mple.org/", "characters that are not allowed"),
        ("https://example.org/\r\nx: y", "characters that are not allowed"),
        ("https://ex\N{SNOWMAN}mple.org/", "characters that are not allowed"),
        ("https://a..b/", "no valid host name"),
        (f"https://{'a' * 64}.org/", "no valid host name"),
        ("https://-a.org/", "no valid host name"),
        ("https://anna:secret@example.org/", "a user name or a password"),
        ("https://example.org/#top", "a fragment"),
        ("https://example.org:0/", "the port 0"),
        ("https://example.org:65536/", "cannot be read"),
        ("https://[::1/", "cannot be read"),
        ("https://[fe80::1%25eth0]/", "no valid host name"),
        (f"https://example.org/{'a' * 2048}", "longer than 2048 bytes"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_url(url)


def test_parts_of_a_url() -> None:
    target = parse_url("https://Example.org?key=1")
    assert (target.host, target.port, target.path, target.authority) == ("example.org", 443, "/?key=1", "example.org")
    other = parse_url("http://[fc00::1]:8080/a/b")
    assert (other.host, other.authority, other.origin) == ("fc00::1", "[fc00::1]:8080", "http://[fc00::1]:8080")


@pytest.mark.parametrize(
    ("url", "allowed", "said"),
    [
        ("http://example.org/", (), "without TLS"),
        ("https://10.0.0.1/", (), "10.0.0.1 is not a public address"),
        ("https://10.0.0.1/", LOOPBACK, "10.0.0.1 is not a public address"),
        ("https://[::1]/", (), "::1 is not a public address"),
        ("http://93.184.215.14/", LOOPBACK, "may not be reached without TLS"),
        ("https://example.org/", (), ""),
        ("http://127.0.0.1/", LOOPBACK, ""),
        ("http://internal.example/", LOOPBACK, ""),
    ],
)
def test_urls_that_no_webhook_of_this_server_can_have(url: str, allowed: Sequence[Network], said: str) -> None:
    sender = WebhookSender(allowed)
    check: Callable[[str], None] = sender.check_url
    if said:
        with pytest.raises(ValueError, match=said):
            check(url)
    else:
        check(url)
    sender.close()
