"""What can be set about a client beside its server and population, and how long it waits before it tries again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedplat import wire
from fedplat.wire.v1 import model_pb2
from fedplat_client.stopping import StopSignal

_LONGEST_RETRY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Times in seconds, sizes in bytes.

    `rng`, `wait` and `clock` are the client's randomness and time; tests give their own. `wait(signal, seconds)`
    waits until the signal is set and tells whether it is.
    """

    check_in_wait_s: float = 60.0
    """How long a check-in waits for work at the server."""
    call_timeout_s: float = 30.0
    """How long the server may take to answer."""
    first_backoff_s: float = wire.FIRST_BACKOFF_S
    max_backoff_s: float = wire.MAX_BACKOFF_S
    transfer_attempts: int = 8
    """How often in a row a transfer may break without a single new byte."""
    inline_limit_bytes: int = wire.INLINE_BYTES
    """Largest update that travels with its report, without an upload of its own."""
    cache_limit_bytes: int = 2 * 2**30
    """Size of the model cache; a model that exceeds it is used, and not kept. What codecs have left out may
    take as much again, and so may what trainers remember."""
    max_model_bytes: int = 32 * 2**30
    """Largest model that is downloaded; the client fails an assignment with a larger one (`TRANSFER_FAILED`)."""
    mtls: bool = False
    """Show the server a short-lived certificate instead of signing each call."""
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


class Backoff:
    """Exponential back-off with full jitter: the n-th delay is uniform in [0, min(max, first * 2**n)].

    Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015 ("full jitter").
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._failures = 0

    def next_s(self, wish: model_pb2.RetryWindow | None = None) -> float:
        """The delay after one more failure; not before the server wants to be asked again, if it said when."""
        exponent = min(self._failures, 64)
        self._failures += 1
        bound = min(self._options.max_backoff_s, self._options.first_backoff_s * 2.0**exponent)
        delay_s = self._options.rng.uniform(0.0, bound)
        return delay_s if wish is None else max(delay_s, draw_s(wish, self._options.rng))

    def reset(self) -> None:
        """Begins anew, after a success."""
        self._failures = 0


def draw_s(window: model_pb2.RetryWindow, rng: random.Random) -> float:
    """A moment of a server's retry window, in seconds from now, uniform; never more than a day."""
    earliest = window.min_s if window.min_s > 0 else 0.0  # NaN too
    latest = window.max_s if window.max_s > earliest else earliest
    return rng.uniform(min(earliest, _LONGEST_RETRY_S), min(latest, _LONGEST_RETRY_S))
