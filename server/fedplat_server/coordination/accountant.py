"""The arithmetic of private jobs, in one thread of its own.

An epsilon may take seconds. Uploads, reports and aggregation use the event loop's threads; the accountant uses none of
them, however many operators ask. One thread also means that each result is computed once: the second call that needs it
waits behind the first, and finds it in the cache.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fedplat.privacy import Charge, accounting

CACHED = 1024
"""Results that are kept, of each kind. A private job needs two for each release, and two for its plan."""
_T = TypeVar("_T")


class Accountant:
    """Runs arithmetic in its own thread, one piece after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "accounting")

    async def run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Return the result of `work`. Work of a call that is cancelled does not start."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the thread after what it computes now."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@functools.lru_cache(maxsize=CACHED)
def epsilon(charges: tuple[Charge, ...], delta: float) -> float:
    """Return `accounting.epsilon`, cached by mechanisms, numbers of releases and delta. For the accountant's thread."""
    return accounting.epsilon(charges, delta)


@functools.lru_cache(maxsize=CACHED)
def epsilon_rdp(charges: tuple[Charge, ...], delta: float) -> float:
    """Return `accounting.epsilon_rdp`, cached by mechanisms, numbers of releases and delta. For that thread too."""
    return accounting.epsilon_rdp(charges, delta)
