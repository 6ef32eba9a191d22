"""Revocation: a client is out from its next request on, in every way of authentication."""

from __future__ import annotations

from fedplat.rounds.events import ClientRevoked
from fedplat_server.audit import Action, AuditEntry
from fedplat_server.desk import Desk
from fedplat_server.identity.book import ClientBook
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.runner import Runner
from fedplat_server.store.fleet import ClientRecord
from fedplat_server.store.port import Store


class Revocation:
    """Ends memberships for good."""

    def __init__(self, store: Store, book: ClientBook) -> None:
        self._store = store
        self._book = book

    async def revoke(self, client_id: str, actor: str, runner: Runner, desk: Desk) -> ClientRecord:
        """Revokes a client: its long polls end, its work fails, and open attempts drop what it has reported.

        Safe to repeat. Raises `RefusedError` if there is no such client.
        """
        record = await self._store.revoke_client(client_id, [AuditEntry(actor, Action.CLIENT_REVOKED, client_id)])
        if record is None:
            raise RefusedError(Code.NO_SUCH_CLIENT, client_id)
        self._book.changed(record)
        # One event: between two, it could get work, or its report could come.
        await runner.submit(ClientRevoked(client_id))
        desk.dismiss(client_id)
        return record
