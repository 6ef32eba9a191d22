"""Reports that contradict an accepted one: the first is kept, and the audit log records the other."""

from __future__ import annotations

from collections import OrderedDict

from fedplat.rounds import AttemptKey
from fedplat_server import logs
from fedplat_server.database.sql_audit import AuditStore
from fedplat_server.records.audit import AuditAction, AuditEntry

MAX_REMEMBERED = 10_000


class Conflicts:
    """The recorded conflicts, at most one for each assignment, so that a client cannot fill the log."""

    def __init__(self, audit: AuditStore) -> None:
        self._audit = audit
        self._noted: OrderedDict[tuple[AttemptKey, str], None] = OrderedDict()

    async def note(self, key: AttemptKey, client_id: str, first: str, other: str) -> None:
        """Record that a client reported the digest `other` after its report with the digest `first` was accepted."""
        if (key, client_id) in self._noted:
            return
        subject = f"{key.job_id} round {key.round} attempt {key.number}"
        # The client chooses the digests, so they are shortened; they can still be compared.
        entry = AuditEntry(client_id, AuditAction.REPORT_CONFLICT, subject, {"first": first[:16], "other": other[:16]})
        await self._audit.append([entry])
        self._noted[key, client_id] = None
        while len(self._noted) > MAX_REMEMBERED:
            self._noted.popitem(last=False)
        logs.get().warning(
            "a client reported other content for a finished assignment", **logs.attempt_fields(key), client=client_id
        )
