"""Sends the traces of ended attempts, in the background of the leader.

Traces are made from stored rows, which are read in the order of the history. The number of the last row that was sent
is kept in a file of the data folder. So no trace is lost if the daemon is killed or the receiver is away for a while:
the rows are read again, also by the next leader, and nothing waits in memory. A trace may be sent twice, with the same
ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedplat import durable, rounds
from fedplat_server import errors, logs
from fedplat_server.database.sql_traces import TraceStore
from fedplat_server.tracing import ids

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing

FILE_NAME = "traces"
RETRY_S = 1.0
MAX_RETRY_S = 60.0
MAX_AGE_S = 86_400.0
"""Attempts that ended longer ago are not sent."""
BATCH = 10
"""Number of attempts that are sent at once, with up to `ids.MAX_ASSIGNMENTS` spans of assignments each."""
CLOSE_S = 1.0
"""Time for the last traces to be sent when the daemon stops."""


class SentMark:
    """The file with the number of the last history row whose trace was sent."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME

    def read(self) -> int | None:
        """Return the number; None without a file that has one."""
        try:
            text = self._path.read_bytes()[:32].strip()
        except FileNotFoundError:
            return None
        except OSError as exc:
            logs.get().warning("the mark of sent traces cannot be read", error=str(exc))
            return None
        return int(text) if text.isdigit() else None

    def write(self, sequence: int) -> None:
        """Replace the number. Raises `OSError`."""
        durable.write_bytes(self._path, b"%d\n" % sequence)


class AttemptTraces:
    """The background task. The first delay before traces are sent again is `RETRY_S`; the delays double."""

    def __init__(self, tracing: Tracing, store: TraceStore, mark: SentMark) -> None:
        self._tracing = tracing
        self._store = store
        self._mark = mark
        self._sent = 0
        self._ended = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the task, with the attempts that were not sent before the last end of the daemon, if any."""
        last, sent = await self._store.find_last_sequence(), await asyncio.to_thread(self._mark.read)
        self._sent = last if sent is None else min(sent, last)  # a restored database may be older than the mark
        if sent != self._sent:
            await self._save_mark()
        self._ended.set()
        self._task = asyncio.create_task(self._run(), name="traces")

    def on_stored(self, changes: Sequence[rounds.Change]) -> None:
        """Send the traces of the attempts that have ended."""
        if any(change.attempt is not None and not change.attempt.is_open for change in changes):
            self._ended.set()

    async def close(self) -> None:
        """Try once more to send what is left, for up to `CLOSE_S`; the next leader sends the rest."""
        self._closing.set()
        self._ended.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause_s = RETRY_S
        while True:
            await self._ended.wait()
            self._ended.clear()
            if await self._send():
                pause_s = RETRY_S
            elif not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause_s)
                pause_s = min(2.0 * pause_s, MAX_RETRY_S)
                self._ended.set()
            if self._closing.is_set() and not self._ended.is_set():
                return

    async def _send(self) -> bool:
        """Send all ended attempts, in batches; return whether that succeeded."""
        try:
            while attempts := await self._store.list_ended_attempts(
                self._sent, since_unix_s=time.time() - MAX_AGE_S, limit=BATCH, max_assignments=ids.MAX_ASSIGNMENTS
            ):
                if not await asyncio.to_thread(self._tracing.export, attempts):
                    return False
                self._sent = attempts[-1].sequence
                await self._save_mark()
        except errors.LeadershipLostError:
            return True  # the next leader sends them
        except errors.StoreError:  # the runner logs that the database does not answer
            return False
        except Exception:  # a task boundary: rounds do not depend on traces
            logs.get().exception("the traces of attempts could not be made")
            return False
        return True

    async def _save_mark(self) -> None:
        try:
            await asyncio.to_thread(self._mark.write, self._sent)
        except OSError as exc:  # a full disk: after a restart these traces are sent again
            logs.get().warning("the mark of sent traces cannot be written", error=str(exc))
