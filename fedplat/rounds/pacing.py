"""When to try again: retry windows (pace steering), back-off and deadlines; and when another try would fail alike.

Pace steering follows Bonawitz et al. 2019 (arXiv 1902.01046), section 2.3: the clients of a small fleet return at
once, so that enough of them wait together; those of a large fleet are spread, so that just enough of them arrive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedplat.job import Adaptive, Deadlines, Retry
from fedplat.rounds.commands import RetryWindow
from fedplat.rounds.records import Assignment, Attempt, FutileAttempts, JobState
from fedplat.rounds.states import REASON_TEXTS, AssignmentState, Reason
from fedplat.texts import shorten

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


LASTING = frozenset(
    {
        Reason.TRAINER_ERROR,
        Reason.UNKNOWN_TRAINER,
        Reason.UNKNOWN_CODEC,
        Reason.PRIVACY_LIMIT,
        Reason.UNSAFE_AGGREGATION,
        Reason.REJECTED_SCHEMA,
        Reason.REJECTED_NONFINITE,
        Reason.REJECTED_WEIGHT,
        Reason.REJECTED_DIGEST,
        Reason.REJECTED_CONFLICT,
        Reason.REJECTED_METRICS,
        Reason.REJECTED_NORM,
        Reason.REJECTED_OUTLIER,
        Reason.REJECTED_MESSAGE,
    }
)
"""Reasons that no later attempt changes by itself. A lost connection passes, which may be why a deadline was missed."""
MAX_CULPRITS = 20
"""Different clients whose failures pause a job although others could do its work: the cause is hardly theirs."""
MAX_BYTES = 300
"""Length of a client's text within the reason of an attempt."""
_ENDED_BADLY = frozenset({AssignmentState.LATE, AssignmentState.FAILED, AssignmentState.REJECTED})


def _is_lasting(attempt: Attempt) -> bool:
    """Return whether a failed attempt would have had enough clients but for failures that another try repeats."""
    ended = [each for each in attempt.assignments.values() if each.state in _ENDED_BADLY]
    num_lasting = sum(each.reason in LASTING for each in ended)
    return num_lasting > 0 and len(attempt.assignments) - len(ended) + num_lasting >= max(attempt.minimum, 1)


def describe_futility(attempt: Attempt) -> str:
    """Describe the most frequent reason why clients did not contribute, with the first of them; empty without any."""
    ended = [each for each in attempt.assignments.values() if each.state in _ENDED_BADLY]
    if not ended:
        return ""
    counts = Counter(each.reason for each in ended)
    most = max(counts.values())
    first = next(each for each in ended if counts[each.reason] == most)
    return f"client {first.client_id}: {explain(first)}" + (f", and {most - 1} more" if most > 1 else "")


def explain(assignment: Assignment) -> str:
    """Return why a client has ended its work, in the words of the client if there are any."""
    reason = assignment.reason
    assert reason is not None
    return f"{reason}: {shorten(assignment.text, MAX_BYTES) or REASON_TEXTS[reason]}"


def count_futile(job: JobState, attempt: Attempt, *, is_lasting: bool = False) -> FutileAttempts:
    """Return the futile attempts of a job after one more has failed, because of its clients or a cause that lasts."""
    if not (is_lasting or _is_lasting(attempt)):
        return job.futile
    failed = {each.client_id for each in attempt.assignments.values() if each.reason in LASTING}
    clients = set[str]() if is_lasting else failed  # not these were the cause
    number, others, num_eligible = job.futile
    return FutileAttempts(number + 1, others | clients, max(num_eligible, attempt.num_eligible))


def gives_up(job: JobState) -> bool:
    """Return whether the job must be paused, because its last attempts failed and the next would fail alike.

    Few clients do not stop a job that can do without them, but `MAX_CULPRITS` do, however large its fleet is.
    """
    retry, attempt = job.spec.retry, job.attempt
    if retry.max_attempts or not 0 < retry.pause_after <= job.futile.number or attempt is None:
        return False
    num_culprits = len(job.futile.clients)
    num_others = job.futile.num_eligible - num_culprits
    return not num_culprits or num_culprits >= MAX_CULPRITS or num_others < max(attempt.minimum, 1)


def describe_pause(job: JobState, what: str, text: str) -> str:
    """Return why a job was paused after its last attempt at `what` failed with `text`."""
    return (
        f"{what} failed {job.futile.number} times in a row for reasons that another try does not change; last failure: "
        f"{text}; remove the cause and resume the job, or cancel it"
    )
