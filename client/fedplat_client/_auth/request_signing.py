"""Signed calls: this process's session with the server, and the metadata that every call carries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from fedplat.wire import auth
from fedplat_client._state.keys import SigningKey
from fedplat_client.transport import Metadata


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
