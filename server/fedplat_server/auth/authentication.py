"""Authentication of clients: by the certificate of their connection, or by a signature on each call."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedplat.wire import auth
from fedplat_server.auth.audit_limits import BoundedAudit, RecentEntries
from fedplat_server.auth.challenges import RANDOM_BYTES, Challenges
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.sessions import Session, Sessions
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records.audit import SERVER, AuditAction, AuditEntry


@dataclasses.dataclass(frozen=True, slots=True)
class ClientCall:
    """An unauthenticated call; `request` is its first message as received.

    `certified`: the client of the connection's certificate and the number of the session that it was issued in, as
    `<id>/<number>`, proven by TLS ("": the connection has no client certificate).
    """

    method: str
    metadata: Mapping[str, str | bytes]
    request: bytes
    certified: str = ""

    def binary(self, name: str) -> bytes:
        """Return a binary value of the metadata; empty if it is missing."""
        value = self.metadata.get(name, b"")
        return value if isinstance(value, bytes) else b""

    def text(self, name: str) -> str:
        """Return a text value of the metadata; empty if it is missing."""
        value = self.metadata.get(name, "")
        return value if isinstance(value, str) else ""


class Authenticator:
    """Authenticates clients and opens their sessions. Raises `RefusedError` for callers that it cannot authenticate."""

    def __init__(self, audit: BoundedAudit, directory: ClientDirectory) -> None:
        self._audit = audit
        self._directory = directory
        self._sessions = Sessions()
        self._fenced = RecentEntries()
        self._challenges = Challenges(secrets.token_bytes(32))

    def challenge(self) -> bytes:
        """Return a nonce, over which a caller can prove that it has a private key."""
        return self._challenges.new(_now(), secrets.token_bytes(RANDOM_BYTES))

    def require_proof(self, call: ClientCall, public_key: bytes) -> None:
        """Verify that a call is signed with the private key, over a nonce of this server; use up the nonce."""
        _verify(public_key, call, self._proof_payload(call))

    async def prove(self, call: ClientCall, client_id: str) -> None:
        """Verify that a call is signed with a client's key, over a nonce of this server; use up the nonce."""
        payload = self._proof_payload(call)
        client = await self._directory.find(client_id)
        _verify(client.public_key, call, payload)

    def _proof_payload(self, call: ClientCall) -> bytes:
        """Return the bytes that a proof signs.

        Uses up the nonce before all other checks: so each nonce costs one look-up and one verification at most.
        """
        nonce = call.binary(auth.METADATA_NONCE)
        if not self._challenges.redeem(nonce, _now()):
            raise RefusedError(Code.CHALLENGE_EXPIRED)
        return auth.proof_payload(call.method, nonce, call.request)

    async def open_session(self, client_id: str) -> str:
        """Open a session of a client that has proven its key; return the session id. Fences its earlier sessions."""
        record = await self._directory.begin_session(client_id)
        session_id = secrets.token_urlsafe(24)
        self._sessions.open(session_id, client_id, record.session_number)
        self._directory.record_call(client_id)
        return session_id

    def read_claim(self, call: ClientCall) -> str:
        """Return the client that a call claims to be; `authenticate` verifies that once its message has arrived."""
        return call.certified.rpartition("/")[0] or self._session(call)[0].client_id

    async def authenticate(self, call: ClientCall) -> ClientRecord:
        """Return the client that makes a call: that of its certificate if it has one, else the one that signed it."""
        if not call.certified:
            return await self.authenticate_by_key(call)
        client_id, _, number = call.certified.rpartition("/")
        client = await self._directory.find(client_id)
        await self._refuse_fenced(client, int(number))
        self._directory.record_call(client.client_id)
        return client

    async def authenticate_by_key(self, call: ClientCall) -> ClientRecord:
        """Return the client that signed a call; ignores the certificate of its connection."""
        client = await self._verify_session(call)
        self._directory.record_call(client.client_id)
        return client

    async def _verify_session(self, call: ClientCall) -> ClientRecord:
        session, session_id, counter = self._session(call)
        client = await self._directory.find(session.client_id)
        _verify(client.public_key, call, auth.call_payload(call.method, session_id, counter, call.request))
        await self._refuse_fenced(client, session.number)
        window = session.window.accept(counter)
        if window is None:
            raise RefusedError(Code.REPLAYED)
        session.window = window
        return client

    def _session(self, call: ClientCall) -> tuple[Session, str, int]:
        session_id, counter = call.text(auth.METADATA_SESSION), _counter(call)
        if not session_id or counter is None:
            raise RefusedError(Code.UNAUTHENTICATED)
        session = self._sessions.find(session_id)
        if session is None:
            raise RefusedError(Code.SESSION_UNKNOWN)
        return session, session_id, counter

    async def _refuse_fenced(self, client: ClientRecord, number: int) -> None:
        """Refuse calls under an older session than the client's latest; audit that once an hour per client.

        A restarted client never uses its old session again, so such a call means that two processes share one key.
        """
        if number >= client.session_number:
            return
        if self._fenced.add(client.client_id, _now()):
            try:
                await self._audit.append(
                    AuditEntry(SERVER, AuditAction.CLIENT_FENCED, client.client_id, {"session": number})
                )
            except BaseException:
                self._fenced.forget(client.client_id)
                raise
        raise RefusedError(Code.FENCED)


def _verify(public_key: bytes, call: ClientCall, payload: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(call.binary(auth.METADATA_SIGNATURE), payload)
    except (InvalidSignature, ValueError) as exc:
        raise RefusedError(Code.BAD_SIGNATURE) from exc


def _counter(call: ClientCall) -> int | None:
    text = call.text(auth.METADATA_COUNTER)
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        return None
    return number if 0 < (number := int(text)) <= auth.MAX_COUNTER else None


def _now() -> float:
    return asyncio.get_running_loop().time()
