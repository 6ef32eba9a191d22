"""Revocation: a client is refused from its next request on, whatever its way of authentication."""

from __future__ import annotations

from typing import NamedTuple

from fedplat.rounds.events import ClientRevoked
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord
from fedplat_server.database.ports import ClientStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records.audit import AuditAction, AuditEntry

BATCH = 100
"""Maximum number of clients that one transaction revokes: it blocks other writers no longer than a save does."""
MAX_REVOKED = 1000
"""Maximum number of clients that one call revokes, well within the timeout of an operator's command."""


class EnrolledClients(NamedTuple):
    """The clients that have enrolled by a token, after the client `after` ("": all)."""

    token_id: str
    after: str = ""


class RevokedClients(NamedTuple):
    """The number of clients found, and the client after which the next call continues ("": there are no more)."""

    num_clients: int
    next_after: str = ""


class Revocation:
    """Revokes clients for good."""

    def __init__(self, clients: ClientStore, book: ClientDirectory) -> None:
        self._clients = clients
        self._book = book

    async def revoke(self, client_id: str, actor: str, runner: Runner, desk: LongPolls) -> ClientRecord:
        """Revoke a client: its long polls end, its work fails, and open attempts drop what it has reported.

        Safe to repeat. Raises `RefusedError` if there is no such client.
        """
        record = await self._clients.revoke_client(
            client_id, [AuditEntry(actor, AuditAction.CLIENT_REVOKED, client_id)]
        )
        if record is None:
            raise RefusedError(Code.NO_SUCH_CLIENT, client_id)
        await self._end(record, runner, desk)
        return record

    async def revoke_clients_of(
        self, enrolled: EnrolledClients, actor: str, runner: Runner, desk: LongPolls
    ) -> RevokedClients:
        """Revoke clients that have enrolled by a token, as `revoke` does, in transactions of `BATCH` clients each.

        At most `MAX_REVOKED` of them: the answer has where the next call continues. Safe to repeat.
        """

        def audit(client: ClientRecord) -> list[AuditEntry]:
            return [AuditEntry(actor, AuditAction.CLIENT_REVOKED, client.client_id, {"enrollment": enrolled.token_id})]

        after, num_revoked = enrolled.after, 0
        while num_revoked < MAX_REVOKED:
            page = await self._clients.revoke_clients_of(enrolled.token_id, after, BATCH, audit)
            for record in page:
                self._book.replace(record)
            for record in page:
                await self._end(record, runner, desk)
            num_revoked += len(page)
            if len(page) < BATCH:
                return RevokedClients(num_revoked)
            after = page[-1].client_id
        return RevokedClients(num_revoked, after)

    async def _end(self, record: ClientRecord, runner: Runner, desk: LongPolls) -> None:
        """End the calls and the work of a client that was just revoked."""
        client_id = record.client_id
        self._book.replace(record)
        # One event: between two, it could get work, or its report could come.
        await runner.submit(ClientRevoked(client_id))
        desk.cancel(client_id)
