"""Signed calls: the session of this process with the server, and the metadata that every call carries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from fedplat import auth
from fedplat_client._state.keys import SigningKey
from fedplat_client.transport import Metadata


@dataclass(frozen=True)
class SessionUse:
    """One call's use of a session: what it must send, and which session that was."""

    session_id: str
    metadata: Metadata


class Signer:
    """Signs calls, from any thread."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._opening = threading.Lock()
        self._session_id = ""
        self._counter = 0

    def use(self, method: str, request: bytes, open_session: Callable[[], str]) -> SessionUse:
        """Signs a request as it will be sent, with a number that no other call has.

        `open_session` asks the server for a session; of several threads that need one, one asks.
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
        """Whether a call that was made now would use this session."""
        return self._session_id == session_id

    def forget(self, session_id: str) -> None:
        """Lets the next call open another session, unless that has happened already."""
        with self._opening:
            if self._session_id == session_id:
                self._session_id = ""


def proof(key: SigningKey, method: str, nonce: bytes, request: bytes) -> Metadata:
    """The metadata of a call that proves the possession of the key over a nonce of the server."""
    signature = key.sign(auth.proof_payload(method, nonce, request))
    return (auth.METADATA_NONCE, nonce), (auth.METADATA_SIGNATURE, signature)
