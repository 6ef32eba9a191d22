"""Rate limit for audit entries that any caller can cause: so many rows a minute, and one that counts those left out.

Every row takes the lock at the end of the chain, which job control needs as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from fedplat_server.auth.rate_limits import Bucket, take
from fedplat_server.database.ports import AuditStore
from fedplat_server.records.audit import SERVER, AuditAction, AuditEntry

HOUR_S = 3600.0


class BoundedAudit:
    """Appends entries, at most `per_minute` of them from all callers together; `clock` is monotonic, in seconds."""

    def __init__(self, audit: AuditStore, per_minute: float, clock: Callable[[], float]) -> None:
        self._audit = audit
        self._per_minute = per_minute
        self._clock = clock
        self._bucket = Bucket(per_minute, clock())
        self._num_left_out = 0

    async def append(self, entry: AuditEntry) -> None:
        """Append an entry, after a row that counts those left out before it; or leave it out and count it."""
        self._bucket, wait_s = take(self._bucket, self._clock(), self._per_minute)
        if wait_s:
            self._num_left_out += 1
        else:
            await self._append([entry])

    async def finish(self) -> None:
        """Append the row that counts what was left out, if anything was. To be called when the server stops."""
        if self._num_left_out:
            await self._append([])

    async def _append(self, entries: list[AuditEntry]) -> None:
        left_out, self._num_left_out = self._num_left_out, 0
        if left_out:
            entries = [AuditEntry(SERVER, AuditAction.NOT_NOTED, "", {"num_rows": left_out}), *entries]
        try:
            await self._audit.append(entries)
        except BaseException:
            self._num_left_out += left_out
            raise


class RecentEntries:
    """The names of the last `period_s` seconds, at most `most`, so that each is recorded once in that time."""

    def __init__(self, period_s: float = HOUR_S, most: int = 50_000) -> None:
        self._period_s = period_s
        self._most = most
        self._seen: OrderedDict[str, float] = OrderedDict()

    def add(self, name: str, now: float) -> bool:
        """Add a name; return whether it was not there."""
        at = self._seen.get(name)
        if at is not None and now < at + self._period_s:
            return False
        self._seen.pop(name, None)
        self._seen[name] = now
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return True

    def forget(self, name: str) -> None:
        """Remove a name that could not be recorded."""
        self._seen.pop(name, None)
