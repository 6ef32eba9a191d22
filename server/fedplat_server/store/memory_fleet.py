"""Enrolment tokens and clients in memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from fedplat_server.audit import AuditEntry
from fedplat_server.errors import EnrolmentError, StoreError
from fedplat_server.store.fleet import ClientRecord, Enrolment, EnrolmentToken, Notes, no_notes, token_refused
from fedplat_server.store.memory_people import MemoryPeople


class MemoryFleet(MemoryPeople):
    """What `MemoryStore` does of `fleet.FleetStore`, beside what it does of the audit log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._tokens_by_hash: dict[bytes, EnrolmentToken] = {}
        self._clients: dict[str, ClientRecord] = {}
        self._client_keys: dict[str, str] = {}

    async def add_enrolment_token(
        self, token: EnrolmentToken, token_hash: bytes, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Adds a token."""
        if token_hash in self._tokens_by_hash or token.token_id in self._token_hashes():
            raise StoreError("another enrolment token has this id or hash")
        self._tokens_by_hash[token_hash] = token
        await self.append_audit(audit)

    async def revoke_enrolment_token(self, token_id: str, audit: Sequence[AuditEntry] = ()) -> EnrolmentToken | None:
        """Revokes a token; see the port."""
        token_hash = self._token_hashes().get(token_id)
        if token_hash is None:
            return None
        token = self._tokens_by_hash[token_hash]
        if token.revoked_unix_s is None:
            token = dataclasses.replace(token, revoked_unix_s=self._clock())
        self._tokens_by_hash[token_hash] = token
        await self.append_audit(audit)
        return token

    async def list_enrolment_tokens(self, *, after: str = "", limit: int | None = None) -> list[EnrolmentToken]:
        """Tokens in the order of their making; see the port."""
        tokens = list(self._tokens_by_hash.values())
        ids = [token.token_id for token in tokens]
        start = 0 if not after else ids.index(after) + 1 if after in ids else len(ids)
        return tokens[start:][:limit]

    async def enroll(self, enrolment: Enrolment, audit: Notes = no_notes) -> ClientRecord:
        """Adds a client and uses its token once; see the port."""
        known = self._client_keys.get(enrolment.idempotency_key)
        record = self._clients[known] if known is not None else self._added(enrolment)
        if record.population != enrolment.population:
            raise EnrolmentError(f"this client is enrolled in population {record.population}")
        if record.public_key != enrolment.public_key:
            raise EnrolmentError("this client is enrolled with another public key")
        record = dataclasses.replace(record, labels=dict(enrolment.labels), software_version=enrolment.software_version)
        self._client_keys[enrolment.idempotency_key] = record.client_id
        self._clients[record.client_id] = record
        if known is None:
            await self.append_audit(audit(record))
        return record

    async def find_clients(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """The clients with these ids."""
        return {client_id: self._clients[client_id] for client_id in client_ids if client_id in self._clients}

    async def begin_sessions(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Counts a session for each; see the port."""
        found = await self.find_clients(client_ids)
        return {name: self._put(one, session_number=one.session_number + 1) for name, one in found.items()}

    async def revoke_client(self, client_id: str, audit: Sequence[AuditEntry] = ()) -> ClientRecord | None:
        """Revokes a client; see the port."""
        record = self._clients.get(client_id)
        if record is None:
            return None
        await self.append_audit(audit)
        if record.revoked_unix_s is not None:
            return record
        return self._put(record, revoked_unix_s=self._clock())

    async def revoke_clients_of(
        self, token_id: str, after: str, limit: int, audit: Notes = no_notes
    ) -> list[ClientRecord]:
        """Revokes a page of a token's clients; see the port."""
        found = [one for one in await self.list_clients(after=after) if one.token_id == token_id][:limit]
        now = self._clock()
        good = [self._put(one, revoked_unix_s=now) for one in found if one.revoked_unix_s is None]
        await self.append_audit([entry for one in good for entry in audit(one)])
        return [self._clients[one.client_id] for one in found]

    async def update_client(self, client_id: str, labels: Mapping[str, str], software_version: str) -> None:
        """Replaces what a client says of itself."""
        if client_id not in self._clients:
            raise StoreError(f"there is no client {client_id}")
        self._put(self._clients[client_id], labels=dict(labels), software_version=software_version)

    async def list_clients(
        self, population: str | None = None, *, after: str = "", limit: int | None = None
    ) -> list[ClientRecord]:
        """Clients in the order of their enrolment; see the port."""
        ids = list(self._clients)
        start = 0 if not after else ids.index(after) + 1 if after in self._clients else len(ids)
        later = (self._clients[client_id] for client_id in ids[start:])
        return list(itertools.islice((one for one in later if population in (None, one.population)), limit))

    async def count_clients(self) -> int:
        """How many clients have enrolled."""
        return len(self._clients)

    def _token_hashes(self) -> dict[str, bytes]:
        return {token.token_id: token_hash for token_hash, token in self._tokens_by_hash.items()}

    def _added(self, enrolment: Enrolment) -> ClientRecord:
        now = self._clock()
        for other in self._clients.values():
            if other.public_key == enrolment.public_key or other.client_id == enrolment.client_id:
                raise EnrolmentError("another client has this public key")
        token = self._tokens_by_hash.get(enrolment.token_hash)
        if token is None or token.population != enrolment.population or token.why_not(now):
            raise token_refused(token, enrolment.population, now)
        self._tokens_by_hash[enrolment.token_hash] = dataclasses.replace(token, num_left=token.num_left - 1)
        return ClientRecord(
            client_id=enrolment.client_id,
            population=enrolment.population,
            labels=dict(enrolment.labels),
            software_version=enrolment.software_version,
            enrolled_unix_s=now,
            public_key=enrolment.public_key,
            token_id=token.token_id,
        )

    def _put(self, record: ClientRecord, **changes: object) -> ClientRecord:
        changed = dataclasses.replace(record, **changes)  # type: ignore[arg-type]
        self._clients[record.client_id] = changed
        return changed
