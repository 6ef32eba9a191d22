"""Who makes a call: the owner of a client certificate, or the owner of the key that signed it."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedplat import auth
from fedplat_server.auth.audit_limits import BoundedAudit, RecentEntries
from fedplat_server.auth.challenges import RANDOM_BYTES, Challenges
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.sessions import Session, Sessions
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records.audit import SERVER, AuditAction, AuditEntry


@dataclasses.dataclass(frozen=True, slots=True)
class ClientCall:
    """What is known of a call before anything of it is believed; `request` is its first message as it came.

    `certified`: the client whose certificate its connection shows, and the number of the session that it got it in, as
    `<id>/<number>`, which TLS has proven ("": it shows none).
    """

    method: str
    metadata: Mapping[str, str | bytes]
    request: bytes
    certified: str = ""

    def binary(self, name: str) -> bytes:
        """A binary value of the metadata; empty if there is none."""
        value = self.metadata.get(name, b"")
        return value if isinstance(value, bytes) else b""

    def text(self, name: str) -> str:
        """A text of the metadata; empty if there is none."""
        value = self.metadata.get(name, "")
        return value if isinstance(value, str) else ""


class Authenticator:
    """Tells who calls, and opens sessions. Raises `RefusedError` for everybody else."""

    def __init__(self, audit: BoundedAudit, book: ClientDirectory) -> None:
        self._audit = audit
        self._book = book
        self._sessions = Sessions()
        self._fenced = RecentEntries()
        self._challenges = Challenges(secrets.token_bytes(32))

    def challenge(self) -> bytes:
        """A nonce for whoever wants to prove the possession of a key."""
        return self._challenges.new(_now(), secrets.token_bytes(RANDOM_BYTES))

    def require_proof(self, call: ClientCall, public_key: bytes) -> None:
        """Lets a call pass that was signed with the private key, over a nonce of ours that is used up by this."""
        _verify(public_key, call, self._proof_payload(call))

    async def prove(self, call: ClientCall, client_id: str) -> None:
        """Lets a call pass that a client makes who proves its key."""
        payload = self._proof_payload(call)
        client = await self._book.find(client_id)
        _verify(client.public_key, call, payload)

    def _proof_payload(self, call: ClientCall) -> bytes:
        """What a proof signs. The nonce goes first: so each that was given costs one look-up and one check at most."""
        nonce = call.binary(auth.METADATA_NONCE)
        if not self._challenges.take(nonce, _now()):
            raise RefusedError(Code.CHALLENGE_EXPIRED)
        return auth.proof_payload(call.method, nonce, call.request)

    async def open_session(self, client_id: str) -> str:
        """Begins a session of a client that has proven its key, and returns its id; earlier ones are fenced by it."""
        record = await self._book.begin_session(client_id)
        session_id = secrets.token_urlsafe(24)
        self._sessions.open(session_id, client_id, record.session_number)
        self._book.record_call(client_id)
        return session_id

    def read_claim(self, call: ClientCall) -> str:
        """Return the client that a call names, before its message is there; `authenticate` proves it afterwards."""
        return call.certified.rpartition("/")[0] or self._session(call)[0].client_id

    async def authenticate(self, call: ClientCall) -> ClientRecord:
        """The client that makes a call; what else one says that shows a certificate does not matter."""
        if not call.certified:
            return await self.authenticate_by_key(call)
        client_id, _, number = call.certified.rpartition("/")
        client = await self._book.find(client_id)
        await self._refuse_fenced(client, int(number))
        self._book.record_call(client.client_id)
        return client

    async def authenticate_by_key(self, call: ClientCall) -> ClientRecord:
        """The client that has signed a call, whatever its connection shows."""
        client = await self._by_session(call)
        self._book.record_call(client.client_id)
        return client

    async def _by_session(self, call: ClientCall) -> ClientRecord:
        session, session_id, counter = self._session(call)
        client = await self._book.find(session.client_id)
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
        """Refuse calls under an older session than the latest, and note that once an hour for each client.

        Then two places use one key: a restarted client does not speak under its old session again.
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
