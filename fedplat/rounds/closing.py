"""How attempts end: closed at their goal, committed, abandoned, or failed and tried again. Pure functions."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable

from fedplat.rounds import pacing
from fedplat.rounds.commands import Abandon, Abort, Command, Commit
from fedplat.rounds.copies import changed
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.rounds.states import (
    ASSIGNMENT_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    ENDED_JOBS,
    JOB_TRANSITIONS,
    AssignmentState,
    AttemptKind,
    AttemptPhase,
    JobStatus,
    Reason,
    require,
)
from fedplat.rounds.transition import Context, Transition


def close_if_due(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    """Closes the attempt when its goal is reached, when nobody is left to wait for, or when it cannot succeed.

    With `selection.close = "deadline"` the goal does not close it.
    """
    attempt = job.open_attempt
    assert attempt is not None
    reported, busy = attempt.num_reported, attempt.num_busy
    if reported + busy < attempt.minimum:
        text = f"{reported} of at least {attempt.minimum} needed clients reported ({_outcome(attempt)})"
        failed = fail_attempt(job, text, context)
        return dataclasses.replace(failed, commands=commands + failed.commands)
    if busy and (reported < attempt.goal or _waits_for_all(job, attempt)):
        return Transition(job, commands)
    surplus = [
        ended(assignment, AssignmentState.SURPLUS, Reason.SURPLUS)
        for assignment in attempt.assignments.values()
        if assignment.is_busy
    ]
    commands += tuple(Abort(attempt.key, assignment.client_id, Reason.SURPLUS) for assignment in surplus)
    attempt = attempt.with_assignments(surplus)
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COMMITTING)
    if attempt.kind is AttemptKind.TRAIN:
        commands += (Commit(attempt.key, attempt.base_version, reported),)
    return Transition(changed(job, attempt=changed(attempt, phase=phase)), commands)


def _waits_for_all(job: JobState, attempt: Attempt) -> bool:
    return attempt.kind is AttemptKind.TRAIN and job.spec.selection.close == "deadline"


def drop_late(job: JobState, context: Context) -> Transition:
    """Ends the assignments whose deadline has passed, and the attempt if that was what it waited for."""
    attempt = job.open_attempt
    assert attempt is not None
    commands: list[Command] = []
    late: list[Assignment] = []
    wakeup_at: float | None = None
    for assignment in attempt.assignments.values():
        if not assignment.is_busy:
            continue
        if assignment.deadline_at <= context.now:
            training = assignment.state is AssignmentState.TRAINING
            reason = Reason.TRAIN_TIMEOUT if training else Reason.UPLOAD_TIMEOUT
            late.append(ended(assignment, AssignmentState.LATE, reason))
            commands.append(Abort(attempt.key, assignment.client_id, reason))
        elif wakeup_at is None or assignment.deadline_at < wakeup_at:
            wakeup_at = assignment.deadline_at
    attempt = dataclasses.replace(attempt.with_assignments(late), wakeup_at=wakeup_at)
    return close_if_due(dataclasses.replace(job, attempt=attempt), tuple(commands), context)


def committed(job: JobState, attempt: Attempt, context: Context) -> JobState:
    """The job after its attempt: every accepted report is merged."""
    merged = [
        dataclasses.replace(assignment, state=require(ASSIGNMENT_TRANSITIONS, assignment.state, AssignmentState.MERGED))
        for assignment in attempt.assignments.values()
        if assignment.state is AssignmentState.REPORTED
    ]
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COMMITTED)
    closed = dataclasses.replace(
        attempt.with_assignments(merged), phase=phase, metrics=mean_metrics(merged), ended_at=context.now
    )
    return dataclasses.replace(job, attempt=closed)


def mean_metrics(assignments: Iterable[Assignment]) -> dict[str, float]:
    """Means of what clients reported, each metric weighted over the clients that have it."""
    found: dict[str, list[tuple[float, float]]] = {}
    for assignment in assignments:
        for name, value in assignment.metrics.items():
            found.setdefault(name, []).append((assignment.weight, value))
    means: dict[str, float] = {}
    for name, pairs in found.items():
        total = math.fsum(weight for weight, _ in pairs)
        if total <= 0.0:
            continue
        # Shares first: weight * value would overflow for a value near the largest number, and one client's report
        # could write an infinity that no JSON column takes.
        mean = sum(weight / total * value for weight, value in pairs)
        means[name] = min(max(mean, -sys.float_info.max), sys.float_info.max)
    return means


def fail_attempt(job: JobState, text: str, context: Context) -> Transition:
    """Abandons the attempt and backs off; a federated evaluation is not tried again."""
    attempt = job.open_attempt
    assert attempt is not None
    after, commands = abandon(job, Reason.ATTEMPT_ABANDONED, text, context)
    if attempt.kind is AttemptKind.EVALUATE:
        return Transition(after, commands)
    failures, retry = job.failures + 1, job.spec.retry
    after = dataclasses.replace(after, failures=failures)
    if job.status is not JobStatus.RUNNING:  # it was paused while the version was made durable
        return Transition(after, commands)
    if retry.max_attempts and failures >= retry.max_attempts:
        reason = f"round {attempt.key.round} failed {failures} times; at last: {text}"
        return Transition(set_status(after, JobStatus.FAILED, reason), commands)
    wait = pacing.backoff_s(retry, failures, context.rng)
    reason = f"round {attempt.key.round} attempt {attempt.key.number} was abandoned: {text}; trying again"
    return Transition(dataclasses.replace(after, reason=reason, resume_at=context.now + wait), commands)


def abandon(job: JobState, reason: Reason, text: str, context: Context) -> tuple[JobState, tuple[Command, ...]]:
    """Ends the attempt without a result: who works is told to stop, what was received is thrown away."""
    attempt = job.open_attempt
    assert attempt is not None
    dropped: list[Assignment] = []
    commands: list[Command] = []
    for client_id, assignment in attempt.assignments.items():
        if assignment.is_busy:
            commands.append(Abort(attempt.key, client_id, reason))
        if assignment.is_busy or assignment.state is AssignmentState.REPORTED:
            dropped.append(ended(assignment, AssignmentState.DROPPED, reason))
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.ABANDONED)
    closed = dataclasses.replace(attempt.with_assignments(dropped), phase=phase, reason=text, ended_at=context.now)
    return dataclasses.replace(job, attempt=closed), (*commands, Abandon(attempt.key))


def put(job: JobState, assignment: Assignment) -> JobState:
    """The job with one assignment replaced."""
    assert job.attempt is not None
    return changed(job, attempt=job.attempt.with_assignments([assignment]))


def ended(assignment: Assignment, state: AssignmentState, reason: Reason, text: str = "") -> Assignment:
    """The assignment, ended for a reason."""
    wanted = require(ASSIGNMENT_TRANSITIONS, assignment.state, state)
    return dataclasses.replace(assignment, state=wanted, reason=reason, text=text)


def set_status(job: JobState, status: JobStatus, reason: str) -> JobState:
    """The job in another status."""
    assert job.status not in ENDED_JOBS
    return dataclasses.replace(job, status=require(JOB_TRANSITIONS, job.status, status), reason=reason)


def _outcome(attempt: Attempt) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in sorted(attempt.counts.items()) if count)
