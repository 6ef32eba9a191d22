"""How long the client waits before it tries again, and calls that are repeated until the server answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TypeVar

from fedplat.wire.v1 import model_pb2
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import ServerUnavailableError
from fedplat_client.options import ClientOptions

_LONGEST_RETRY_S = 86_400.0
_Answer = TypeVar("_Answer")


class Backoff:
    """Exponential back-off with full jitter: the n-th delay is uniform in [0, min(max, first * 2**n)].

    Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015 ("full jitter").
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._failures = 0

    def next_s(self, wish: model_pb2.RetryWindow | None = None) -> float:
        """Return the delay after one more failure; not before the server's retry window, if it named one."""
        exponent = min(self._failures, 64)
        self._failures += 1
        bound = min(self._options.max_backoff_s, self._options.first_backoff_s * 2.0**exponent)
        delay_s = self._options.rng.uniform(0.0, bound)
        return delay_s if wish is None else max(delay_s, draw_s(wish, self._options.rng))

    def reset(self) -> None:
        """Begin anew, after a success."""
        self._failures = 0


def draw_s(window: model_pb2.RetryWindow, rng: random.Random) -> float:
    """Draw a moment of a server's retry window, in seconds from now, uniformly; at most a day."""
    earliest = window.min_s if window.min_s > 0 else 0.0  # NaN too
    latest = window.max_s if window.max_s > earliest else earliest
    return rng.uniform(min(earliest, _LONGEST_RETRY_S), min(latest, _LONGEST_RETRY_S))


def retry(
    call: Callable[[], _Answer],
    options: ClientOptions,
    signal: StopSignal,
    *,
    attempts: float = math.inf,
    recover: Callable[[ServerUnavailableError], object] = lambda exc: None,
) -> _Answer:
    """Repeat a call, with back-off, until the server gives a usable answer.

    `recover` is called after each wait, before the next attempt. Raises the last `ServerUnavailableError` after
    `attempts`, or when `signal` is set; other errors end the repetition at once.
    """
    backoff, made = Backoff(options), 0
    while True:
        try:
            return call()
        except ServerUnavailableError as exc:
            made += 1
            if made >= attempts or options.wait(signal, backoff.next_s(exc.retry)):
                raise
            recover(exc)
