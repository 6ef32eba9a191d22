"""Waiting for what another process or thread does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

BIN = Path(sys.executable).parent
"""The programs of this environment."""
PATIENCE_S = 60.0


def until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for something that another process does; a bound, not an expectation of speed."""
    pause = threading.Event()
    for _ in range(int(patience_s / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError(f"gave up waiting for: {what}")
