"""Warm start (`[warm_start]`): the server trains the initial model before round 1.

It does so on its own data, and the result is version 1. This is an attempt
without a cohort, in round 0; it is committed, fails and is retried like others. It is not a private release, because it
does not use data of clients. In a job with a Flower app it runs the app until it sends its first messages.
"""

from __future__ import annotations

from msgspec import structs

from fedplat.job import JobSpec
from fedplat.rounds import commands, states
from fedplat.rounds.protocols.base import AttemptSizes, Ending, RoundProtocol, register
from fedplat.rounds.records import Attempt, AttemptKey, JobState


def is_wanted(spec: JobSpec) -> bool:
    """Return whether a job begins with a warm start."""
    return spec.warm_start is not None or spec.flower is not None


def is_due(job: JobState) -> bool:
    """Return whether the server must train the job's model before its clients do."""
    return is_wanted(job.spec) and job.latest.version == 0


def begin(job: JobState, context: commands.Context) -> commands.Transition | None:
    """Open the attempt, and start its training, unless the job has it behind it."""
    if not is_due(job):
        return None
    number = job.attempt.key.number + 1 if job.attempt is not None else 1
    attempt = Attempt(
        key=AttemptKey(job.job_id, 0, number),
        kind=states.AttemptKind.WARM_START,
        phase=states.FIRST_PHASES[states.AttemptKind.WARM_START],
        base_version=job.latest.version,
        goal=0,
        minimum=0,
        target=0,
        opened_at=context.now,
        selection_ends_at=context.now,
    )
    after = structs.replace(job, attempt=attempt, resume_at=None, reason="")
    return commands.Transition(after, (make_command(attempt),))


def describe(job: JobState, attempt: Attempt) -> str:
    """Return what the attempt is, for a reason."""
    return "the start of the app" if job.spec.flower is not None else "the warm start"


def make_command(attempt: Attempt) -> commands.RunWarmStart:
    """Return the command that runs the training of an attempt, at its start and again after a restart."""
    return commands.RunWarmStart(attempt.key, attempt.base_version)


WARM_START = register(
    RoundProtocol(
        name="warm_start",
        folds=False,
        may_be_empty=True,
        finishes=False,
        begin=begin,
        sizes=lambda job: AttemptSizes(0, 0, 0),
        describe=describe,
        demand=lambda job, attempt: None,
        judge_end=lambda job, attempt, context: Ending.WAIT,
        on_aggregation_failed=lambda job, attempt, event: (job, event.text),
        resume=lambda job, attempt, context: commands.Transition(job, (make_command(attempt),)),
    )
)
