"""Connections of the dashboard's port that say nothing, say it slowly, or do not read: they keep no visitor out."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat.dashboard.app import Dashboard
from fedplat.http_connections import ConnectionLimits
from fedplat.web.serving import bind, make_server
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from support.dashboard.fake_server import FakeServer
from support.dashboard.visitor import FakeLogin

PATIENCE_S = 60.0
REQUEST = b"GET /login HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
POST = b"POST /login HTTP/1.1\r\nhost: localhost\r\nsec-fetch-site: same-origin\r\ncontent-length: 9\r\n\r\nto"


@contextlib.asynccontextmanager
async def serving(limits: ConnectionLimits, tls: ssl.SSLContext | None = None) -> AsyncGenerator[int]:
    """The port of a dashboard with these limits."""
    started = asyncio.Event()
    server = make_server(Dashboard(FakeLogin(FakeServer()), frozenset({"localhost"})), tls, started.set, limits)
    with bind("127.0.0.1", 0) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        await started.wait()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def visit(port: int, tls: ssl.SSLContext | None = None) -> bytes:
    """The status line of the page to sign in. Only with TLS, browsers are told to use it in future."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
    )
    with contextlib.closing(writer):
        writer.write(REQUEST)
        head = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")[0]
    assert (b"strict-transport-security: max-age=31536000" in head.split(b"\r\n")) == (tls is not None)
    return head.partition(b"\r\n")[0]


@contextlib.asynccontextmanager
async def holding(port: int, beginnings: list[bytes]) -> AsyncGenerator[list[asyncio.StreamReader]]:
    """Connections that send these bytes and stay open."""
    async with contextlib.AsyncExitStack() as stack:
        readers: list[asyncio.StreamReader] = []
        for beginning in beginnings:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(beginning)
            readers.append(reader)
        yield readers


async def until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.wait_for(reader.read(2**16), PATIENCE_S):
            pass


async def test_silent_connections_keep_no_visitor_out() -> None:
    limits = ConnectionLimits(total=8, head_s=3600.0, body_s=3600.0)
    async with serving(limits) as port, holding(port, [b"", b"GET / HT", POST] * 10) as readers:
        for _ in range(3):
            assert await visit(port) == b"HTTP/1.1 200 OK"
        await until_closed(readers[0])


@pytest.mark.parametrize("beginning", [b"", b"GET / HT", POST, REQUEST.replace(b"close", b"keep-alive") + b"GET"])
async def test_a_request_has_a_deadline(beginning: bytes) -> None:
    """Also a further one on a connection that stays open."""
    limits = ConnectionLimits(8, head_s=0.05, body_s=0.05, stall_s=0.05)
    async with serving(limits) as port, holding(port, [beginning]) as readers:
        await until_closed(readers[0])


async def test_a_handshake_has_a_deadline_and_keeps_no_visitor_out(tmp_path: Path) -> None:
    made = PkiFolder.of(tmp_path)
    now = datetime.datetime.now(datetime.UTC)
    made.make_authority(now)
    made.make_server(pki_folder.all_hosts([]), now)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.files.certificate, made.files.key)
    trusting = ssl.create_default_context(cafile=str(made.ca))
    async with (
        serving(ConnectionLimits(4, head_s=3600.0), tls) as port,
        holding(port, [b"", b"\x16\x03"] * 6) as readers,
    ):
        assert await visit(port, trusting) == b"HTTP/1.1 200 OK"
        await until_closed(readers[0])
    async with (
        serving(ConnectionLimits(4, head_s=0.05), tls) as port,
        holding(port, [b"", b"\x16\x03", b"no"]) as readers,
    ):
        for reader in readers:
            await until_closed(reader)


async def test_an_invalid_request_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ConnectionLimits(8)) as port, holding(port, [b"nonsense\r\n\r\n"]) as readers:
        await until_closed(readers[0])
    assert not caplog.records
