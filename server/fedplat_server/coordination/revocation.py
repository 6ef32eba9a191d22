"""Revocation of clients, and reports that contradict an accepted one, which the audit log records."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from fedplat.rounds import AttemptKey
from fedplat.rounds.events import ClientRevoked
from fedplat_server import errors, logs
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.runner import Runner
from fedplat_server.database import records, sql_audit
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.records.audit import AuditAction, AuditEntry

BATCH = 100
"""Maximum number of clients that one transaction revokes, so that it blocks other writers no longer than a save."""
MAX_REVOKED = 1000
"""Maximum number of clients that one call revokes, well within the timeout of an operator's command."""


class EnrolledClients(NamedTuple):
    """The clients that have enrolled with a token, after the client `after` ("": all)."""

    token_id: str
    after: str = ""


class RevokedClients(NamedTuple):
    """The number of revoked clients, and the client after which the next call continues ("": there are no more)."""

    num_clients: int
    next_after: str = ""


class Revocation:
    """The permanent revocation of clients."""

    def __init__(self, clients: ClientStore, directory: ClientDirectory, runner: Runner, long_polls: LongPolls) -> None:
        self._clients = clients
        self._directory = directory
        self._runner = runner
        self._long_polls = long_polls

    async def revoke(self, client_id: str, actor: str) -> records.ClientRecord:
        """Revoke a client: its long polls end, its assignments fail, and open attempts drop its reports.

        Safe to repeat. Raises `RefusedError` if there is no such client.
        """
        record = await self._clients.revoke_client(
            client_id, [AuditEntry(actor, AuditAction.CLIENT_REVOKED, client_id)]
        )
        if record is None:
            raise errors.RefusedError(errors.Code.NO_SUCH_CLIENT, client_id)
        await self._end(record)
        return record

    async def revoke_clients_of(self, enrolled: EnrolledClients, actor: str) -> RevokedClients:
        """Revoke up to `MAX_REVOKED` clients that have enrolled with a token, in transactions of `BATCH` clients each.

        The result has the client after which the next call continues. Safe to repeat.
        """

        def audit(client: records.ClientRecord) -> list[AuditEntry]:
            return [AuditEntry(actor, AuditAction.CLIENT_REVOKED, client.client_id, {"enrollment": enrolled.token_id})]

        after, num_revoked = enrolled.after, 0
        while num_revoked < MAX_REVOKED:
            page = await self._clients.revoke_clients_of(enrolled.token_id, after, BATCH, audit)
            for record in page:
                self._directory.replace(record)
            for record in page:
                await self._end(record)
            num_revoked += len(page)
            if len(page) < BATCH:
                return RevokedClients(num_revoked)
            after = page[-1].client_id
        return RevokedClients(num_revoked, after)

    async def _end(self, record: records.ClientRecord) -> None:
        """End the calls and the assignments of a client that was just revoked."""
        client_id = record.client_id
        self._directory.replace(record)
        # A single event: between two, the client could get an assignment, or its report could arrive.
        await self._runner.submit(ClientRevoked(client_id))
        self._long_polls.cancel(client_id)


MAX_REMEMBERED = 10_000


class Conflicts:
    """The recorded conflicts, at most one for each assignment, so that a client cannot fill the log."""

    def __init__(self, audit: sql_audit.AuditStore) -> None:
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
