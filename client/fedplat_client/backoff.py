"""Back-off: the delay before the next attempt, and calls that are repeated until the server answers."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import TypeVar

from fedplat.wire import proxies
from fedplat.wire.v1 import model_pb2
from fedplat_client import cancellation, errors
from fedplat_client.options import ClientOptions

_LONGEST_RETRY_S = 86_400.0
_NOTED, _NOTED_AGAIN = 3, 30
"""The log has a line at the third failure in a row, and then at each thirtieth."""
_LEAST_POLL_S = 5.0
_SHORTER, _LONGER = 0.8, 1.05
"""What changes the wait of a poll: one that something on the way has ended, and one that was answered."""
_Answer = TypeVar("_Answer")
_logger = logging.getLogger(__name__)


class Backoff:
    """Exponential back-off with full jitter: the n-th delay is uniform in [0, min(max, first * 2**n)].

    Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015 ("full jitter").
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._failures = 0

    def next_s(self, wish: model_pb2.RetryWindow | None = None) -> float:
        """Return the delay in seconds after one more failure, not before the server's retry window, if it sent one."""
        exponent = min(self._failures, 64)
        self._failures += 1
        bound = min(self._options.max_backoff_s, self._options.first_backoff_s * 2.0**exponent)
        delay_s = self._options.rng.uniform(0.0, bound)
        return delay_s if wish is None else max(delay_s, draw_s(wish, self._options.rng))

    def next_after(self, exc: errors.CallError, lasted_s: float) -> float:
        """Return the delay in seconds after a call that has failed; one that was cut is no failure of the server."""
        if is_cut(exc, lasted_s):
            self.reset()
        return self.next_s(exc.retry)

    def reset(self) -> None:
        """Start again from the first delay, after a success."""
        self._failures = 0


def is_cut(exc: errors.CallError, lasted_s: float) -> bool:
    """Return whether a call had waited at the server when its connection broke.

    Load balancers end connections and calls that are silent for some time, often a minute, and calls that wait for work
    are. With a back-off that grows each time, an idle client would be away for a large part of its time.
    """
    return isinstance(exc, errors.UnreachableError) and exc.was_cut(lasted_s)


class PollTime:
    """How long a check-in may wait at the server: less than what is between lets a silent call wait.

    A poll that was cut after 5 s or more makes the next one wait 0.8 times as long, at least 5 s. Each answer makes it
    5 % longer again, since a server that restarts cuts all polls, too.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.wait_s = most_s

    def note_failure(self, exc: errors.CallError, lasted_s: float) -> None:
        """Note a poll that has failed after so long."""
        if lasted_s >= _LEAST_POLL_S and is_cut(exc, lasted_s):
            self.wait_s = min(self._most_s, max(_LEAST_POLL_S, _SHORTER * lasted_s))

    def note_answer(self) -> None:
        """Note a poll that was answered."""
        self.wait_s = min(self._most_s, _LONGER * self.wait_s)


def draw_s(window: model_pb2.RetryWindow, rng: random.Random) -> float:
    """Draw a delay in seconds uniformly from a server's retry window; at most a day."""
    earliest = window.min_s if window.min_s > 0 else 0.0  # also replaces NaN
    latest = window.max_s if window.max_s > earliest else earliest
    return rng.uniform(min(earliest, _LONGEST_RETRY_S), min(latest, _LONGEST_RETRY_S))


def note_failures(number: int, text: str) -> None:
    """Log that a call or a transfer of a task fails again and again; a single failure is nothing unusual."""
    if number == _NOTED or number % _NOTED_AGAIN == 0:
        _logger.warning("The server cannot be used, and is tried again: %s", proxies.shorten(text))


def retry(
    call: Callable[[], _Answer],
    options: ClientOptions,
    signal: cancellation.StopSignal,
    *,
    attempts: float = math.inf,
    recover: Callable[[errors.ServerUnavailableError], object] = lambda exc: None,
) -> _Answer:
    """Repeat a call, with back-off, until the server gives a usable answer.

    Call `recover` after each wait, before the next attempt. Raises the last `ServerUnavailableError` after `attempts`
    failures or when `signal` is set; other errors are raised at once.
    """
    backoff, failures = Backoff(options), 0
    while True:
        began = options.clock()
        try:
            return call()
        except errors.ServerUnavailableError as exc:
            failures += 1
            note_failures(failures, exc.text)
            if failures >= attempts or options.wait(signal, backoff.next_after(exc, options.clock() - began)):
                raise
            recover(exc)
