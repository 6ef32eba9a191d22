"""The options of a client besides its server and population."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedplat import wire
from fedplat_client.cancellation import StopSignal


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Times in seconds, sizes in bytes.

    `rng`, `wait` and `clock` are the client's randomness and time; tests replace them. `wait(signal, seconds)` waits
    until the signal is set, at most `seconds`, and returns whether it is set.
    """

    check_in_wait_s: float = 60.0
    """How long a check-in waits at the server for an assignment."""
    call_timeout_s: float = 30.0
    """How long the server may take to answer."""
    first_backoff_s: float = wire.FIRST_BACKOFF_S
    max_backoff_s: float = wire.MAX_BACKOFF_S
    transfer_attempts: int = 8
    """How many times in a row a transfer may break without a single new byte."""
    inline_limit_bytes: int = wire.INLINE_BYTES
    """Largest update that is sent within its report, without a separate upload."""
    cache_limit_bytes: int = 2 * 2**30
    """Size of the model cache; a larger model is used but not kept. The codecs' residuals may take the same size again,
    and so may the client states."""
    max_model_bytes: int = 32 * 2**30
    """Largest model that is downloaded; a larger one fails the assignment (`TRANSFER_FAILED`)."""
    mtls: bool = False
    """Authenticate with a short-lived certificate instead of signing each call."""
    rng: random.Random = field(default_factory=random.SystemRandom)
    wait: Callable[[StopSignal, float], bool] = StopSignal.wait
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        for name in ("check_in_wait_s", "call_timeout_s", "first_backoff_s", "max_backoff_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; expected a positive number of seconds")
        if not 0 <= self.inline_limit_bytes <= wire.INLINE_BYTES:
            raise ValueError(
                f"inline_limit_bytes is {self.inline_limit_bytes}; expected at least 0 and at most {wire.INLINE_BYTES}"
            )
        for name, least in (("transfer_attempts", 1), ("cache_limit_bytes", 0), ("max_model_bytes", 0)):
            number: int = getattr(self, name)
            if number < least:
                raise ValueError(f"{name} is {number}; expected at least {least}")
