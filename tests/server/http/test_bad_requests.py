"""What others may send to the port of HTTP: each gets one clear answer or none, and the server lives."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat.wire.v1 import fleet_pb2
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.config import Limits
from hostile import broken_requests
from support import daemons
from support.http_channel import Answer, HttpPeer, headers_of, read_answer, request
from support.raw_client import CHALLENGE, FLEET

pytestmark = [pytest.mark.slow, pytest.mark.calm("no call reaches a store")]
SLOW = (504, "deadline_exceeded")
ORIGIN = "https://app.example.org"
BODY = CHALLENGE.SerializeToString()
HEADERS = headers_of((), "application/proto")
PATH = f"{FLEET}GetChallenge"
UPLOAD = f"{FLEET}Upload"
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture
async def peer(folder: Path) -> AsyncGenerator[HttpPeer]:
    limits = Limits(refusal_delay_s=0.0, http_connections=20, idle_s=2.0, newcomer_read_s=1.0)
    async with daemons.running(folder, limits=limits, http_listen="127.0.0.1:0", http_origins=(ORIGIN,)) as site:
        peer = HttpPeer(site.daemon.http_port)
        yield peer
        assert (await peer.post(PATH, BODY, HEADERS)).status == 200


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["code"]


async def test_requests_that_are_no_calls(peer: HttpPeer) -> None:
    async def status(path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> tuple[int, str]:
        return said(await peer.post(path, body, headers, method))

    bad = "invalid_argument"
    assert await status("/", b"", HEADERS) == (501, "unimplemented")
    assert await status(f"{FLEET}Nothing", b"", HEADERS) == (501, "unimplemented")
    assert await status(PATH, b"", HEADERS, "GET") == (405, bad)
    assert await status(PATH, BODY, HEADERS, "PUT") == (405, bad)
    assert await status(PATH, BODY, {}) == (415, bad)
    assert await status(PATH, BODY, {**HEADERS, "content-type": "application/json"}) == (415, bad)
    assert await status(PATH, BODY, {**HEADERS, "content-encoding": "gzip"}) == (415, bad)
    assert await status(PATH, BODY, {**HEADERS, "connect-protocol-version": "2"}) == (400, bad)
    for timeout in ("-1", "1e3", "nan", "", "9" * 11):
        assert await status(PATH, BODY, {**HEADERS, "connect-timeout-ms": timeout}) == (400, bad), timeout
    for name, value in (("fedplat-nonce-bin", "%%"), ("fedplat-nonce-bin", "A"), ("fedplat-session", "\xe9")):
        assert await status(PATH, BODY, {**HEADERS, name: value}) == (400, bad), value
    assert await status(PATH, b"\xff\xff", HEADERS) == (400, bad)
    assert await status(PATH, bytes(2000), HEADERS) == (400, bad)
    assert await status(UPLOAD, b"", OCTETS) == (400, bad)
    assert await status(UPLOAD, b"", {**OCTETS, "fedplat-request-bin": "!"}) == (400, bad)


async def test_headers_and_framing_that_are_not_valid_close_the_connection(peer: HttpPeer) -> None:
    assert (await peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")).status == 405
    many = {f"x-{number}": "y" * 1000 for number in range(20)}
    assert (await peer.post(PATH, BODY, {**HEADERS, **many})).status in (400, 431)
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        request(PATH, BODY, {**HEADERS, "content-length": "x"}),
        request(PATH, BODY, {**HEADERS, "transfer-encoding": "gzip"}),
        f"POST {PATH} HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".encode(),
        f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n".encode(),
        f"POST {PATH} HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n".encode(),
    ):
        assert (await peer.send(data)).status == 400, data


def raw(*lines: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    """A request with these lines of its head, after the usual two."""
    head = "\r\n".join((f"POST {PATH} HTTP/{version}", "host: a", "content-type: application/proto", *lines))
    return f"{head}\r\n\r\n".encode() + body


async def test_requests_of_odd_but_valid_http(peer: HttpPeer) -> None:
    length = f"content-length: {len(BODY)}"
    assert (await peer.send(raw(length, version="1.0"))).status == 200
    assert (await peer.send(raw(length, "connection: upgrade, http2-settings", "upgrade: h2c"))).status == 200
    assert said(await peer.send(raw(body=b""))) == (400, "failed_precondition")  # no length is no body: an old version
    twice = await peer.send(raw(length, "fedplat-nonce-bin: AAAA", "fedplat-nonce-bin: AAAA"))
    assert (twice.status, b"occurs twice" in twice.body) == (400, True)


async def test_bodies_of_another_length(peer: HttpPeer) -> None:
    """What is too much is another request, and what is too little is no call."""
    reader, writer = await peer.open()
    writer.write(raw(f"content-length: {len(BODY)}", body=BODY + b"junk\r\n\r\n"))
    statuses = [(await asyncio.wait_for(read_answer(reader), daemons.PATIENCE_S)).status for _ in range(2)]
    assert statuses == [200, 400]
    assert await asyncio.wait_for(reader.read(), daemons.PATIENCE_S) == b""
    writer.close()
    reader, writer = await peer.open()
    writer.write(raw(f"content-length: {len(BODY) + 1}"))
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), daemons.PATIENCE_S) == b""
    writer.close()


@pytest.mark.parametrize("name", broken_requests.SMUGGLING)
async def test_a_request_with_two_ends_is_refused_and_ends_its_connection(peer: HttpPeer, name: str) -> None:
    """What follows could be another caller's request, hidden in this one behind a proxy that finds another end."""
    reader, writer = await peer.open()
    writer.write(broken_requests.SMUGGLING[name])
    answers = await asyncio.wait_for(reader.read(), daemons.PATIENCE_S)
    writer.close()
    assert answers.startswith(b"HTTP/1.1 400 "), answers
    assert answers.count(b"HTTP/1.1 ") == 1, answers


async def test_requests_that_come_at_once_are_answered_in_turn(peer: HttpPeer) -> None:
    """Pipelining: each has its answer, and an endless row of them is read no faster than it is answered."""
    reader, writer = await peer.open()
    paths = [PATH, f"{FLEET}Nothing", PATH] * 20
    writer.write(b"".join(request(path, BODY, HEADERS) for path in paths))
    statuses = [(await asyncio.wait_for(read_answer(reader), daemons.PATIENCE_S)).status for _ in paths]
    assert statuses == [200, 501, 200] * 20
    writer.close()


async def test_a_forwarded_call_cannot_be_forged(peer: HttpPeer) -> None:
    forged = {**HEADERS, "fedplat-hop-secret": "x", "fedplat-hop-client": "c-1/1", "fedplat-hop-peer": "ipv4:1.2.3.4:5"}
    status, code = said(await peer.post(f"{FLEET}CheckIn", b"", forged))
    assert (status, code) == (401, "unauthenticated")


async def test_a_body_is_not_read_before_its_call_is_admitted(peer: HttpPeer) -> None:
    """A caller without a session announces a terabyte: it is refused at once, and then cut off."""
    reader, writer = await peer.open()
    first = fleet_pb2.UploadRequest(header=fleet_pb2.UploadHeader(token="x", size_bytes=2**40)).SerializeToString()
    headers = headers_of([("fedplat-request-bin", first)], "application/octet-stream")
    writer.write(request(UPLOAD, b"", {**headers, "content-length": str(2**40)}))
    answer = await asyncio.wait_for(read_answer(reader), daemons.PATIENCE_S)
    assert said(answer) == (401, "unauthenticated")
    assert await asyncio.wait_for(reader.read(), daemons.PATIENCE_S) == b""  # closed: the rest did not come in time
    writer.close()


async def test_slow_and_silent_callers_are_cut_off(peer: HttpPeer) -> None:
    silent, slow = await peer.open(), await peer.open()
    slow[1].write(request(PATH, BODY, {**HEADERS, "content-length": "900"}))
    assert said(await asyncio.wait_for(read_answer(slow[0]), daemons.PATIENCE_S)) == SLOW
    assert await asyncio.wait_for(silent[0].read(), daemons.PATIENCE_S) == b""
    for _, writer in (silent, slow):
        writer.close()


async def test_too_many_connections_close_the_oldest_that_waits(peer: HttpPeer) -> None:
    held = [await peer.open() for _ in range(30)]
    ends = [asyncio.ensure_future(reader.read()) for reader, _ in held]
    done, _ = await asyncio.wait(ends, timeout=daemons.PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert ends[0] in done
    assert (await peer.post(PATH, BODY, HEADERS)).status == 200
    for _, writer in held:
        writer.close()
    await asyncio.gather(*ends, return_exceptions=True)


async def test_pages_of_named_origins_may_call(peer: HttpPeer) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "fedplat-x"}
    answer = await peer.post(PATH, b"", asked, "OPTIONS")
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-methods"] == "POST"
    allowed = answer.headers["access-control-allow-headers"].split(", ")
    assert {"content-type", "fedplat-session", "fedplat-counter", "fedplat-signature-bin"} <= {*allowed}
    called = await peer.post(PATH, BODY, {**HEADERS, "origin": ORIGIN})
    assert (called.status, called.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "trailer-fedplat-code" in called.headers["access-control-expose-headers"]
    other = await peer.post(PATH, b"", {**asked, "origin": "https://evil.example"}, "OPTIONS")
    assert (other.status, other.headers.get("access-control-allow-origin")) == (403, None)


async def test_certificates_are_reloaded(folder: Path) -> None:
    made, now = PkiFolder.of(folder), datetime.datetime.now(datetime.UTC)
    made.make_authority(now)
    made.make_server(pki_folder.all_hosts([]), now)
    async with daemons.running(folder, tls=made.files, http_listen="127.0.0.1:0") as site:
        context = ssl.create_default_context(cafile=made.ca)
        peer = HttpPeer(site.daemon.http_port, context)
        assert (await peer.post(PATH, BODY, HEADERS)).status == 200
        first = await serial(peer)
        made.renew(made.hosts(), now)
        assert await serial(peer) != first
        assert (await peer.post(PATH, BODY, HEADERS)).status == 200
        made.files.certificate.write_text("damaged")
        assert (await peer.post(PATH, BODY, HEADERS)).status == 200


async def serial(peer: HttpPeer) -> str:
    _, writer = await peer.open()
    found: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = found.getpeercert() or {}
    writer.close()
    return str(certificate["serialNumber"])
