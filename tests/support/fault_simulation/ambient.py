"""What code finds around it: the clocks and the randomness of the process, which a simulation takes over.

Modules keep `time.time` in defaults of arguments, so `install` must be called before they are imported. Until `take`
all is as without it.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

EPOCH_S = 2_000_000_000.0
"""The time of the wall when a simulation begins; files of the real disk are older."""
_real = (time.time, time.monotonic, time.perf_counter, os.urandom)
_clock: Callable[[], float] | None = None
_bytes: random.Random | None = None


def install() -> None:
    """Puts replacements in the place of the clocks and the random bytes of the process."""
    assert "fedplat_server" not in sys.modules, "the server has kept the real clock already"

    def wall() -> float:
        return _real[0]() if _clock is None else EPOCH_S + _clock()

    def monotonic() -> float:
        return _real[1]() if _clock is None else _clock()

    def urandom(size: int, /) -> bytes:
        return _real[3](size) if _bytes is None else _bytes.randbytes(size)

    time.time, time.monotonic, time.perf_counter = wall, monotonic, monotonic
    os.urandom = urandom
    random.__dict__["_urandom"] = urandom  # that of SystemRandom, and so of `secrets`


def take(clock: Callable[[], float], seed: int) -> None:
    """Begins a simulation with this clock."""
    global _clock, _bytes
    _clock, _bytes = clock, random.Random(f"bytes {seed}")
    random.seed(f"module {seed}")
    tempfile.__dict__["_name_sequence"] = _names()


def release() -> None:
    """Ends it: what comes then is checked in real time."""
    global _clock, _bytes
    _clock = _bytes = None


def _names() -> Iterator[str]:
    for number in range(1_000_000):
        yield f"{number:08}"
