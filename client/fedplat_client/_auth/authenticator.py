"""Client authentication by signed calls, in a session that the client opens with its key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from fedplat import wire
from fedplat.wire import auth
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import cancellation, errors
from fedplat_client._state.data_dir import SigningKey
from fedplat_client.transport import Metadata, Method, Response, result

_CHALLENGE = Method("GetChallenge", fleet_pb2.GetChallengeResponse)
_OPEN = Method("OpenSession", fleet_pb2.OpenSessionResponse)


@dataclass(frozen=True)
class CallCredentials:
    """The credentials of one call: a channel, metadata, the session that they belong to, and when the call began."""

    channel: grpc.Channel
    metadata: Metadata
    session_id: str = ""
    began_at: float = 0.0


class Access(Protocol):
    """A method of authentication."""

    def authenticate(self, method: str, request: bytes, signal: cancellation.StopSignal) -> CallCredentials:
        """Return credentials for a call. Raises `CallError`, or `Cancelled` if the signal is set."""
        ...

    def may_try_again(self, used: CallCredentials, exc: errors.CallError) -> bool:
        """Return whether a failed call may be repeated at once, with other credentials."""
        ...


class SignedAccess:
    """Signs every call; works also behind a proxy that terminates TLS. `client_id` is set by the enrollment.

    `on_session` is called with the client's id when the server has opened a session.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        key: SigningKey,
        timeout_s: float,
        on_session: Callable[[str], None] = lambda client_id: None,
    ) -> None:
        self.client_id = ""
        self._on_session = on_session
        self._channel = channel
        self._key = key
        self._timeout_s = timeout_s
        self._signer = Signer(key)

    @property
    def public_key(self) -> bytes:
        """The public key that the server identifies the client by."""
        return self._key.public

    def authenticate(self, method: str, request: bytes, signal: cancellation.StopSignal) -> CallCredentials:
        """Return credentials for a call; open a session if necessary."""
        use = self._signer.use(method, request, lambda: self._open_session(signal))
        return CallCredentials(self._channel, use.metadata, use.session_id)

    def may_try_again(self, used: CallCredentials, exc: errors.CallError) -> bool:
        """Return whether a failed call may be repeated at once, in another session."""
        if isinstance(exc, errors.SessionLostError):
            self._signer.forget(used.session_id)
            return True
        # FENCED does not mean a rival if this process opened a newer session while the call was in flight.
        return isinstance(exc, errors.FencedError) and not self._signer.is_current(used.session_id)

    def prove(self, method: Method[Response], request: bytes, signal: cancellation.StopSignal) -> Response:
        """Make a call that proves possession of the key. Raises `CallError`."""
        challenge = fleet_pb2.GetChallengeRequest(protocol_version=wire.PROTOCOL_VERSION).SerializeToString()
        nonce = result(_CHALLENGE.start(self._channel, challenge, self._timeout_s, ()), signal).nonce
        metadata = sign_challenge(self._key, method.path, nonce, request)
        return result(method.start(self._channel, request, self._timeout_s, metadata), signal)

    def _open_session(self, signal: cancellation.StopSignal) -> str:
        request = fleet_pb2.OpenSessionRequest(client_id=self.client_id, protocol_version=wire.PROTOCOL_VERSION)
        session_id = self.prove(_OPEN, request.SerializeToString(), signal).session_id
        self._on_session(self.client_id)
        return session_id


@dataclass(frozen=True)
class SessionUse:
    """One call's metadata, and the id of the session that signed it."""

    session_id: str
    metadata: Metadata


class Signer:
    """Signs calls; thread-safe."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._opening = threading.Lock()
        self._session_id = ""
        self._counter = 0

    def use(self, method: str, request: bytes, open_session: Callable[[], str]) -> SessionUse:
        """Sign a serialized request with a counter that no other call of the session has.

        `open_session` requests a session from the server; of several threads that need one, only one calls it.
        """
        with self._opening:
            if not self._session_id:
                self._session_id, self._counter = open_session(), 0
            self._counter += 1
            session_id, counter = self._session_id, self._counter
        payload = auth.call_payload(method, session_id, counter, request)
        return SessionUse(
            session_id,
            (
                (auth.METADATA_SESSION, session_id),
                (auth.METADATA_COUNTER, str(counter)),
                (auth.METADATA_SIGNATURE, self._key.sign(payload)),
            ),
        )

    def is_current(self, session_id: str) -> bool:
        """Return whether the next call would use this session."""
        return self._session_id == session_id

    def forget(self, session_id: str) -> None:
        """Let the next call open another session, unless that has happened already."""
        with self._opening:
            if self._session_id == session_id:
                self._session_id = ""


def sign_challenge(key: SigningKey, method: str, nonce: bytes, request: bytes) -> Metadata:
    """Return the metadata that proves possession of the key, by a signature that covers the server's nonce."""
    signature = key.sign(auth.proof_payload(method, nonce, request))
    return (auth.METADATA_NONCE, nonce), (auth.METADATA_SIGNATURE, signature)
