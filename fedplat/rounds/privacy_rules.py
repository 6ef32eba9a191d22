"""The rules of a job with `[privacy]`, and what the server may keep and show of its clients. Pure functions.

A release must not depend on the number of reports: an attempt has no minimum, and commits at its deadline with the
reports received by then, or with noise alone. The set of waiting clients is not a secret, so an attempt
may be postponed until enough clients wait, provided that this is decided before any is drawn.

If clients add the noise (`privacy.trust = "none"`), an attempt needs the number of reports for which their noise was
calibrated, and is a release as soon as its masks are requested. Who takes part is no secret then.

It is no matter of the protocol of its training: the clients of a private job are also protected in its evaluations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

from fedplat.job import JobSpec, secure
from fedplat.privacy.options import Privacy
from fedplat.rounds import events, records, states


def count_candidates(job: records.JobState, attempt: records.Attempt, event: events.CandidatesDrawn) -> tuple[int, int]:
    """Return how many clients were available when an attempt selected, and how many it needs."""
    selection = job.spec.selection
    if selection.sampling.is_trial:
        return event.num_eligible, selection.wait_for
    needed = max(selection.minimum, attempt.minimum)
    return len(event.client_ids), needed if event.final else 1


def closes_at(job: records.JobState, now: float) -> float | None:
    """Return the only moment at which an attempt to train may close, if it begins to collect (or resumes) now.

    None if it may close earlier. Clients can observe when versions appear. So the moment depends on the job file alone,
    not on which clients were drawn, how long they took, or whether they uploaded: it is the latest possible end of an
    upload.
    """
    if disclosure_of(job.spec).shows_cohorts:
        return None
    return now + job.spec.deadlines.training_s + job.spec.deadlines.upload_s


MAX_FUTILE_ATTEMPTS = 3
"""A job whose clients have reached their participation limit is paused after this many failed attempts in a row.

One failure is not enough: other clients may be away, at night or in the minutes after a restart of the server.
"""


def describe_exhaustion(job: records.JobState, event: events.CandidatesDrawn, needed: int) -> str:
    """Return why a job must wait for an operator instead of for clients; empty if it should be retried.

    It must if enough clients would be available without the participation limit and the rest between rounds, because
    no retry changes that.
    """
    num_without_limits = len(event.client_ids) + event.num_resting + event.num_spent
    if job.status is not states.JobStatus.RUNNING or not event.num_spent or num_without_limits < needed:
        return ""
    if job.failures < MAX_FUTILE_ATTEMPTS:
        return ""
    most = job.spec.max_participations
    return (
        f"round {job.round + 1} cannot have the {needed} clients that it needs: {event.num_spent} of the waiting "
        f"clients took part in as many rounds as they may (privacy.max_participations = {most}), {event.num_resting} "
        f"rest, and {len(event.client_ids)} are left; resume the job when there are new clients, or cancel it: the "
        "last version stays available"
    )


def count_releases(job: records.JobState, options: Privacy) -> Fraction:
    """Return how many of the planned releases of a job with these options those so far have cost.

    Each committed round is one. If clients add the noise, each attempt whose masks were requested is one, but costs
    less if it had more survivors than it needed.
    """
    if options.trust == "server":
        return Fraction(job.round)
    return secure.spent_releases(job.spec, job.unmasked)


def describe_spent_budget(job: records.JobState) -> str:
    """Return why the privacy budget allows no further round; empty if it does."""
    options = job.spec.privacy
    if options is None or options.max_releases is None or count_releases(job, options) + 1 <= options.max_releases:
        return ""
    budget = f"epsilon = {options.epsilon:g}" if options.epsilon is not None else "max_releases"
    return (
        f"its privacy budget ({budget}, delta = {options.delta:g}) is spent: round {job.round + 1} would exceed it; "
        "the last version stays available"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Disclosure:
    """The limits of a job; the defaults are those of jobs without `[privacy]`.

    `shows_clients`: the numbers and failures of single clients may be shown. `shows_cohorts`: so may who takes part and
    how many do; otherwise the privacy guarantee depends on hiding it. `keeps_states`: the states of the optimizer of
    earlier versions may be kept; those of a private job may hold seeds of its noise. `named_metrics`: the metrics of a
    client that may be stored with its name (None: all). `is_charged`: its versions are releases with noise, each of
    which is charged to its privacy budget.
    """

    shows_clients: bool = True
    shows_cohorts: bool = True
    keeps_states: bool = True
    named_metrics: frozenset[str] | None = None
    is_charged: bool = False

    def kept_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a client that may be stored with its name; of a private job, those to be noised."""
        named = self.named_metrics
        return {name: value for name, value in metrics.items() if named is None or name in named}

    def kept_norm(self, norm: float | None) -> float | None:
        """Return the norm of an update if it may be stored with the name of its client."""
        return norm if self.shows_clients else None

    def shown_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of a client that may be shown."""
        return metrics if self.shows_clients else {}


OPEN = Disclosure()


def disclosure_of(spec: JobSpec) -> Disclosure:
    """Return the limits of a job."""
    options = spec.privacy
    if options is None:
        return OPEN
    return Disclosure(
        shows_clients=False,
        shows_cohorts=options.participation != "poisson",
        keeps_states=False,
        named_metrics=frozenset(options.metrics.bounds if options.metrics is not None else ()),
        is_charged=True,
    )
