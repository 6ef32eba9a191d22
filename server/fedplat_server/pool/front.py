"""Rank 0's side of the socket: takes works from the daemon in the order in which they come, and answers."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from pathlib import Path
from queue import SimpleQueue

from fedplat_server.pool import address, frames
from fedplat_server.pool.events import Event

CANCEL_S = 5.0
"""How long a work that nobody waits for any more may go on; then the ranks are started again."""


class Front:
    """Listens at a socket; `events` are what all connections say, one after the other."""

    def __init__(self, path: Path, hello: frames.Hello) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.running: int | None = None
        self._hello = frames.encoded(hello)
        self._numbers = itertools.count()
        self._connections: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        with address.short(path) as name:
            with contextlib.suppress(FileNotFoundError):  # what an earlier group left
                os.unlink(name)
            self._listener.bind(name)
            os.chmod(name, 0o600)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="front", daemon=True).start()

    def tell(self, work: int, frame: frames.Frame) -> None:
        """Tells whoever wants a work; nobody may be there any more."""
        with self._lock, contextlib.suppress(OSError):
            if (connection := self._connections.get(work)) is not None:
                connection.sendall(frames.encoded(frame))

    def finish(self, work: int, frame: frames.Frame) -> None:
        """Tells how a work has ended."""
        self.tell(work, frame)
        self._forget(work)

    def refuse_all(self, failure: frames.Refused) -> None:
        """Tells everybody that the ranks fail, and why."""
        for work in list(self._connections):
            self.finish(work, failure)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            work = next(self._numbers)
            with self._lock:
                self._connections[work] = connection
            threading.Thread(target=self._listen, args=(work, connection), name=f"work {work}", daemon=True).start()

    def _listen(self, work: int, connection: socket.socket) -> None:
        begun = False
        try:
            connection.sendall(self._hello)
            while True:
                match frames.receive(connection):
                    case frames.Begin(name, request, backend) if not begun:
                        begun = True
                        self.events.put(Event(work, "begin", request, name, backend))
                    case frames.Message(content) if begun:
                        self.events.put(Event(work, "message", content))
                    case frames.End() if begun:
                        self.events.put(Event(work, "end"))
                    case frame:
                        self.tell(work, frames.Refused(f"a {type(frame).__name__} was not expected now"))
                        break
        except OSError:
            pass  # the daemon is gone, or wants the work no more
        self._forget(work)
        if begun:
            self.events.put(Event(work, "cancel"))
            threading.Timer(CANCEL_S, self._break_off, (work,)).start()

    def _break_off(self, work: int) -> None:
        if self.running == work:
            os._exit(1)

    def _forget(self, work: int) -> None:
        with self._lock:
            connection = self._connections.pop(work, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
