"""Revocation: the server refuses all further requests of a client, with every kind of authentication."""

from __future__ import annotations

from typing import NamedTuple

from fedplat.rounds.events import ClientRevoked
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.errors import Code, RefusedError
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

    async def revoke(self, client_id: str, actor: str) -> ClientRecord:
        """Revoke a client: its long polls end, its assignments fail, and open attempts drop its reports.

        Safe to repeat. Raises `RefusedError` if there is no such client.
        """
        record = await self._clients.revoke_client(
            client_id, [AuditEntry(actor, AuditAction.CLIENT_REVOKED, client_id)]
        )
        if record is None:
            raise RefusedError(Code.NO_SUCH_CLIENT, client_id)
        await self._end(record)
        return record

    async def revoke_clients_of(self, enrolled: EnrolledClients, actor: str) -> RevokedClients:
        """Revoke up to `MAX_REVOKED` clients that have enrolled with a token, in transactions of `BATCH` clients each.

        The result has the client after which the next call continues. Safe to repeat.
        """

        def audit(client: ClientRecord) -> list[AuditEntry]:
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

    async def _end(self, record: ClientRecord) -> None:
        """End the calls and the assignments of a client that was just revoked."""
        client_id = record.client_id
        self._directory.replace(record)
        # A single event: between two, the client could get an assignment, or its report could arrive.
        await self._runner.submit(ClientRevoked(client_id))
        self._long_polls.cancel(client_id)
