"""The port of the metrics: one page, without login, bounded in all that callers may do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator

import pytest
from prometheus_client import CollectorRegistry, Counter

from fedplat.http_connections import ConnectionLimits
from fedplat_server.errors import ConfigError
from fedplat_server.metrics import service as endpoint_module
from fedplat_server.metrics.service import SCRAPES_PER_MINUTE, MetricsEndpoint
from support.scrapes import promtool

PATIENCE_S = 60.0


@pytest.fixture
async def port() -> AsyncGenerator[int]:
    registry = CollectorRegistry()
    Counter("cakes_total", "Eaten cakes.", registry=registry).inc(3)
    endpoint = MetricsEndpoint("127.0.0.1:0", registry)
    async with endpoint.serve():
        yield endpoint.port


async def ask(port: int, request: str | bytes) -> tuple[int, str]:
    """Sends the bytes of a request; the status and the body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(request.encode() if isinstance(request, str) else request)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


def line(method: str, target: str, *headers: str) -> str:
    return "\r\n".join([f"{method} {target} HTTP/1.0", "host: here", *headers, "", ""])


async def test_the_metrics(port: int) -> None:
    status, body = await ask(port, line("GET", "/metrics"))
    assert status == 200
    assert "cakes_total 3.0\n" in body
    assert "_created" not in body
    assert promtool("check", "metrics", text=body) == ""


async def test_open_metrics_and_a_selection_of_names(port: int) -> None:
    assert "# EOF" in (await ask(port, line("GET", "/metrics", "accept: application/openmetrics-text")))[1]
    assert "cakes" not in (await ask(port, line("GET", "/metrics?name[]=up")))[1]


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/metric", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
        ("POST", "/debug", 404),
        ("HEAD", "/metrics", 405),
        ("POST", "/metrics", 405),
        ("DELETE", "/", 405),
        ("OPTIONS", "/metrics", 405),
    ],
)
async def test_nothing_else(port: int, method: str, target: str, status: int) -> None:
    assert (await ask(port, line(method, target)))[0] == status


async def test_headers_that_are_not_text_do_no_harm(port: int, caplog: pytest.LogCaptureFixture) -> None:
    request = b"GET /metrics HTTP/1.1\r\nhost: here\r\naccept: \xff\xfe\r\nx-\x41: \xff\r\nconnection: close\r\n\r\n"
    assert (await ask(port, request))[0] == 200
    assert (await ask(port, b"nonsense\r\n\r\n"))[0] == 400
    assert (await ask(port, line("GET", "/metrics", "upgrade: websocket", "connection: upgrade")))[0] == 200
    assert caplog.records == []  # anyone could fill the log


async def test_a_request_is_bounded_in_bytes(port: int) -> None:
    with contextlib.suppress(ConnectionError):  # it does not read the rest, so its answer may be lost
        assert (await ask(port, line("GET", "/metrics", f"x-padding: {'x' * 3_000_000}")))[0] == 400


async def test_a_body_is_not_awaited(port: int) -> None:
    assert (await ask(port, line("GET", "/metrics", "content-length: 1000000")))[0] == 200


async def test_slow_callers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "LIMITS", ConnectionLimits(2, head_s=0.05, response_s=0.05))
    endpoint = MetricsEndpoint("127.0.0.1:0", CollectorRegistry())
    async with endpoint.serve():
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        with contextlib.closing(writer):
            writer.write(b"GET /metrics HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_idle_connections_keep_no_scrape_out(port: int) -> None:
    """Silent ones, and ones that had a response and stay open."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(2 * endpoint_module.LIMITS.total):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            if number % 2:
                writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
                await asyncio.wait_for(reader.readuntil(b"/metrics\n"), PATIENCE_S)
        for _ in range(3):
            assert (await ask(port, line("GET", "/metrics")))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("127.0.0.1:9464", "[::1]", "localhost", "server:9464", "a.b.svc")),
        *((host, 421) for host in ("evil.example", "127.0.0.1.evil.example", "localhost#@evil.example", "")),
    ],
)
async def test_a_page_of_another_site_cannot_read_them(port: int, host: str, status: int) -> None:
    """A name of that site, which resolves to this address (DNS rebinding), is unknown."""
    assert (await ask(port, f"GET /metrics HTTP/1.0\r\nhost: {host}\r\n\r\n"))[0] == status


async def test_scrapes_are_limited(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses: list[int] = []
    with contextlib.closing(writer):
        for _ in range(2 * int(SCRAPES_PER_MINUTE)):
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: here\r\n\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), PATIENCE_S)  # the last chunk
            statuses.append(int(answer.split()[1]))
            if statuses[-1] == 429:
                break
    assert statuses[-1] == 429
    assert statuses.count(200) >= SCRAPES_PER_MINUTE


async def test_it_ends_within_a_second_whatever_is_open() -> None:
    endpoint = MetricsEndpoint("127.0.0.1:0", CollectorRegistry())
    async with contextlib.AsyncExitStack() as stack:
        async with endpoint.serve():
            for request in (b"", b"GET /metr", line("GET", "/metrics", "content-length: 9").encode()):
                _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
                stack.callback(writer.close)
                writer.write(request)
                await writer.drain()
            assert (await ask(endpoint.port, line("GET", "/")))[0] == 200
            stopping = time.monotonic()
        assert time.monotonic() - stopping < PATIENCE_S  # it ends; benchmarks/scrape.py measures how soon
        with pytest.raises(OSError, match=r"[Cc]onnect"):
            await asyncio.open_connection("127.0.0.1", endpoint.port)


async def test_ipv6() -> None:
    endpoint = MetricsEndpoint("[::1]:0", CollectorRegistry())
    async with endpoint.serve():
        _, writer = await asyncio.open_connection("::1", endpoint.port)
        writer.close()


async def test_a_taken_port_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot serve metrics at {address}: Address already in use; choose"):
            MetricsEndpoint(address, CollectorRegistry())
    with pytest.raises(ConfigError, match=r"cannot serve metrics at no-such-host\.invalid:1: .*choose another"):
        MetricsEndpoint("no-such-host.invalid:1", CollectorRegistry())
