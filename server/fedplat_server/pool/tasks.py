"""A work as something that can be left and taken up again: a thread that runs only while somebody waits for it.

So one rank has several works open at a time, as attempts of several jobs collect reports, and they never run at once:
all ranks do the same steps in the same order, which collectives need. A long work lets others have their turn whenever
it tells how far it is.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue


class CancelledError(Exception):
    """The daemon does not want the work any more; raised where the work waits for its next message."""


class Pause(enum.Enum):
    """Why a work is not done yet: it waits for its next message, or lets others have their turn."""

    WAITS = enum.auto()
    YIELDS = enum.auto()


class Task:
    """One open work. Each step returns its result once it is done, or why it is not; and raises what the work raises.

    It runs up to where it waits for its first message, or calls `pause`.
    """

    def __init__(self, name: str, run: Callable[[Iterator[bytes]], bytes]) -> None:
        self._run = run
        self._given: SimpleQueue[bytes | Pause | CancelledError | None] = SimpleQueue()
        self._said: SimpleQueue[Pause | bytes | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> bytes | Pause:
        """Begins."""
        self._thread.start()
        return self._heard()

    def give(self, message: bytes) -> bytes | Pause:
        """Gives it the message that it waits for."""
        return self._go_on(message)

    def end(self) -> bytes | Pause:
        """Tells it that no more messages come."""
        return self._go_on(None)

    def resume(self) -> bytes | Pause:
        """Lets it go on after it has let others have their turn."""
        return self._go_on(Pause.YIELDS)

    def pause(self) -> None:
        """Lets others have their turn; for the work itself. Raises `CancelledError`."""
        self._said.put(Pause.YIELDS)
        if isinstance(given := self._given.get(), CancelledError):
            raise given

    def _go_on(self, given: bytes | Pause | None) -> bytes | Pause:
        self._given.put(given)
        return self._heard()

    def cancel(self) -> None:
        """Ends it where it is. Raises what it raises, but for `CancelledError`."""
        self._given.put(CancelledError())
        try:
            self._heard()
        except CancelledError:
            return

    def _heard(self) -> bytes | Pause:
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def _work(self) -> None:
        try:
            result = self._run(self._inbox())
        except BaseException as exc:  # a thread's boundary: whoever waits for the work hears of it
            self._said.put(exc)
        else:
            self._said.put(result)

    def _inbox(self) -> Iterator[bytes]:
        while True:
            self._said.put(Pause.WAITS)
            message = self._given.get()
            if isinstance(message, CancelledError):
                raise message
            if not isinstance(message, bytes):
                return
            yield message
