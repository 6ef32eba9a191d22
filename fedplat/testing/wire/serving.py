"""What the ports of the scripted server, of HTTP/1.1 and of gRPC, have in common."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable

from fedplat.testing.wire.calls import Request
from fedplat.testing.wire.fleet import ScriptedAnswer, ScriptedFleet

_HELD_S = 2.0
"""How long an answer is held back at most: a case must not take longer."""


class ScriptedServer(abc.ABC):
    """Serves a fleet on the loopback. `changed` is notified after each call; `kill` ends the client's process."""

    def __init__(self, fleet: ScriptedFleet, kill: Callable[[], None]) -> None:
        self._fleet = fleet
        self._kill = kill
        self.changed = threading.Condition()
        self._is_closing = threading.Event()

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Its `host:port`."""

    @abc.abstractmethod
    def running(self) -> contextlib.AbstractContextManager[None]:
        """Serve within the block."""

    def take(self, request: Request) -> ScriptedAnswer:
        """Serve a call; return once its answer may be sent."""
        with self.changed:
            answer = self._fleet.take(request)
            if answer.kills:
                self._kill()
            self.changed.notify_all()
        if answer.hold_s:
            self._is_closing.wait(min(answer.hold_s, _HELD_S))
        return answer

    def octet_limit(self, method: str) -> int | None:
        """Return after how many octets of the next upload the connection breaks; None: it does not."""
        with self.changed:
            return self._fleet.octet_limit(method)
