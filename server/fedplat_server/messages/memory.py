"""Budgets for the memory of updates that are being received: each update holds a share, or waits for one.

The clients of a round report at about the same time. The memory for that must not grow with the cohort.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

from fedplat import wire
from fedplat_server import config, errors

UPLOAD_BYTES = 2 * wire.CHUNK_BYTES
"""The memory of one upload: a chunk that is being written, and one that is being received."""
REPORTS_PART = 0.25
"""The fraction of the memory for updates within reports, so that a report never waits for an upload."""


class MemoryShare:
    """The part of a budget that a call holds."""

    def __init__(self, budget: MemoryBudget, size_bytes: int) -> None:
        self._budget = budget
        self.size_bytes = size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Reduce the share to this size if it is larger."""
        if size_bytes < self.size_bytes:
            freed, self.size_bytes = self.size_bytes - size_bytes, size_bytes
            self._budget.give_back(freed)


class MemoryBudget:
    """Bytes that calls share. Up to `max_waiting` calls wait for bytes, in order; further ones are refused at once."""

    def __init__(self, total_bytes: int, timeout_s: float, max_waiting: int) -> None:
        self._total = self._free = total_bytes
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free_bytes(self) -> int:
        """The number of bytes that no call holds."""
        return self._free

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a share."""
        return sum(not turn.done() for _, turn in self._waiting)

    @contextlib.asynccontextmanager
    async def share(self, size_bytes: int) -> AsyncGenerator[MemoryShare]:
        """Wait for a share of this size (at most the whole budget) and hold it.

        Raises `RefusedError` if too many calls wait, or after `timeout_s`.
        """
        share = MemoryShare(self, min(size_bytes, self._total))
        await self._take(share.size_bytes)
        try:
            yield share
        finally:
            self.give_back(share.size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Free bytes, and hand them to waiting calls."""
        self._free += size_bytes
        self._serve()

    async def _take(self, size_bytes: int) -> None:
        if not self._waiting and size_bytes <= self._free:
            self._free -= size_bytes
            return
        if len(self._waiting) >= self._max_waiting:
            raise errors.RefusedError(errors.Code.TOO_MANY_UPLOADS)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            async with asyncio.timeout(self._timeout_s):
                await turn
        except BaseException as exc:
            if turn.done() and not turn.cancelled():  # the share was granted at the same moment
                self.give_back(size_bytes)
            else:
                turn.cancel()
                self._serve()
            if isinstance(exc, TimeoutError):
                raise errors.RefusedError(errors.Code.TOO_MANY_UPLOADS) from exc
            raise

    def _serve(self) -> None:
        """Grant shares to waiting calls in order; skip cancelled ones."""
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if size_bytes > self._free:
                    return
                self._free -= size_bytes
                turn.set_result(None)
            self._waiting.popleft()


class UploadMemory:
    """The memory budgets of this daemon: for uploads, and for updates within reports."""

    def __init__(self, limits: config.Limits) -> None:
        reports = int(REPORTS_PART * limits.upload_memory_bytes)
        self.uploads = MemoryBudget(
            limits.upload_memory_bytes - reports, limits.upload_wait_s, limits.max_waiting_uploads
        )
        self.reports = MemoryBudget(reports, limits.upload_wait_s, limits.max_waiting_uploads)
