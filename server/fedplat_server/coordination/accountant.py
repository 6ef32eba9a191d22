"""The privacy arithmetic, in its own thread.

An epsilon may take seconds. Uploads, reports and aggregation use the event loop's threads; the accountant occupies none
of them, however many operators call it. With one thread each result is also computed only once: the second call that
needs it waits for the first, and then finds it in the cache.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fedplat.privacy import Charge, accounting

CACHED = 1024
"""The size of each cache. A private job needs two results for each release, and two for its plan."""
_T = TypeVar("_T")


class Accountant:
    """A thread for the privacy arithmetic, which runs one function at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "accounting")

    async def run(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Return the result of a function. If the call is cancelled before the function starts, it does not start."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """End the thread after the running function."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@functools.lru_cache(maxsize=CACHED)
def epsilon(charges: tuple[Charge, ...], delta: float) -> float:
    """Return `accounting.epsilon`, cached by mechanisms, numbers of releases and delta. For the accountant's thread."""
    return accounting.epsilon(charges, delta)


@functools.lru_cache(maxsize=CACHED)
def epsilon_rdp(charges: tuple[Charge, ...], delta: float) -> float:
    """Return `accounting.epsilon_rdp`, cached by mechanisms, numbers of releases and delta. For that thread too."""
    return accounting.epsilon_rdp(charges, delta)
