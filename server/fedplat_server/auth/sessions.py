"""Sessions: what a client that signs its calls has opened. They live in memory: after a restart a client opens anew."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from fedplat_server.auth.replay_window import ReplayWindow

MAX_SESSIONS = 100_000
MAX_OF_CLIENT = 4
"""Sessions of one client that are remembered, so that no client makes the server forget those of others."""


@dataclasses.dataclass(slots=True)
class Session:
    """A session: the `number`-th of its client."""

    client_id: str
    number: int
    window: ReplayWindow = dataclasses.field(default_factory=ReplayWindow)


class Sessions:
    """The sessions that are known; of too many, the one that was quiet the longest is forgotten."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._of_client: dict[str, list[str]] = {}

    def open(self, session_id: str, client_id: str, number: int) -> None:
        """Begins a session under a random id. Older ones of the client stay, so that they hear that they are fenced."""
        self._sessions[session_id] = Session(client_id, number)
        mine = self._of_client.setdefault(client_id, [])
        mine.append(session_id)
        if len(mine) > MAX_OF_CLIENT:
            self._forget(mine[0])
        if len(self._sessions) > self._max_sessions:
            self._forget(next(iter(self._sessions)))

    def find(self, session_id: str) -> Session | None:
        """The session with this id."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._sessions.move_to_end(session_id)
        return session

    def _forget(self, session_id: str) -> None:
        client_id = self._sessions.pop(session_id).client_id
        self._of_client[client_id].remove(session_id)
        if not self._of_client[client_id]:
            del self._of_client[client_id]
