"""Revocation: a client is out from its next request on, in every way of authentication."""

from __future__ import annotations

from fedplat.rounds.events import AssignmentFailed, ClientLeft
from fedplat.rounds.states import REASON_TEXTS, Reason
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
        """Revokes a client: its long polls end, and its open assignment fails, as if it had given up itself.

        Safe to repeat. Raises `RefusedError` if there is no such client.
        """
        record = await self._store.revoke_client(client_id, [AuditEntry(actor, Action.CLIENT_REVOKED, client_id)])
        if record is None:
            raise RefusedError(Code.NO_SUCH_CLIENT, client_id)
        self._book.changed(record)
        # First out of the waiting room, for else it could get work after we have looked.
        await runner.submit(ClientLeft(client_id))
        key = runner.coordinator.assignment_of(client_id)
        if key is not None:
            text = REASON_TEXTS[Reason.REVOKED]
            await runner.submit(AssignmentFailed(key, client_id, Reason.REVOKED, text))
        desk.dismiss(client_id)
        return record
