"""Sessions of clients that sign their calls. They are only in memory: after a server restart, clients open new ones."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from fedplat_server.auth.replay_window import ReplayWindow

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
