"""Authentication of clients: by the certificate of their connection, or by a signature on each call of a session.

A nonce is a timestamp, 16 random bytes and a MAC over both, so that issuing millions costs the server no memory. It
only remembers used nonces, until they expire. Times are seconds of a monotonic clock.

The window is that of IPsec's anti-replay service (RFC 4303, section 3.4.3): numbers below it are refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedplat.wire import auth
from fedplat_server.auth import client_directory, rate_limits
from fedplat_server.database.records import ClientRecord
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

    def __init__(self, audit: rate_limits.BoundedAudit, directory: client_directory.ClientDirectory) -> None:
        self._audit = audit
        self._directory = directory
        self._sessions = Sessions()
        self._fenced = rate_limits.RecentEntries()
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


CHALLENGE_VALID_S = 120.0
MAX_USED_CHALLENGES = 100_000
RANDOM_BYTES = 16
_TIME_BYTES = 8
_MAC_BYTES = 32
_SIZE = _TIME_BYTES + RANDOM_BYTES + _MAC_BYTES


class Challenges:
    """Issues nonces and accepts each once. `key`: the MAC's key, 32 random bytes that only this process has."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._used: OrderedDict[bytes, int] = OrderedDict()
        self._floor_ms = 0

    def new(self, now: float, random: bytes) -> bytes:
        """Return a nonce made from `RANDOM_BYTES` random bytes."""
        body = int(now * 1000).to_bytes(_TIME_BYTES, "big") + random
        return body + self._mac(body)

    def redeem(self, nonce: bytes, now: float) -> bool:
        """Use up a nonce; return whether this server issued it and it is neither expired nor used."""
        body, mac = nonce[:-_MAC_BYTES], nonce[-_MAC_BYTES:]
        if len(nonce) != _SIZE or not hmac.compare_digest(mac, self._mac(body)):
            return False
        made_ms, now_ms = int.from_bytes(body[:_TIME_BYTES], "big"), int(now * 1000)
        self._forget(now_ms)
        if made_ms < max(self._floor_ms, now_ms - CHALLENGE_VALID_S * 1000) or body in self._used:
            return False
        self._used[body] = made_ms
        if len(self._used) > MAX_USED_CHALLENGES:
            # A nonce that is forgotten here could be used again: refuse all that are as old.
            _, oldest_ms = self._used.popitem(last=False)
            self._floor_ms = max(self._floor_ms, oldest_ms + 1)
        return True

    def _forget(self, now_ms: int) -> None:
        while self._used and next(iter(self._used.values())) < now_ms - CHALLENGE_VALID_S * 1000:
            self._used.popitem(last=False)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")


SIZE = 1024
"""How far behind the newest call a call may be. A client has far fewer calls under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayWindow:
    """The highest number seen, and a bit set of the `SIZE` numbers up to it that were seen (bit 0: the highest)."""

    highest: int = 0
    seen: int = 1  # no call has the number 0

    def accept(self, number: int) -> ReplayWindow | None:
        """Return the window with this number added; None if the number was seen, or is below the window."""
        if number > self.highest:
            shift = number - self.highest
            kept = (self.seen << shift) & _MASK if shift < SIZE else 0
            return ReplayWindow(number, kept | 1)
        age = self.highest - number
        if number < 0 or age >= SIZE or self.seen >> age & 1:
            return None
        return ReplayWindow(self.highest, self.seen | 1 << age)


_MASK = (1 << SIZE) - 1


MAX_SESSIONS = 100_000
MAX_OF_CLIENT = 4
"""Limit per client, so that no client can evict the sessions of others."""


@dataclasses.dataclass(slots=True)
class Session:
    """The `number`-th session of a client."""

    client_id: str
    number: int
    window: ReplayWindow = dataclasses.field(default_factory=ReplayWindow)


class Sessions:
    """The open sessions; beyond `max_sessions`, the least recently used one is dropped."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._of_client: dict[str, list[str]] = {}

    def open(self, session_id: str, client_id: str, number: int) -> None:
        """Add a session. The client's older ones stay, so that calls under them are refused as fenced."""
        self._sessions[session_id] = Session(client_id, number)
        own_ids = self._of_client.setdefault(client_id, [])
        own_ids.append(session_id)
        if len(own_ids) > MAX_OF_CLIENT:
            self._forget(own_ids[0])
        if len(self._sessions) > self._max_sessions:
            self._forget(next(iter(self._sessions)))

    def find(self, session_id: str) -> Session | None:
        """Return the session with this id; None if it is unknown."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._sessions.move_to_end(session_id)
        return session

    def _forget(self, session_id: str) -> None:
        client_id = self._sessions.pop(session_id).client_id
        self._of_client[client_id].remove(session_id)
        if not self._of_client[client_id]:
            del self._of_client[client_id]
