"""Failed attempts: why their clients did not contribute, and when another try would fail alike. Pure functions."""

from __future__ import annotations

from collections import Counter

from fedplat.rounds.records import Assignment, Attempt, FutileAttempts, JobState
from fedplat.rounds.states import REASON_TEXTS, AssignmentState, Reason
from fedplat.texts import shorten

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


def describe(attempt: Attempt) -> str:
    """Describe the most frequent reason why clients did not contribute, with the first of them; empty without any."""
    ended = [each for each in attempt.assignments.values() if each.state in _ENDED_BADLY]
    if not ended:
        return ""
    counts = Counter(each.reason for each in ended)
    most = max(counts.values())
    first = next(each for each in ended if counts[each.reason] == most)
    return f"client {first.client_id}: {_explain(first)}" + (f", and {most - 1} more" if most > 1 else "")


def _explain(assignment: Assignment) -> str:
    reason = assignment.reason
    assert reason is not None
    return f"{reason}: {shorten(assignment.text, MAX_BYTES) or REASON_TEXTS[reason]}"


def count(job: JobState, attempt: Attempt, *, is_lasting: bool = False) -> FutileAttempts:
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
