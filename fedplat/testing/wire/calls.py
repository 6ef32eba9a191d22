"""The checks of every call of a client: its form, its signature, and when it comes.

What is against the protocol is a sentence in `problems`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from fedplat import texts, wire
from fedplat.testing.wire.script import Window
from fedplat.wire import auth
from fedplat.wire.v1 import fleet_pb2

STATUSES: Mapping[str, str] = {
    "BAD_SIGNATURE": "UNAUTHENTICATED",
    "CHALLENGE_EXPIRED": "UNAUTHENTICATED",
    "CLIENT_UNKNOWN": "UNAUTHENTICATED",
    "DRAINING": "UNAVAILABLE",
    "FENCED": "PERMISSION_DENIED",
    "INVALID_REQUEST": "INVALID_ARGUMENT",
    "NO_SUCH_MODEL": "NOT_FOUND",
    "REPLAYED": "UNAUTHENTICATED",
    "REVOKED": "PERMISSION_DENIED",
    "SESSION_UNKNOWN": "UNAUTHENTICATED",
    "STALE_ASSIGNMENT": "NOT_FOUND",
    "STORE_UNAVAILABLE": "UNAVAILABLE",
    "TOKEN_REFUSED": "PERMISSION_DENIED",
    "TOO_MANY_UPLOADS": "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    "UNSUPPORTED_VERSION": "FAILED_PRECONDITION",
    "UPLOAD_INCOMPLETE": "ABORTED",
    "WRONG_OFFSET": "OUT_OF_RANGE",
}
"""The status of each error code that the cases use."""
SERVICE = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]
PATH = f"/{SERVICE.full_name}/"
POPULATION, SECRET = "conformance", "c2VjcmV0LW9mLXRoZS1jb25mb3JtYW5jZS1raXQ"
MAX_CALLS = 2000
"""A client that makes more calls in a case is in a loop."""
FINAL = frozenset({"FENCED", "REVOKED", "TOKEN_REFUSED", "UNSUPPORTED_VERSION"})
"""The codes after which a client ends."""
_PROOFS = frozenset({"Enroll", "OpenSession"})
_SPARE_S = 0.01
NAME = re.compile(texts.NAME_PATTERN)
_REQUESTS: Mapping[str, Any] = {
    each.name: getattr(fleet_pb2, each.input_type.name) for each in SERVICE.methods if each.name != "Step"
}


class Request(NamedTuple):
    """A call as it arrived over a transport, at a time in seconds."""

    method: str
    metadata: Mapping[str, str | bytes]
    """Values of names that end with `-bin` are bytes."""
    message: bytes
    """The serialized message that is signed; of an upload, the first one."""
    at_s: float
    octets: bytes = b""
    """What an upload has sent."""
    misfit: str = ""
    """What is wrong with the call as this transport has it."""

    def text(self, name: str) -> str:
        """Return a value of the metadata that is text; empty if it is absent."""
        value = self.metadata.get(name, "")
        return value if isinstance(value, str) else ""

    def binary(self, name: str) -> bytes:
        """Return a value of the metadata that is bytes; empty if it is absent."""
        value = self.metadata.get(name, b"")
        return value if isinstance(value, bytes) else b""


class RefusedCallError(Exception):
    """The server refuses a call."""

    def __init__(self, code: str, text: str = "", retry: Window | None = None) -> None:
        super().__init__(text or code)
        self.code, self.retry = code, retry


class CallChecks:
    """The checks of the calls of one case, and the identity and the sessions of its client."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.ended_by = ""
        """The code after which the client must make no more calls."""
        self.not_before: dict[str, tuple[float, str]] = {}
        """The time before which a method must not be called, and the method whose answer has the window."""
        self.identity: tuple[str, bytes] | None = None
        """The idempotency key and the public key of the enrollment."""
        self.nonces: dict[bytes, bytes] = {}
        """The signature over each nonce; empty: none yet."""
        self._sessions: dict[str, dict[int, bytes]] = {}
        self._session = ""

    def open_session(self, session_id: str) -> None:
        """Open a session, which ends the ones before."""
        self._session = session_id
        self._sessions[session_id] = {}

    def lose_session(self, session_id: str) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)

    def note(self, problem: str) -> None:
        """Add a problem."""
        if problem not in self.problems:
            self.problems.append(problem)

    def require(self, condition: object, problem: str, code: str = "INVALID_REQUEST") -> None:
        """Add a problem and refuse the call, unless the condition holds."""
        if not condition:
            self.note(problem)
            raise RefusedCallError(code, problem)

    def check_form(self, request: Request) -> None:
        """Check the method, the form and the size of a call."""
        method, size = request.method, len(request.message)
        self.require(method in _REQUESTS, f"the client calls {method}, which this protocol does not need")
        self.require(not request.misfit, request.misfit)
        limit = {"Report": wire.INLINE_BYTES + 2**17, "Enroll": 2**16, "OpenSession": 2**10, "GetChallenge": 2**10}
        allowed = limit.get(method, 2**17)
        self.require(size <= allowed, f"{method} has {size} bytes; at most {allowed}")

    def check_time(self, request: Request) -> None:
        """Check that a call comes when it may."""
        if self.ended_by:
            self.note(f"the client calls {request.method} after the refusal {self.ended_by}; expected that it ends")
        earliest, method = self.not_before.get(request.method, (0.0, ""))
        early_s = earliest - request.at_s
        self.require(
            early_s <= _SPARE_S,
            f"the client calls {request.method} {early_s:.2f} s before the retry window of {method} begins",
        )

    def read(self, request: Request) -> Any:
        """Return the message of a call, whose signature is that of the client."""
        method, data = request.method, request.message
        try:
            message: Message = _REQUESTS[method].FromString(data)
        except DecodeError:
            self.require(False, f"the request of {method} is not a message of the protocol")
            raise AssertionError from None
        self.require(not len(UnknownFieldSet(message)), f"{method} has fields that the protocol does not have")
        if method in _PROOFS:
            self._check_proof(request, message)
        elif method != "GetChallenge":
            self._check_call(request)
        return message

    def _check_proof(self, request: Request, message: Any) -> None:
        method, nonce = request.method, request.binary(auth.METADATA_NONCE)
        signature = request.binary(auth.METADATA_SIGNATURE)
        used = self.nonces.get(nonce)
        is_known = used is not None and used in (b"", signature)
        self.require(is_known, f"{method} has a nonce that was not issued, or was used before", "CHALLENGE_EXPIRED")
        if used:  # a repeated request, as in `_check_call`
            raise RefusedCallError("CHALLENGE_EXPIRED")
        self.nonces[nonce] = signature
        key: bytes = self.identity[1] if self.identity and method == "OpenSession" else b""
        if method == "Enroll":
            key = message.public_key
        self.require(len(key) == 32, f"{method} has no Ed25519 key of 32 bytes")
        self._verify(request, key, auth.proof_payload(PATH + method, nonce, request.message))

    def _check_call(self, request: Request) -> None:
        method, session = request.method, request.text(auth.METADATA_SESSION)
        text = request.text(auth.METADATA_COUNTER)
        self.require(session and re.fullmatch("[1-9][0-9]{0,18}", text), f"{method} has no session or no counter")
        if session not in self._sessions:
            raise RefusedCallError("SESSION_UNKNOWN")
        counter, used = int(text), self._sessions[session]
        assert self.identity is not None
        self._verify(request, self.identity[1], auth.call_payload(PATH + method, session, counter, request.message))
        signature = request.binary(auth.METADATA_SIGNATURE)
        if counter in used:  # a transport may repeat a request whose connection has broken, but never sign another one
            same = used[counter] == signature
            self.require(same, f"{method} uses the counter {counter} a second time", "REPLAYED")
            raise RefusedCallError("REPLAYED")
        used[counter] = signature
        if session != self._session:
            raise RefusedCallError("SESSION_UNKNOWN")

    def _verify(self, request: Request, key: bytes, payload: bytes) -> None:
        signature = request.binary(auth.METADATA_SIGNATURE)
        self.require(signature, f"{request.method} has no signature", "UNAUTHENTICATED")
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, payload)
        except (InvalidSignature, ValueError):
            text = f"{request.method} has a signature that is not that of the key over this call"
            self.require(False, text, "BAD_SIGNATURE")

    def check_version(self, method: str, message: Any) -> None:
        """Check the version of the protocol in a message."""
        version = message.protocol_version
        self.require(version == wire.PROTOCOL_VERSION, f"{method} has the protocol version {version}; expected 1")
