"""A work as something that can be left and taken up again: a thread that runs only while somebody waits for it.

So one rank has several works open at a time, as attempts of several jobs collect reports, and they never run at once:
all ranks do the same steps in the same order, which collectives need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue


class CancelledError(Exception):
    """The daemon does not want the work any more; raised where the work waits for its next message."""


class _Waits:
    """A work says that it can go on with the next message only."""


class Task:
    """One open work. `start`, `give` and `end` return its result once it is done, and None as long as it waits."""

    def __init__(self, name: str, run: Callable[[Iterator[bytes]], bytes]) -> None:
        self._run = run
        self._given: SimpleQueue[bytes | CancelledError | None] = SimpleQueue()
        self._said: SimpleQueue[_Waits | bytes | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> bytes | None:
        """Runs it up to where it waits for its first message. Raises what it raises."""
        self._thread.start()
        return self._heard()

    def give(self, message: bytes) -> bytes | None:
        """Gives it the next message. Raises what it raises."""
        self._given.put(message)
        return self._heard()

    def end(self) -> bytes | None:
        """Tells it that no more messages come. Raises what it raises."""
        self._given.put(None)
        return self._heard()

    def cancel(self) -> None:
        """Ends it where it waits. Raises what it raises, but for `CancelledError`."""
        self._given.put(CancelledError())
        try:
            self._heard()
        except CancelledError:
            return

    def _heard(self) -> bytes | None:
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        return None if isinstance(said, _Waits) else said

    def _work(self) -> None:
        try:
            result = self._run(self._inbox())
        except BaseException as exc:  # a thread's boundary: whoever waits for the work hears of it
            self._said.put(exc)
        else:
            self._said.put(result)

    def _inbox(self) -> Iterator[bytes]:
        while True:
            self._said.put(_Waits())
            message = self._given.get()
            if isinstance(message, CancelledError):
                raise message
            if message is None:
                return
            yield message
