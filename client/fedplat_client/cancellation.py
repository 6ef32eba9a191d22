"""Stopping: an event that carries its reason and cancels the calls in flight, and the process's signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType

from fedplat.wire.v1 import model_pb2
from fedplat_client.errors import Cancelled


def reason_name(reason: int) -> str:
    """The name of a reason without its prefix; a number when the server is newer than this client."""
    try:
        return model_pb2.Reason.Name(model_pb2.Reason.ValueType(reason)).removeprefix("REASON_")
    except ValueError:
        return str(reason)


@dataclass(frozen=True)
class Stop:
    """Why something stops; `by_server` when the server said so and knows already."""

    reason: model_pb2.Reason.ValueType
    text: str
    by_server: bool = False
    retry: model_pb2.RetryWindow | None = None


class StopSignal:
    """An event that carries a `Stop` and cancels the calls in flight when it is set.

    >>> stop_signal = StopSignal()
    >>> with stop_signal.attached(lambda: print("call cancelled")):
    ...     stop_signal.set(Stop(model_pb2.REASON_CLIENT_STOPPED, "the client was stopped"))
    call cancelled
    >>> stop_signal.wait(60.0)  # at once
    True
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._callbacks: dict[object, Callable[[], object]] = {}
        self.stop: Stop | None = None

    def set(self, stop: Stop) -> None:
        """Stops; the first reason stays. Callable from any thread."""
        if self.stop is None:
            self.stop = stop
        self._event.set()
        for callback in list(self._callbacks.values()):
            callback()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is set, `timeout_s` seconds at most; tells whether it is set."""
        return self._event.wait(timeout_s)

    def check(self) -> None:
        """Raises `Cancelled` when it was set."""
        if self._event.is_set() and self.stop is not None:
            raise Cancelled(reason_name(self.stop.reason), self.stop.text)

    @contextlib.contextmanager
    def attach(self, callback: Callable[[], object]) -> Generator[None]:
        """Calls `callback` when the signal is set within the block, or was set before; perhaps twice."""
        key = object()
        # First added, then looked: whichever of two threads comes second sees the other, without a lock.
        self._callbacks[key] = callback
        try:
            if self._event.is_set():
                callback()
            yield
        finally:
            del self._callbacks[key]


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Calls `stop` at the first SIGINT or SIGTERM; the second one does what it did before.

    Does nothing outside the main thread, where Python delivers no signals, and for signals that are ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    installed = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]

    def restore() -> None:
        for number in installed:
            signal.signal(number, previous[number] or signal.SIG_DFL)

    def handle(number: int, _frame: FrameType | None) -> None:
        restore()
        with contextlib.suppress(BlockingIOError):
            os.write(writer, bytes([number]))

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in installed:
                stop()
                return

    # Python writes the number of a signal there at once; the handler waits until the main thread runs Python code,
    # which a signal that comes just before a long wait does not interrupt. It writes the number again, since a trainer
    # may have taken that place for itself, as asyncio does.
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # The handler interrupts the main thread wherever it is, perhaps within a lock that stop() needs; so it only
    # writes to a pipe, and a thread of its own stops the client.
    watcher = threading.Thread(target=watch, name="fedplat-signals", daemon=True)
    watcher.start()
    try:
        for number in installed:
            signal.signal(number, handle)
        yield
    finally:
        restore()
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        watcher.join()
        os.close(reader)
