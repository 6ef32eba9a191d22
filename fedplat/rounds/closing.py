"""How an attempt waits for clients, accepts reports, and ends: closed, committed or failed. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec import structs

from fedplat.metrics import average_metric
from fedplat.rounds import commands, influence, pacing, privacy_rules
from fedplat.rounds.commands import (
    ACCEPTED,
    Abandon,
    Abort,
    Command,
    Commit,
    Context,
    Fold,
    Restart,
    Transition,
    Verdict,
)
from fedplat.rounds.protocols.base import Ending, protocol_of
from fedplat.rounds.records import Assignment, AssignmentSet, Attempt, JobState, make_assignment_set
from fedplat.rounds.states import (
    ASSIGNMENT_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    ENDED_JOBS,
    HAVE_UPDATES,
    JOB_TRANSITIONS,
    WORKING_PHASES,
    AssignmentState,
    AttemptPhase,
    JobStatus,
    Reason,
    require,
)
from fedplat.texts import format_count

MAX_METRICS = 64
"""Maximum number of metrics of an attempt."""
_TIMEOUTS: Mapping[AssignmentState, Reason] = {
    AssignmentState.TRAINING: Reason.TRAIN_TIMEOUT,
    AssignmentState.ADVERTISED: Reason.STEP_TIMEOUT,
    AssignmentState.SHARED: Reason.STEP_TIMEOUT,
    AssignmentState.UPLOADING: Reason.UPLOAD_TIMEOUT,
}
_IDLE_STATES: Mapping[AttemptPhase, AssignmentState] = {
    AttemptPhase.ADVERTISING: AssignmentState.ADVERTISED,
    AttemptPhase.SHARING: AssignmentState.SHARED,
}
"""The state of clients that have sent their message of a phase, and wait for the others."""
_Set = TypeVar("_Set", bound=AssignmentSet)


def close_if_due(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    """Close the attempt, or fail it, if its protocol finds that it is time to."""
    attempt = job.open_attempt
    assert attempt is not None
    match protocol_of(job, attempt.kind).judge_end(job, attempt, context):
        case Ending.WAIT:
            return Transition(job, commands)
        case Ending.WAIT_FOR_CLIENTS:
            return Transition(await_clients(job, context), commands)
        case Ending.FAIL:
            return _fail_for_few(job, commands, context)
        case Ending.CLOSE:
            return close(job, commands, context)


def close(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    """Close the attempt with its reports. Busy clients become surplus, or are carried over into the next attempt.

    First the influence of each report is bounded (`influence`). An outlier is dropped as if its client had failed, so
    the attempt may have to wait for other clients.
    """
    attempt = job.open_attempt
    assert attempt is not None
    folds = protocol_of(job, attempt.kind).folds
    keeps_updates = not folds or influence.keeps_updates(job.spec)
    if dropped := influence.find_outliers(job, attempt):
        job = structs.replace(job, attempt=attempt.with_assignments(dropped))
        return close_if_due(job, commands, context) if keeps_updates else _fail_for_outliers(job, commands, context)
    weighed = influence.reweigh(job, attempt)
    if not keeps_updates:
        if heavy := influence.describe_too_heavy(attempt, weighed):
            text = f"the weight of an update in memory cannot be changed: {influence.join_texts(heavy)}"
            return _prepend(commands, fail_attempt(job, text, context))
        weighed = []  # the weights are within tolerance: only the median has moved since they were set
    if folds and (weighed or influence.has_dropped_folds(attempt)):
        attempt = attempt.with_assignments(weighed)
        commands += (Restart(attempt.key), *fold_commands(attempt, attempt.reported))
    return begin_commit(job, attempt.with_assignments(weighed), commands)


def begin_commit(job: JobState, attempt: Attempt, commands: tuple[Command, ...]) -> Transition:
    """Commit the reports of the attempt, without the clients that are busy."""
    job = structs.replace(job, attempt=attempt)
    phase, protocol = (
        require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COMMITTING),
        protocol_of(job, attempt.kind),
    )
    job, attempt, more = protocol.release_busy(job, attempt)
    commands += more
    if protocol.folds:
        commands += (Commit(attempt.key, attempt.base_version, attempt.num_reported),)
    return Transition(structs.replace(job, attempt=structs.replace(attempt, phase=phase)), commands)


def release_surplus(job: JobState, attempt: Attempt) -> tuple[JobState, Attempt, tuple[Command, ...]]:
    """Stop the clients of an attempt that are busy: it has enough reports."""
    surplus = [commands.end_assignment(each, AssignmentState.SURPLUS, Reason.SURPLUS) for each in attempt.busy]
    return job, attempt.with_assignments(surplus), commands.abort_commands(surplus)


def close_without_clients(job: JobState, context: Context) -> Transition:
    """Close or fail the attempt: no client works for it, and none was available in time."""
    attempt = job.open_attempt
    assert attempt is not None
    enough = attempt.num_reported >= attempt.minimum
    return close(job, (), context) if enough else _fail_for_few(job, (), context)


def _fail_for_few(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    attempt = job.open_attempt
    assert attempt is not None
    found, needed, outcome = attempt.num_reported, attempt.minimum, describe_counts(attempt) or "no client checked in"
    text = f"{found} of at least {needed} needed clients reported ({outcome})"
    if privacy_rules.disclosure_of(job.spec).shows_clients and (why := pacing.describe_futility(attempt)):
        text += f"; {why}"
    if culprits := influence.describe_outliers(attempt):
        text += f"; dropped as outliers: {culprits}"
    return _prepend(commands, fail_attempt(job, text, context))


def _fail_for_outliers(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    attempt = job.open_attempt
    assert attempt is not None
    text = f"an update in memory cannot be removed from the sum: {influence.describe_outliers(attempt)}"
    return _prepend(commands, fail_attempt(job, text, context))


def _prepend(commands: tuple[Command, ...], transition: Transition) -> Transition:
    return structs.replace(transition, commands=commands + transition.commands)


def drop_late(job: JobState, context: Context) -> Transition:
    """End assignments whose deadline has passed; close the attempt if it waited only for them, or if it is time."""
    carried, commands = _end_late(job.carried_over, context.now)
    job = structs.replace(job, carried_over=carried) if carried is not job.carried_over else job
    attempt = job.open_attempt
    if attempt is None or attempt.phase not in WORKING_PHASES:
        return Transition(job, commands)
    is_time = attempt.closes_at is not None and attempt.closes_at <= context.now
    idle = _IDLE_STATES.get(attempt.phase)
    after, more = _end_late(attempt, context.now, idle) if attempt.num_busy else (attempt, ())
    if after is attempt and not is_time:
        return Transition(job, commands)
    return close_if_due(structs.replace(job, attempt=after), commands + more, context)


def _end_late(group: _Set, now: float, idle: AssignmentState | None = None) -> tuple[_Set, tuple[Command, ...]]:
    """End the assignments whose deadline has passed, but not those in the state `idle`, which wait for others."""
    if group.next_deadline is None or group.next_deadline > now:
        return group, ()  # no deadline can have passed
    late: list[Assignment] = []
    next_deadline: float | None = None
    for assignment in group.busy:
        if assignment.state is idle:
            continue
        if assignment.deadline_at <= now:
            late.append(commands.end_assignment(assignment, AssignmentState.LATE, _TIMEOUTS[assignment.state]))
        elif next_deadline is None or assignment.deadline_at < next_deadline:
            next_deadline = assignment.deadline_at
    return structs.replace(group.with_assignments(late), next_deadline=next_deadline), commands.abort_commands(late)


def commit(job: JobState, attempt: Attempt, context: Context, metrics: Mapping[str, float] | None = None) -> JobState:
    """Commit the attempt and mark every accepted report as merged. `metrics` replace the means of the reports."""
    merged = [
        structs.replace(assignment, state=require(ASSIGNMENT_TRANSITIONS, assignment.state, AssignmentState.MERGED))
        for assignment in attempt.assignments.values()
        if assignment.state is AssignmentState.REPORTED
    ]
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COMMITTED)
    closed = structs.replace(
        protocol_of(job, attempt.kind).forget_messages(attempt.with_assignments(merged)),
        phase=phase,
        metrics=average_metrics(merged) if metrics is None else dict(metrics),
        ended_at=context.now,
    )
    return structs.replace(job, attempt=closed)


def average_metrics(merged: Iterable[Assignment]) -> dict[str, float]:
    """Return the weighted mean of each reported metric, over the clients that reported it.

    Only metrics that more than half of the reports have are included, and at most the `MAX_METRICS` most frequent ones,
    so that a single client cannot add new names to each attempt.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    reports = list(merged)
    for assignment in reports:
        for name, value in assignment.metrics.items():
            found.setdefault(name, []).append((assignment.weight, value))
    common = [name for name, pairs in found.items() if 2 * len(pairs) > len(reports)]
    common.sort(key=lambda name: -len(found[name]))
    means: dict[str, float] = {}
    for name in common[:MAX_METRICS]:
        pairs = found[name]
        if sum(weight for weight, _ in pairs) > 0.0:
            means[name] = average_metric(name, pairs)  # finite, as a JSON column needs it
    return means


def withdraw(job: JobState, revoked: Assignment, context: Context) -> Transition:
    """Drop the report of a revoked client. A report that is already part of a version stays in that version."""
    attempt, dropped = job.open_attempt, commands.end_assignment(revoked, AssignmentState.DROPPED, Reason.REVOKED)
    if attempt is None or attempt.find(revoked.key, revoked.client_id) is None:
        return Transition(commands.put_assignment(job, dropped))
    if attempt.phase is not AttemptPhase.COLLECTING:
        return Transition(job)
    job = commands.put_assignment(job, dropped)
    if protocol_of(job, attempt.kind).folds and not influence.keeps_updates(job.spec):
        text = f"{revoked.client_id} was revoked; an update in memory cannot be removed from the sum"
        return fail_attempt(job, text, context)
    return close_if_due(job, (), context)


def fail_attempt(job: JobState, text: str, context: Context, *, is_lasting: bool = False) -> Transition:
    """Abandon the attempt and back off, unless attempts of its kind are not retried.

    After `retry.pause_after` attempts in a row whose cause `is_lasting`, or lies with the clients
    (`pacing.count_futile`), the job is paused instead: each of them costs the clients a training.
    """
    attempt = job.open_attempt
    assert attempt is not None
    protocol = protocol_of(job, attempt.kind)
    if not protocol.retries:
        return Transition(*abandon(job, Reason.ATTEMPT_ABANDONED, text, context))
    after, commands = abandon_all(job, Reason.ATTEMPT_ABANDONED, text, context)
    failures, retry = job.failures + 1, job.spec.retry
    futile = pacing.count_futile(job, attempt, is_lasting=is_lasting)
    after = structs.replace(after, failures=failures, futile=futile)
    if job.status is not JobStatus.RUNNING:  # it was paused while the version was written
        return Transition(after, commands)
    if retry.max_attempts and failures >= retry.max_attempts:
        reason = f"{protocol.describe(job, attempt)} failed {format_count(failures, 'time')}; last failure: {text}"
        return Transition(set_status(after, JobStatus.FAILED, reason), commands)
    if pacing.gives_up(after):
        reason = pacing.describe_pause(after, protocol.describe(job, attempt), text)
        return Transition(set_status(after, JobStatus.PAUSED, reason), commands)
    wait = pacing.backoff_s(retry, failures, context.rng)
    reason = f"{protocol.describe(job, attempt)} attempt {attempt.key.number} was abandoned: {text}; retrying"
    return Transition(structs.replace(after, reason=reason, resume_at=context.now + wait), commands)


def abandon_all(job: JobState, reason: Reason, text: str, context: Context) -> tuple[JobState, tuple[Command, ...]]:
    """Abandon the attempt, and the assignments that the job carries over."""
    after, commands = drop_carried_over(job, reason)
    after, more = abandon(after, reason, text, context)
    return after, commands + more


def abandon(job: JobState, reason: Reason, text: str, context: Context) -> tuple[JobState, tuple[Command, ...]]:
    """End the attempt without a result: stop its busy clients and discard its updates."""
    attempt = job.open_attempt
    assert attempt is not None
    dropped, commands = _drop_open(attempt, reason)
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.ABANDONED)
    ended = protocol_of(job, attempt.kind).forget_messages(attempt.with_assignments(dropped))
    closed = structs.replace(ended, phase=phase, reason=text, ended_at=context.now, step_ends_at=None, num_awaited=0)
    return structs.replace(job, attempt=closed), (*commands, Abandon(attempt.key))


def drop_carried_over(job: JobState, reason: Reason) -> tuple[JobState, tuple[Command, ...]]:
    """End the assignments that the job carries over."""
    dropped, commands = _drop_open(job.carried_over, reason)
    after = structs.replace(job, carried_over=job.carried_over.with_assignments(dropped)) if dropped else job
    return after, commands


def _drop_open(group: AssignmentSet, reason: Reason) -> tuple[list[Assignment], tuple[Command, ...]]:
    still_open = [each for each in group.assignments.values() if each.is_open]
    dropped = [commands.end_assignment(each, AssignmentState.DROPPED, reason) for each in still_open]
    return dropped, tuple(Abort(each.key, each.client_id, reason) for each in still_open if each.is_busy)


def set_status(job: JobState, status: JobStatus, reason: str) -> JobState:
    """Set the job's status."""
    assert job.status not in ENDED_JOBS
    return structs.replace(job, status=require(JOB_TRANSITIONS, job.status, status), reason=reason)


def describe_counts(attempt: Attempt) -> str:
    """Return how many assignments of an attempt are in each state."""
    return ", ".join(f"{count} {state.lower()}" for state, count in sorted(attempt.counts.items()) if count)


MAX_DURATIONS = 500
"""Number of past durations from which an adaptive deadline is computed."""


def await_clients(job: JobState, context: Context) -> JobState:
    """Wait for clients to check in for `deadlines.selection_s`, since none works for the attempt."""
    assert job.attempt is not None
    ends_at = context.now + job.spec.deadlines.selection_s
    return structs.replace(job, attempt=structs.replace(job.attempt, selection_ends_at=ends_at))


def is_in_attempt(job: JobState, assignment: Assignment) -> bool:
    """Return whether an assignment belongs to the last attempt, not to those carried over."""
    return job.attempt is not None and job.attempt.find(assignment.key, assignment.client_id) is not None


def hold_report(job: JobState, reported: Assignment) -> JobState:
    """Queue the report of a carried-over assignment for the next attempt."""
    waiting = structs.replace(reported, report_number=job.carried_over.next_report)
    return structs.replace(job, carried_over=job.carried_over.with_assignments([waiting]))


def measure_duration(job: JobState, assignment: Assignment, context: Context) -> JobState:
    """Remember how long a client took for its training, and also for its upload unless it sends its keys first."""
    durations = (*job.durations, context.now - assignment.assigned_at)[-MAX_DURATIONS:]
    return structs.replace(job, durations=durations)


def accept_report(job: JobState, attempt: Attempt, reported: Assignment, number: int) -> Assignment:
    """Return the report as accepted by the attempt: with its staleness, and its weight by the current claims.

    Later reports may lower the weight (`influence.reweigh`).
    """
    staleness = attempt.base_version - reported.base_version
    weight = protocol_of(job, attempt.kind).weigh(job, reported, staleness)
    return structs.replace(reported, folded_into=attempt.key, staleness=staleness, weight=weight, report_number=number)


def fold_commands(attempt: Attempt, accepted: Iterable[Assignment]) -> tuple[Command, ...]:
    """Return the commands that add accepted updates to the attempt's sum."""
    if attempt.kind not in HAVE_UPDATES:
        return ()
    return tuple(Fold(attempt.key, each.id, each.digest, each.contribution, each.base_version) for each in accepted)


def needs_update(job: JobState, assignment: Assignment) -> bool:
    """Return whether the update of an assignment must be kept, in whole or in part.

    This applies to open assignments, and to every update that the open attempt has accepted: one that was dropped since
    may be in use at this moment.
    """
    protocol = protocol_of(job, assignment.kind)
    if not (protocol.folds and protocol.keeps_updates):
        return False
    attempt = job.open_attempt
    return assignment.is_open or (attempt is not None and assignment.folded_into == attempt.key)


def rebuild_attempt(attempt: Attempt, rows: Iterable[Assignment]) -> tuple[Attempt, AssignmentSet]:
    """Return the last attempt of a job with its assignments, and the assignments carried over, from stored rows.

    `attempt` has no assignments yet. The rows are those made in the attempt, those folded into it, and all that are
    open. Ended assignments that were carried over are left out, because nothing depends on them.
    """
    own: list[Assignment] = []
    carried: list[Assignment] = []
    collects = attempt.kind in HAVE_UPDATES and attempt.phase in {AttemptPhase.SELECTING, *WORKING_PHASES}
    for row in rows:
        if row.is_busy:
            (own if collects or row.kind not in HAVE_UPDATES else carried).append(row)
        elif row.state is AssignmentState.REPORTED and row.folded_into is None:
            carried.append(row)
        elif (row.folded_into or row.key) == attempt.key:
            own.append(row)
    return attempt.with_assignments(own), make_assignment_set(carried)


def verdict_on_report(assignment: Assignment | None, digest: str) -> Verdict:
    """Return the answer to a report on an assignment that has ended; a repeated report is accepted again."""
    if assignment is not None and assignment.state in (AssignmentState.REPORTED, AssignmentState.MERGED):
        same = assignment.digest == digest
        return ACCEPTED if same else Verdict(Reason.REJECTED_CONFLICT)
    return verdict_on_ended(assignment)


def verdict_on_ended(assignment: Assignment | None) -> Verdict:
    """Return the answer to a message on an assignment that has ended, or that the job does not have."""
    if assignment is None or assignment.reason is None:
        return Verdict(Reason.STALE)
    return Verdict(assignment.reason, assignment.text)
