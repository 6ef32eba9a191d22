"""Ctrl-C in the moments in which it would leave gRPC's calls in a state that it cannot close."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def defer_interrupt() -> Generator[None]:
    """Handle a SIGINT that arrives within the block at its end. Only the main thread receives signals.

    gRPC first starts a streaming call and then the thread that ends it. After a `KeyboardInterrupt` between the two,
    closing the channel never returns (grpcio 1.85.1).
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
