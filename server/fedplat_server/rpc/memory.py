"""The memory that updates may take while they are received: each has its share, or waits for one.

Clients report when their round ends, which is for all of them at about the same time. What they send at once must not
grow with the cohort.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

from fedplat import wire
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError

UPLOAD_BYTES = 2 * wire.CHUNK_BYTES
"""The most that one upload holds: a chunk that is being written, and one that is being received."""
REPORTS_PART = 0.25
"""The part of the memory that is for updates within reports, so that a report never waits for an upload."""


class MemoryShare:
    """What a call may hold of a budget."""

    def __init__(self, budget: MemoryBudget, size_bytes: int) -> None:
        self._budget = budget
        self.size_bytes = size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Give back what is beyond this size."""
        if size_bytes < self.size_bytes:
            freed, self.size_bytes = self.size_bytes - size_bytes, size_bytes
            self._budget.give_back(freed)


class MemoryBudget:
    """Bytes that calls share. Those that find none left wait in order for a while; others are refused at once."""

    def __init__(self, total_bytes: int, patience_s: float, max_waiting: int) -> None:
        self._total = self._free = total_bytes
        self._patience_s = patience_s
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free_bytes(self) -> int:
        """Number of bytes that no call holds."""
        return self._free

    @property
    def num_waiting(self) -> int:
        """How many calls wait for a share."""
        return sum(not turn.done() for _, turn in self._waiting)

    @contextlib.asynccontextmanager
    async def share(self, size_bytes: int) -> AsyncGenerator[MemoryShare]:
        """Hold a share of this size, or of the whole budget if that is less. Raises `RefusedError`."""
        share = MemoryShare(self, min(size_bytes, self._total))
        await self._take(share.size_bytes)
        try:
            yield share
        finally:
            self.give_back(share.size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Free bytes, for those who wait first."""
        self._free += size_bytes
        self._serve()

    async def _take(self, size_bytes: int) -> None:
        if not self._waiting and size_bytes <= self._free:
            self._free -= size_bytes
            return
        if len(self._waiting) >= self._max_waiting:
            raise RefusedError(Code.TOO_MANY_UPLOADS)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            async with asyncio.timeout(self._patience_s):
                await turn
        except BaseException as exc:
            if turn.done() and not turn.cancelled():  # it was given this very moment
                self.give_back(size_bytes)
            else:
                turn.cancel()
                self._serve()
            if isinstance(exc, TimeoutError):
                raise RefusedError(Code.TOO_MANY_UPLOADS) from exc
            raise

    def _serve(self) -> None:
        """Give shares to those who wait, in order; who gave up is passed over."""
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if size_bytes > self._free:
                    return
                self._free -= size_bytes
                turn.set_result(None)
            self._waiting.popleft()


class UploadMemory:
    """The budgets of this daemon: for uploads, and for updates that come within a report."""

    def __init__(self, limits: Limits) -> None:
        reports = int(REPORTS_PART * limits.upload_memory_bytes)
        self.uploads = MemoryBudget(
            limits.upload_memory_bytes - reports, limits.upload_wait_s, limits.max_waiting_uploads
        )
        self.reports = MemoryBudget(reports, limits.upload_wait_s, limits.max_waiting_uploads)
