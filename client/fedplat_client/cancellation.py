"""Stop signals: events that carry a reason and cancel calls in flight, and the process's SIGINT and SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType

from fedplat import forks, system
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client.errors import Cancelled

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END = b"\0"
"""Ends the thread that waits for signals; no signal has this number."""
_JOIN_S = 0.1


def reason_name(reason: int) -> str:
    """Return the name of a reason without its prefix, or the number of one that this client does not define."""
    try:
        return model_pb2.Reason.Name(model_pb2.Reason.ValueType(reason)).removeprefix("REASON_")
    except ValueError:
        return str(reason)


@dataclass(frozen=True)
class Stop:
    """Why something stops; `by_server` if the server ordered the stop and needs no report of it."""

    reason: model_pb2.Reason.ValueType
    text: str
    by_server: bool = False
    retry: model_pb2.RetryWindow | None = None


def client_stopped() -> Stop:
    """Return the stop of a client by its owner."""
    return Stop(model_pb2.REASON_CLIENT_STOPPED, "the client was stopped")


def read_stop(refusal: fleet_pb2.Refusal) -> Stop:
    """Return the stop that a server orders."""
    text = refusal.text or f"the server stopped the task ({reason_name(refusal.reason)})"
    return Stop(refusal.reason, text, by_server=True, retry=refusal.retry if refusal.HasField("retry") else None)


def read_end(text: str) -> Stop:
    """Return the stop of a task whose assignment has ended at the server; the last word of `text` is the reason."""
    name = f"REASON_{text.rpartition(' ')[2]}"
    known = name in model_pb2.Reason.keys()  # noqa: SIM118 -- the type has no `in`
    return Stop(model_pb2.Reason.Value(name) if known else model_pb2.REASON_UNSPECIFIED, text, by_server=True)


class StopSignal:
    """An event that carries a `Stop` and cancels the calls in flight when it is set.

    >>> stop_signal = StopSignal()
    >>> with stop_signal.attach(lambda: print("call cancelled")):
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
        """Set the signal and run the callbacks; the first reason is kept. Callable from any thread."""
        if self.stop is None:
            self.stop = stop
        self._event.set()
        for callback in list(self._callbacks.values()):
            callback()

    def is_set(self) -> bool:
        """Return whether the signal is set."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the signal is set, at most `timeout_s` seconds; return whether it is set."""
        return self._event.wait(timeout_s)

    def check(self) -> None:
        """Raise `Cancelled` if the signal is set."""
        if self._event.is_set() and self.stop is not None:
            raise Cancelled(reason_name(self.stop.reason), self.stop.text)

    @contextlib.contextmanager
    def attach(self, callback: Callable[[], object]) -> Generator[None]:
        """Call `callback`, perhaps twice, if the signal is set within the block or was set before it."""
        key = object()
        # Add first, check second: of two concurrent threads the second one sees the first, without a lock.
        self._callbacks[key] = callback
        try:
            if self._event.is_set():
                callback()
            yield
        finally:
            del self._callbacks[key]


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; the second one gets the previous handler.

    Does nothing outside the main thread, where Python delivers no signals, and for signals that are ignored. Processes
    that are forked within the block get the previous handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with forks.keep_signals(_SIGNALS), contextlib.ExitStack() as stack:
        reader, writer = (stack.enter_context(forks.keep_descriptor(end)) for end in os.pipe())
        stack.enter_context(_watch_signals(stop, reader, writer))
        yield


@contextlib.contextmanager
def _watch_signals(stop: Callable[[], None], reader: int, writer: int) -> Generator[None]:
    """Call `stop` in a thread of its own, which signals reach through the pipe."""
    owner = os.getpid()
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    installed = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]

    def restore() -> None:
        for number in installed:
            signal.signal(number, previous[number] or signal.SIG_DFL)

    def handle(number: int, _frame: FrameType | None) -> None:
        restore()
        with contextlib.suppress(BlockingIOError):
            os.write(writer, bytes([number]))

    def watch() -> None:
        while (number := os.read(reader, 1)) != _END:
            if number[0] in installed:
                stop()
                return

    # Python writes the signal's number to the wakeup descriptor at once. The handler runs only when the main thread
    # executes Python code, and a signal that arrives just before a long wait does not interrupt that wait. The handler
    # writes the number again, because a trainer may have replaced the descriptor, as asyncio does.
    system.make_nonblocking(writer)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # The handler interrupts the main thread anywhere, perhaps while it holds a lock that stop() needs. So the handler
    # only writes to a pipe, and a separate thread stops the client.
    watcher = threading.Thread(target=watch, name="fedplat-signals", daemon=True)
    watcher.start()
    try:
        for number in installed:
            signal.signal(number, handle)
        yield
    finally:
        if os.getpid() == owner:  # else a forked child leaves the block, which has none of this
            restore()
            signal.set_wakeup_fd(wakeup)
            while watcher.is_alive():
                with contextlib.suppress(BlockingIOError):
                    os.write(writer, _END)  # the pipe may have other writers, so the watcher would see no end of it
                watcher.join(_JOIN_S)
