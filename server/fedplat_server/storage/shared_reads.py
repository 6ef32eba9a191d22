"""A cache of reads that many callers request at about the same time: each is done once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class CoalescingCache(Generic[Key]):
    """A cache of the `num_kept` contents that were requested last; for one event loop."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._kept: OrderedDict[Key, asyncio.Task[bytes]] = OrderedDict()

    async def get(self, key: Key, read: Callable[[], bytes]) -> bytes:
        """Return the cached content of a key, or that of `read`, which runs in a thread. Its errors are not cached."""
        task = self._kept.get(key)
        if task is None:
            task = self._kept[key] = asyncio.create_task(asyncio.to_thread(read), name=f"read {key}")
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return await asyncio.shield(task)  # others may wait for it too

    def _forget_failed(self, key: Key, done: asyncio.Task[bytes]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._kept.get(key) is done:
            del self._kept[key]
