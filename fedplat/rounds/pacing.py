"""Retry windows (pace steering), back-off and deadlines. Pure arithmetic.

Pace steering follows Bonawitz et al. 2019 (arXiv 1902.01046), section 2.3: the clients of a small fleet return at
once, so that enough of them wait together; those of a large fleet are spread, so that just enough of them arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedplat.job import Adaptive, Deadlines, Retry
from fedplat.rounds.commands import RetryWindow

ARRIVALS_PER_NEED = 3.0
"""Target number of arriving clients per client that a round of a large fleet needs."""
IDLE_ARRIVALS_PER_S = 50.0
"""Maximum rate at which idle clients check for work, in clients per second."""
MAX_WAIT_S = 3600.0
OVERLOAD_WAIT_S = 10.0
SOON = RetryWindow(0.0, 0.5)
"""The window of clients that are to return at once."""


def busy_window(num_clients: int, num_needed: int, round_s: float) -> RetryWindow:
    """Return the window of clients that were not needed, while rounds of `round_s` seconds need `num_needed` each."""
    arrivals = ARRIVALS_PER_NEED * max(num_needed, 1)
    if num_clients <= arrivals:
        return SOON
    period = min(round_s * num_clients / arrivals, MAX_WAIT_S)
    return RetryWindow(period / 2, period * 1.5)


def round_s(deadlines: Deadlines, durations: Sequence[float]) -> float:
    """Estimate the duration of a round: that of the slowest recent report, and at most the training deadline."""
    return min(max(durations, default=deadlines.training_s), deadlines.training_s)


def after_rest(window: RetryWindow, rest_s: float) -> RetryWindow:
    """Return the window of a client that must rest for about `rest_s` seconds; too early is better than too late."""
    if not rest_s:
        return window
    rest_s = min(rest_s, MAX_WAIT_S)
    return RetryWindow(max(window.min_s, rest_s / 2), max(window.max_s, rest_s))


def round_up_to_power_of_two(num_clients: int) -> int:
    """Round up to a power of two, so that a retry window hardly reveals the number of clients."""
    return 1 << max(num_clients - 1, 0).bit_length()


def idle_window(num_clients: int) -> RetryWindow:
    """Return the window of clients whose population has no running job."""
    spread = min(num_clients / IDLE_ARRIVALS_PER_S, MAX_WAIT_S)
    return RetryWindow(0.5, 1.5 + spread)


def overload_window(num_waiting: int) -> RetryWindow:
    """Return the window of clients that check in while the waiting room is full."""
    return RetryWindow(OVERLOAD_WAIT_S, OVERLOAD_WAIT_S + num_waiting / IDLE_ARRIVALS_PER_S)


def backoff_s(retry: Retry, failures: int, rng: np.random.Generator) -> float:
    """Return the back-off after `failures` failed attempts in a row: exponential, times a random factor in [0.5, 1)."""
    exponent = min(max(failures - 1, 0), 60)
    ceiling = min(retry.base_s * math.ldexp(1.0, exponent), retry.max_s)
    return ceiling * float(rng.uniform(0.5, 1.0))


def training_timeout_s(deadlines: Deadlines, durations: Sequence[float]) -> float:
    """Return the training deadline of a new assignment: fixed, or from a percentile of past durations."""
    adaptive: Adaptive | None = deadlines.adaptive
    if adaptive is None or len(durations) < adaptive.after:
        return deadlines.training_s
    learned = float(np.percentile(durations, adaptive.percentile)) * adaptive.margin
    return min(max(learned, adaptive.min_s), deadlines.training_s)
