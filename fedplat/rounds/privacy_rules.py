"""What is different in a job with `[privacy]`. Pure functions.

Nothing that is released may depend on how many reports came: an attempt has no minimum of them, and commits at its
deadline whatever came, noise alone if nothing did. Who waits at the server is not a secret; so an attempt may well be
put off until enough clients wait, as long as that is decided before any is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedplat.rounds.events import CandidatesDrawn
from fedplat.rounds.records import Attempt, JobState
from fedplat.rounds.states import AttemptKind, JobStatus


def trains(job: JobState, attempt: Attempt) -> bool:
    """Whether an attempt shall end with a private release."""
    return job.spec.privacy is not None and attempt.kind is AttemptKind.TRAIN


def minimum(job: JobState) -> int:
    """How many reports an attempt to train needs at its deadline."""
    return 0 if job.spec.privacy is not None else job.spec.selection.minimum


def count_candidates(job: JobState, event: CandidatesDrawn) -> tuple[int, int]:
    """How many clients were there when an attempt selected, and how many it needs."""
    selection = job.spec.selection
    if selection.sampling.is_trial:
        return event.num_eligible, selection.wait_for
    return len(event.client_ids), selection.minimum if event.final else 1


def hides_sample(job: JobState) -> bool:
    """Whether what the job promises rests on this: nobody knows who was drawn, or how many."""
    return job.spec.privacy is not None and job.spec.privacy.participation == "poisson"


def closes_at(job: JobState, attempt: Attempt, now: float) -> float | None:
    """Return the only moment at which an attempt may close that begins to collect, or goes on after a restart, now.

    None if it may close before. Clients see when versions come. So the moment follows from the job file alone, not from
    who was drawn, how long they took, or whether they uploaded; it is when the last upload may end at the latest.
    """
    if not hides_sample(job) or not trains(job, attempt):
        return None
    return now + job.spec.deadlines.training_s + job.spec.deadlines.upload_s


MAX_FUTILE_ATTEMPTS = 3
"""After so many failed attempts in a row a job whose clients have had their share is paused.

Not after one: others may be away, at night as in the minutes after a restart of the server.
"""


def describe_exhaustion(job: JobState, event: CandidatesDrawn, needed: int) -> str:
    """Why a job shall wait for an operator, not for clients, in words; empty if it is to be tried again.

    It is if enough clients would be there without the limit, or the rest: nothing of that passes by itself.
    """
    would_be_there = len(event.client_ids) + event.num_resting + event.num_spent
    if job.status is not JobStatus.RUNNING or not event.num_spent or would_be_there < needed:
        return ""
    if job.failures < MAX_FUTILE_ATTEMPTS:
        return ""
    most = job.spec.max_participations
    return (
        f"round {job.round + 1} cannot have the {needed} clients that it needs: {event.num_spent} of those that wait "
        f"took part in as many rounds as they may (privacy.max_participations = {most}), {event.num_resting} rest, and "
        f"{len(event.client_ids)} are left; resume it when there are new clients, or cancel it: the last version stands"
    )


def kept_metrics(job: JobState, metrics: Mapping[str, float]) -> dict[str, float]:
    """Of a client's metrics those that may be kept beside its name; in a private job, what is released with noise."""
    options = job.spec.privacy
    if options is None:
        return dict(metrics)
    named = options.metrics.bounds if options.metrics is not None else {}
    return {name: value for name, value in metrics.items() if name in named}


def shown_metrics(job: JobState, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Of a client's metrics those that anybody is told of; in a private job none."""
    return {} if job.spec.privacy is not None else metrics


def describe_spent_budget(job: JobState) -> str:
    """Why there is no further round, in words; empty if there is one. Each round so far was one release."""
    options = job.spec.privacy
    if options is None or options.max_releases is None or job.round < options.max_releases:
        return ""
    budget = f"epsilon = {options.epsilon:g}" if options.epsilon is not None else "max_releases"
    return (
        f"its privacy budget ({budget}, delta = {options.delta:g}) is spent: round {job.round + 1} would exceed it; "
        "the last version stands"
    )
