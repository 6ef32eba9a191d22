"""Who holds connections of the port of HTTP: newcomers keep neither each other out, nor those who have a credential."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from fedplat.wire.v1 import admin_pb2
from fedplat_server.config import Limits
from support import daemons
from support.access import ADMIN_TOKEN
from support.daemons import Site
from support.http_channel import headers_of, read_answer, request
from support.raw_client import CHALLENGE, FLEET

pytestmark = [pytest.mark.slow, pytest.mark.calm("no call reaches a store")]
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
STATUS = "/fedplat.wire.v1.Operators/GetStatus"
SLOW_CALLERS = 256


@contextlib.asynccontextmanager
async def serving(folder: Path, **given: Any) -> AsyncGenerator[Site]:
    async with daemons.running(folder, http_listen="127.0.0.1:0", http_operators=True, **given) as site:
        yield site


async def opened(site: Site, source: str = "127.0.0.1") -> Stream:
    return await asyncio.open_connection("127.0.0.1", site.daemon.http_port, local_addr=(source, 0))


async def ask(stream: Stream, *, credential: bool = True) -> int:
    """A call of an operator, or one of a newcomer, on a connection that stays open; the status of the response."""
    metadata = [("authorization", f"Bearer {ADMIN_TOKEN}")] if credential else []
    path = STATUS if credential else f"{FLEET}GetChallenge"
    body = admin_pb2.GetStatusRequest().SerializeToString() if credential else CHALLENGE.SerializeToString()
    stream[1].write(request(path, body, headers_of(metadata, "application/proto")))
    return (await asyncio.wait_for(read_answer(stream[0]), daemons.PATIENCE_S)).status


async def is_closed(stream: Stream) -> None:
    """Waits for the end of a connection."""
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(stream[0].read(), daemons.PATIENCE_S) == b""


async def test_newcomers_close_only_each_other(folder: Path) -> None:
    """A flood of connections, beyond the limit of all: those that served a call of an operator stay."""
    limits = Limits(http_connections=30, http_newcomers=8, http_share_s=0.0)
    async with serving(folder, limits=limits) as site:
        known = [await opened(site) for _ in range(5)]
        assert [await ask(each) for each in known] == [200] * 5
        asked = await opened(site)
        assert await ask(asked, credential=False) == 200  # of a call that anyone may make
        flood = [await opened(site) for _ in range(60)]
        await asyncio.gather(is_closed(asked), *map(is_closed, flood[: 60 - 8]))
        assert [await ask(each) for each in (*known, *flood[-8:])] == [200] * 13
        for _, writer in (*known, asked, *flood):
            writer.close()


async def test_a_network_has_a_share_of_the_newcomers(folder: Path) -> None:
    limits = Limits(http_newcomers=10, http_newcomers_per_network=4, http_share_s=0.0)
    async with serving(folder, limits=limits) as site:
        other = await opened(site, "127.0.0.2")
        flood = [await opened(site) for _ in range(20)]
        await asyncio.gather(*map(is_closed, flood[:16]))
        assert [await ask(each) for each in (other, *flood[16:])] == [200] * 5
        for _, writer in (other, *flood):
            writer.close()


async def test_the_callers_of_a_trusted_proxy_are_no_newcomers(folder: Path) -> None:
    limits = Limits(http_newcomers=4, http_newcomers_per_network=4, http_share_s=0.0)
    async with serving(folder, limits=limits, trusted_proxies=("127.0.0.0/8",)) as site:
        held = [await opened(site) for _ in range(20)]
        assert [await ask(each) for each in held] == [200] * 20
        for _, writer in held:
            writer.close()


async def test_a_client_is_served_while_newcomers_send_slowly(folder: Path) -> None:
    """256 of them have begun a message, and none has ended it, when all calls of the client are answered."""
    limits = Limits(newcomer_read_s=3600.0, newcomer_share_s=3600.0, http_newcomers=2 * SLOW_CALLERS)
    async with serving(folder, limits=limits) as site:
        slow = [await opened(site) for _ in range(SLOW_CALLERS)]
        for _, writer in slow:
            headers = {**headers_of((), "application/proto"), "content-length": "900"}
            writer.write(request(f"{FLEET}GetChallenge", b"\n", headers))
        ends = [asyncio.ensure_future(is_closed(each)) for each in slow]
        known = await opened(site)
        assert [await ask(known) for _ in range(20)] == [200] * 20
        assert not any(each.done() for each in ends)
        for _, writer in slow:
            writer.close()
        await asyncio.gather(*ends)
        known[1].close()
