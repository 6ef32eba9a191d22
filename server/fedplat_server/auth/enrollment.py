"""Enrollment: operators create tokens, with which devices become clients."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from uuid import uuid4

from fedplat.wire.auth import Ticket
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.tls import Certificates
from fedplat_server.database.clients import ClientRecord, Enrollment, EnrollmentToken
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.errors import Code, EnrollmentConflictError, RefusedError, TokenRefusedError
from fedplat_server.records.audit import AuditAction, AuditEntry

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
    """How clients authenticate this server: the fields of the same names in `fedplat.wire.auth.Ticket`."""

    tls: bool = False
    ca: str = ""

    @classmethod
    def of(cls, certificates: Certificates | None) -> Trust:
        """Return the trust settings for a server with these certificates (None: without TLS)."""
        if certificates is None:
            return cls()
        return cls(tls=True, ca=(certificates.loaded.ca or b"").decode())


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
        return token, Ticket(address, population, secret, trust.tls, trust.ca)

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
