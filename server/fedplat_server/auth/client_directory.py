"""A cache of client records by id, and enrollment: tokens, with which devices become clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple
from uuid import uuid4

from fedplat.config.label_expressions import compile_expression
from fedplat.rounds import JobState
from fedplat.wire.auth import Ticket
from fedplat_server.auth.rate_limits import RecentEntries
from fedplat_server.auth.tls import Certificates
from fedplat_server.database import sql_clients, transactions
from fedplat_server.database.records import ClientRecord, Enrollment, EnrollmentToken
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.errors import Code, EnrollmentConflictError, RefusedError, TokenRefusedError
from fedplat_server.records.audit import AuditAction, AuditEntry

CACHE_SIZE = 50_000
UPDATE_EVERY_S = 60.0
"""Minimum interval between updates of a client's labels and software version."""


class Offer(NamedTuple):
    """The trainers and evaluators that a client has installed."""

    trainers: frozenset[str] = frozenset()
    evaluators: frozenset[str] = frozenset()


class ClientDirectory:
    """A cache of the most recently stored clients. Coherent because only the leader changes clients."""

    def __init__(self, clients: sql_clients.ClientStore) -> None:
        self._clients = clients
        self._records = transactions.BatchLoader(clients.find_clients)
        self._sessions = transactions.BatchLoader(self._begin_sessions)
        self._cache: OrderedDict[str, ClientRecord] = OrderedDict()
        self._num_changes = 0
        self._num_calls: Counter[str] = Counter()
        self._updated = RecentEntries(UPDATE_EVERY_S, CACHE_SIZE)
        self.last_seen_unix_s: dict[str, float] = {}
        self._newly_seen: dict[str, float] = {}
        self._offers: OrderedDict[str, Offer] = OrderedDict()

    def record_offer(self, client_id: str, offer: Offer) -> None:
        """Remember what a client offers at a check-in."""
        self._offers[client_id] = offer
        self._offers.move_to_end(client_id)
        while len(self._offers) > CACHE_SIZE:
            self._offers.popitem(last=False)

    def find_offer(self, client_id: str) -> Offer:
        """Return what a client offered last; nothing if it has not checked in since the server started."""
        return self._offers.get(client_id, Offer())

    async def find(self, client_id: str) -> ClientRecord:
        """Return the client. Raises `RefusedError` if it is unknown or revoked."""
        record = await self._load(client_id)
        if record is None:
            raise RefusedError(Code.CLIENT_UNKNOWN)
        if record.revoked_unix_s is not None:
            raise RefusedError(Code.REVOKED)
        return record

    async def find_all(self, client_ids: Iterable[str]) -> dict[str, ClientRecord]:
        """Return these clients by id, also revoked ones; unknown ones are left out."""
        records = await asyncio.gather(*map(self._load, client_ids))
        return {record.client_id: record for record in records if record is not None}

    async def _load(self, client_id: str) -> ClientRecord | None:
        record = self._cache.get(client_id)
        if record is None:
            before = self._num_changes
            record = await self._records.load(client_id)
            if record is not None and before == self._num_changes:  # else it may have changed since it was read
                self._remember(record)
        return record

    def has_open_call(self, client_id: str) -> bool:
        """Return whether a call of the client is open, such as a long poll."""
        return self._num_calls[client_id] > 0

    async def list_able(self, job: JobState, client_ids: Iterable[str]) -> list[str]:
        """Return those of some clients that a job may have train, in the order of their enrollment.

        Clients that are unknown or revoked are left out.
        """
        is_eligible = compile_expression(job.spec.selection.where)
        found: list[ClientRecord] = []
        for client_id in client_ids:
            with contextlib.suppress(RefusedError):
                found.append(await self.find(client_id))
        able = [each for each in found if each.population == job.spec.population and is_eligible(each.labels)]
        return [each.client_id for each in sorted(able, key=lambda each: (each.enrolled_unix_s, each.client_id))]

    async def begin_session(self, client_id: str) -> ClientRecord:
        """Store a new session number for a client; return the client. Raises `RefusedError` if it is unknown."""
        record = await self._sessions.load(client_id)
        if record is None:
            raise RefusedError(Code.CLIENT_UNKNOWN)
        return record

    async def _begin_sessions(self, client_ids: Sequence[str]) -> Mapping[str, ClientRecord]:
        records = await self._clients.begin_sessions(client_ids)
        for record in records.values():
            self.replace(record)
        return records

    def replace(self, record: ClientRecord) -> None:
        """Cache a client's record that was just stored."""
        self._num_changes += 1
        self._remember(record)

    def record_call(self, client_id: str) -> None:
        """Record the current time as when the client was last seen."""
        self.last_seen_unix_s[client_id] = self._newly_seen[client_id] = time.time()

    def drain_last_seen(self) -> Mapping[str, float]:
        """Return the clients seen since the last call of this method, with the times (unix seconds)."""
        seen, self._newly_seen = self._newly_seen, {}
        return seen

    def begin_call(self, client_id: str, limit: int) -> Callable[[], None]:
        """Count a call that begins; return a function to call at its end.

        Raises `RefusedError` if the client has `limit` calls open.
        """
        if self._num_calls[client_id] >= limit:
            raise RefusedError(Code.TOO_MANY_CALLS, f"at most {limit}")
        self._num_calls[client_id] += 1

        def end() -> None:
            self._num_calls[client_id] -= 1
            if not self._num_calls[client_id]:
                del self._num_calls[client_id]

        return end

    async def update(self, record: ClientRecord, labels: Mapping[str, str], software_version: str) -> ClientRecord:
        """Return the client with the labels and version that it reports, and store them if they changed.

        Stores at most once a minute; a change in between is stored at the first check-in afterwards. So a client that
        changes its labels each time costs one transaction a minute, and is still selected by its latest labels.
        """
        if dict(labels) == dict(record.labels) and software_version == record.software_version:
            return record
        if not self._updated.add(record.client_id, time.monotonic()):
            return dataclasses.replace(record, labels=dict(labels), software_version=software_version)
        before = self._num_changes
        await self._clients.update_client(record.client_id, labels, software_version)
        changed = dataclasses.replace(record, labels=dict(labels), software_version=software_version)
        if before == self._num_changes:
            self.replace(changed)
        else:
            self._cache.pop(record.client_id, None)  # it may have been revoked meanwhile
        return changed

    def _remember(self, record: ClientRecord) -> None:
        self._cache[record.client_id] = record
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)


MAX_USES = 1_000_000
MAX_EXPIRES_S = 366 * 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Newcomer:
    """An enrollment request of a device."""

    population: str
    labels: Mapping[str, str]
    software_version: str
    idempotency_key: str
    token: str
    public_key: bytes


@dataclasses.dataclass(frozen=True)
class Trust:
    """How clients reach and authenticate this server: the fields of the same names in `fedplat.wire.auth.Ticket`."""

    tls: bool = False
    ca: str = ""
    http: str = ""

    @classmethod
    def of(cls, certificates: Certificates | None, http: str = "") -> Trust:
        """Return the settings for a server with these certificates (None: without TLS)."""
        if certificates is None:
            return cls(http=http)
        return cls(tls=True, ca=(certificates.loaded.ca or b"").decode(), http=http)


class Enrollments:
    """Creates and revokes tokens, and enrolls clients with them. All methods raise `RefusedError`."""

    def __init__(self, clients: ClientStore, directory: ClientDirectory, trust: Callable[[], Trust]) -> None:
        self._clients = clients
        self._directory = directory
        self._trust = trust

    async def create(
        self, population: str, num_uses: int, expires_s: float, address: str, actor: str
    ) -> tuple[EnrollmentToken, Ticket]:
        """Create a token; return it with its ticket. `actor` is the operator for the audit log."""
        if not 1 <= num_uses <= MAX_USES:
            raise RefusedError(Code.INVALID_REQUEST, f"{num_uses} uses; expected 1 to {MAX_USES}")
        if not (math.isfinite(expires_s) and 0 < expires_s <= MAX_EXPIRES_S):
            raise RefusedError(Code.INVALID_REQUEST, f"expires in {expires_s:g} s; expected up to {MAX_EXPIRES_S:g}")
        secret, token_hash = new_token()
        now, trust = time.time(), self._trust()
        token = EnrollmentToken(f"e-{uuid4().hex[:12]}", population, num_uses, num_uses, now, now + expires_s)
        entry = AuditEntry(
            actor, AuditAction.ENROLLMENT_CREATED, token.token_id, {"population": population, "uses": num_uses}
        )
        await self._clients.add_enrollment_token(token, token_hash, [entry])
        return token, Ticket(address, population, secret, trust.tls, trust.ca, trust.http)

    async def revoke(self, token_id: str, actor: str) -> EnrollmentToken:
        """Revoke a token; return it."""
        token = await self._clients.revoke_enrollment_token(
            token_id, [AuditEntry(actor, AuditAction.ENROLLMENT_REVOKED, token_id)]
        )
        if token is None:
            raise RefusedError(Code.NO_SUCH_ENROLLMENT, token_id)
        return token

    async def enroll(self, newcomer: Newcomer) -> ClientRecord:
        """Enroll a client that has proven its key; a client that enrolls again keeps its id."""
        enrollment = Enrollment(
            client_id=f"c-{uuid4().hex[:16]}",
            population=newcomer.population,
            labels=newcomer.labels,
            software_version=newcomer.software_version,
            public_key=newcomer.public_key,
            token_hash=hash_secret(newcomer.token),
            idempotency_key=newcomer.idempotency_key,
        )
        try:
            record = await self._clients.enroll(enrollment, _audit_enrollment)
        except TokenRefusedError as exc:
            if not exc.is_known:
                raise RefusedError(Code.TOKEN_UNKNOWN) from exc
            raise RefusedError(Code.TOKEN_REFUSED, str(exc)) from exc
        except EnrollmentConflictError as exc:
            raise RefusedError(Code.INVALID_REQUEST, str(exc)) from exc
        if record.revoked_unix_s is not None:
            raise RefusedError(Code.REVOKED)
        self._directory.replace(record)
        return record


def _audit_enrollment(client: ClientRecord) -> list[AuditEntry]:
    details = {"population": client.population, "enrollment": client.token_id}
    return [AuditEntry(client.client_id, AuditAction.CLIENT_ENROLLED, client.client_id, details)]


def hash_secret(secret: str) -> bytes:
    """Return the hash that the database stores of a token. Tokens are random, so a plain hash is enough."""
    return sha256(secret.encode()).digest()


def new_token() -> tuple[str, bytes]:
    """Return a new secret of 256 random bits, and its hash."""
    secret = secrets.token_urlsafe(32)
    return secret, hash_secret(secret)


def new_id(kind: str) -> str:
    """Return a new random id of a job ("j"), a webhook ("w") or something else."""
    return f"{kind}-{uuid4().hex[:12]}"
