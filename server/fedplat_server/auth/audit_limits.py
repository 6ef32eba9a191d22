"""Rate limits for audit entries that any caller can cause.

Entries beyond the limit are only counted: every append locks the end of the audit chain, which job control needs, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from fedplat_server.auth.rate_limits import Bucket, take
from fedplat_server.database.sql_audit import AuditStore
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
        """Append an entry, preceded by one that counts those left out before; beyond the limit, only count it."""
        self._bucket, wait_s = take(self._bucket, self._clock(), self._per_minute)
        if wait_s:
            self._num_left_out += 1
        else:
            await self._append([entry])

    async def finish(self) -> None:
        """Append the entry that counts those left out, if there were any. Call it when the server stops."""
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
    """The names added in the last `period_s` seconds, at most `max_names`: records each name once per period."""

    def __init__(self, period_s: float = HOUR_S, max_names: int = 50_000) -> None:
        self._period_s = period_s
        self._max_names = max_names
        self._seen: OrderedDict[str, float] = OrderedDict()

    def add(self, name: str, now: float) -> bool:
        """Add a name at `now`, in seconds; return whether it was new in this period."""
        added = self._seen.get(name)
        if added is not None and now < added + self._period_s:
            return False
        self._seen.pop(name, None)
        self._seen[name] = now
        if len(self._seen) > self._max_names:
            self._seen.popitem(last=False)
        return True

    def forget(self, name: str) -> None:
        """Remove a name: recording it failed, so that the next `add` must accept it."""
        self._seen.pop(name, None)
