"""How long the parts of the server wait before they try again what needs a store that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import numpy as np

STORE_RETRY_S = 0.5
"""The pause of what a round waits for; where pauses grow, the first one."""
BACKGROUND_RETRY_S = 1.0
"""The pause of background tasks, which nothing waits for."""
MAX_FACTOR = 10
"""The longest of pauses that grow, as a multiple of the first one."""
_Result = TypeVar("_Result")


async def retry(call: Callable[[], Awaitable[_Result]], error: type[Exception], pauses: Iterator[float]) -> _Result:
    """Return the result of a call, which is repeated after each of the endless `pauses` while it raises `error`."""
    while True:
        try:
            return await call()
        except error:
            await asyncio.sleep(next(pauses))


def grow_pauses(first_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield random pauses whose upper limits double, each at least half of its limit."""
    limit_s = first_s
    while True:
        yield rng.uniform(limit_s / 2, limit_s)
        limit_s = min(2 * limit_s, MAX_FACTOR * first_s)
