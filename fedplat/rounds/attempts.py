"""The life of an attempt, as far as it is common to all kinds: it opens, gets clients and reports, and commits.

`protocols` has what distinguishes the kinds; `closing` how attempts end, and `interventions` how they resume.
Pure functions: (state, event, context) to (state', commands, verdict).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from fedplat.rounds import approvals, closing, commands, events, influence, pacing, privacy_rules, selection
from fedplat.rounds.commands import ACCEPTED, Assign, Command, Context, Transition, Verdict
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.base import list_protocols, protocol_of, training_of
from fedplat.rounds.records import NO_FUTILE, Assignment, Attempt, AttemptKey, JobState
from fedplat.rounds.states import (
    ASSIGNMENT_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    REASON_TEXTS,
    AssignmentState,
    AttemptKind,
    AttemptPhase,
    JobStatus,
    Reason,
    require,
)


def begin_next(job: JobState, context: Context) -> Transition | None:
    """Open the next attempt or end the job, if it is time to; None if there is nothing to do."""
    if job.status is not JobStatus.RUNNING:
        return None
    if job.resume_at is not None and job.resume_at > context.now:
        return None
    if approvals.is_awaiting(job) and not approvals.has_quorum(job):
        return None
    for protocol in list_protocols(job):
        if (begun := protocol.begin(job, context)) is not None:
            return begun
    return None


def open_attempt(job: JobState, kind: AttemptKind, context: Context) -> JobState:
    """Return the job with a new attempt, which selects its clients."""
    protocol = protocol_of(job, kind)
    round_ = job.round + 1 if protocol.folds else job.round
    number = job.attempt.key.number + 1 if job.attempt and job.attempt.key.round == round_ else 1
    sizes = protocol.sizes(job)
    attempt = Attempt(
        key=AttemptKey(job.job_id, round_, number),
        kind=kind,
        phase=AttemptPhase.SELECTING,
        base_version=job.latest.version,
        goal=sizes.goal,
        minimum=sizes.minimum,
        target=sizes.target,
        opened_at=context.now,
        selection_ends_at=context.now + job.spec.deadlines.selection_s,
    )
    return structs.replace(job, attempt=attempt, resume_at=None)


def selects(job: JobState) -> bool:
    """Return whether the open attempt waits for clients to check in: for its first ones, or for more of them."""
    attempt = job.open_attempt
    return attempt is not None and protocol_of(job, attempt.kind).selects(job, attempt)


def next_deadline(job: JobState) -> float | None:
    """Return the moment of the next change of this job that needs no other event, if there is one."""
    attempt, moments = job.open_attempt, list[float | None]()
    if attempt is not None:
        moments += protocol_of(job, attempt.kind).deadlines(job, attempt)
    elif job.status is JobStatus.RUNNING:
        moments.append(job.resume_at)
    if job.carried_over.num_busy:
        moments.append(job.carried_over.next_deadline)
    if job.status is JobStatus.RUNNING:
        moments.append(training_of(job).membership.next_moment(job))
    return min((moment for moment in moments if moment is not None), default=None)


# --- selection ---------------------------------------------------------------------------------------------


def on_candidates(job: JobState, event: events.CandidatesDrawn, context: Context) -> Transition:
    """Give the drawn clients assignments, or fail the attempt if there are too few."""
    attempt = job.open_attempt
    if attempt is None or (protocol := protocol_of(job, attempt.kind)).demand(job, attempt) is None:
        return Transition(job, verdict=Verdict(Reason.NOT_SELECTED))
    attempt = attempt.count_draw(event.num_waiting, event.num_eligible)
    job = structs.replace(job, attempt=attempt)
    if event.error:
        return closing.fail_attempt(job, event.error, context)
    return protocol.on_drawn(job, attempt, event, context)


def assign_cohort(job: JobState, attempt: Attempt, event: events.CandidatesDrawn, context: Context) -> Transition:
    """Assign the drawn clients, or fail the attempt if they are too few."""
    found, needed = protocol_of(job, attempt.kind).count_candidates(job, attempt, event)
    if found >= needed:
        return assign(job, attempt, event.client_ids, context)
    text = f"{found} of at least {needed} needed clients were available for selection"
    text += selection.describe_excluded(job, event)
    is_lasting = 0 < needed - found <= event.num_declined
    failed = closing.fail_attempt(job, text, context, is_lasting=is_lasting)
    if exhaustion := privacy_rules.describe_exhaustion(failed.job, event, needed):
        return structs.replace(failed, job=closing.set_status(failed.job, JobStatus.PAUSED, exhaustion))
    return failed


def assign(job: JobState, attempt: Attempt, client_ids: Iterable[str], context: Context) -> Transition:
    """Give clients assignments; the first ones begin the work of the attempt."""
    protocol = protocol_of(job, attempt.kind)
    training_s, upload_s = protocol.timeouts(job)
    assigned: list[Assignment] = []
    commands: list[Command] = []
    for client_id in client_ids:
        assignment, command = make_assignment(attempt, client_id, training_s, upload_s, context)
        assigned.append(structs.replace(assignment, secure=protocol.make_part()))
        commands.append(command)
    if attempt.phase is AttemptPhase.SELECTING:
        phase = require(ATTEMPT_TRANSITIONS, attempt.phase, protocol.first_phase)
        attempt = structs.replace(attempt, phase=phase, closes_at=protocol.closes_at(job, context.now))
    after = structs.replace(job, attempt=attempt.with_assignments(assigned), reason="")
    return Transition(after, tuple(commands))


def make_assignment(
    attempt: Attempt, client_id: str, training_s: float, upload_s: float, context: Context
) -> tuple[Assignment, Assign]:
    """Return a new assignment of a client, and the command that gives it to the client."""
    secret, token_hash = context.new_token()
    assignment = Assignment(
        key=attempt.key,
        client_id=client_id,
        kind=attempt.kind,
        token_hash=token_hash,
        state=AssignmentState.TRAINING,
        base_version=attempt.base_version,
        assigned_at=context.now,
        deadline_at=context.now + training_s,
    )
    return assignment, Assign(attempt.key, client_id, attempt.kind, attempt.base_version, secret, training_s, upload_s)


def timeouts(job: JobState) -> tuple[float, float]:
    """Return how long a client may train and upload."""
    deadlines = job.spec.deadlines
    # Only reports in time are learned from: a fleet that has become slower would always miss an adaptive deadline. So a
    # round that failed is retried with the longest deadline.
    durations = job.durations if job.failures == 0 else ()
    return pacing.training_timeout_s(deadlines, durations), deadlines.upload_s


def on_reclaimed(job: JobState, event: events.AssignmentReclaimed, context: Context) -> Transition:
    """Issue an open assignment again, with a new token: the old one becomes invalid."""
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        return Transition(job, verdict=Verdict(Reason.STALE))
    return protocol_of(job, assignment.kind).on_reclaimed(job, assignment, context)


def reassign(job: JobState, assignment: Assignment, context: Context) -> Transition:
    """Issue an open assignment again, with the remaining time."""
    if assignment.deadline_at <= context.now:  # the timer is about to fire, and no time remains
        late = closing.drop_late(job, context)
        return structs.replace(late, verdict=Verdict(Reason.STALE))
    _, upload_s = protocol_of(job, assignment.kind).timeouts(job)
    return issue_again(job, assignment, assignment.deadline_at - context.now, upload_s, context)


def issue_again(
    job: JobState, assignment: Assignment, training_s: float, upload_s: float, context: Context
) -> Transition:
    """Give a client its open assignment again, with a new token and the time that is left."""
    secret, token_hash = context.new_token()
    key, client_id, kind, base = assignment.key, assignment.client_id, assignment.kind, assignment.base_version
    again = Assign(key, client_id, kind, base, secret, training_s, upload_s)
    return Transition(commands.put_assignment(job, structs.replace(assignment, token_hash=token_hash)), (again,))


# --- reporting ---------------------------------------------------------------------------------------------


def on_upload_started(job: JobState, event: events.UploadStarted, context: Context) -> Transition:
    """Begin the upload of an update, for which the client has more time."""
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        return Transition(job, verdict=closing.verdict_on_ended(assignment))
    if not (verdict := protocol_of(job, assignment.kind).judge_upload(job, assignment)).accepted:
        return Transition(job, verdict=verdict)
    if assignment.state is AssignmentState.UPLOADING:
        return Transition(job)
    uploading = structs.replace(
        assignment,
        state=require(ASSIGNMENT_TRANSITIONS, assignment.state, AssignmentState.UPLOADING),
        deadline_at=context.now + job.spec.deadlines.upload_s,
    )
    return Transition(commands.put_assignment(job, uploading))


def on_reported(job: JobState, event: events.UpdateReported, context: Context) -> Transition:
    """Take the report of a client that is working."""
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        return Transition(job, verdict=closing.verdict_on_report(assignment, event.digest))
    return protocol_of(job, assignment.kind).on_reported(job, assignment, event, context)


def take_report(job: JobState, assignment: Assignment, event: events.UpdateReported, context: Context) -> Transition:
    """Accept or refuse a report, and close the attempt if it was the last one."""
    protocol, limits = protocol_of(job, assignment.kind), disclosure_of(job.spec)
    is_measured = assignment.took_s is not None
    reported = structs.replace(
        assignment,
        state=require(ASSIGNMENT_TRANSITIONS, assignment.state, AssignmentState.REPORTED),
        digest=event.digest,
        num_examples=event.num_examples,
        metrics=limits.kept_metrics(event.metrics),
        took_s=assignment.took_s if is_measured else context.now - assignment.assigned_at,
        update_bytes=event.update_bytes,
        norm=limits.kept_norm(event.norm),
    )
    attempt = job.attempt
    assert attempt is not None
    job, verdict = protocol.judge_report(job, attempt, reported, event)
    if not verdict.accepted:
        return _reject(job, structs.replace(assignment, norm=reported.norm), verdict, context)
    if protocol.folds and not is_measured:
        job = closing.measure_duration(job, assignment, context)
    if not closing.is_in_attempt(job, assignment):
        return Transition(closing.hold_report(job, reported))
    accepted = closing.accept_report(job, attempt, reported, attempt.next_report)
    after = closing.close_if_due(
        commands.put_assignment(job, accepted), closing.fold_commands(attempt, [accepted]), context
    )
    if (now := after.job.find(assignment.key, assignment.client_id)) is not None and now.reason is not None:
        return structs.replace(
            after, verdict=closing.verdict_on_ended(now)
        )  # its report closed the attempt, as an outlier
    return after


def judge_claim(
    job: JobState, attempt: Attempt, reported: Assignment, event: events.UpdateReported
) -> tuple[JobState, Verdict]:
    """Return whether an update is acceptable, and the job with the client's claim."""
    job = influence.remember_claim(job, reported)
    return job, influence.judge_norm(job, attempt, reported)


def _reject(job: JobState, assignment: Assignment, verdict: Verdict, context: Context) -> Transition:
    assert verdict.reason is not None
    rejected = commands.end_assignment(assignment, AssignmentState.REJECTED, verdict.reason, verdict.text)
    after = commands.put_assignment(job, rejected)
    return structs.replace(go_on(after, assignment, context), verdict=verdict)


def go_on(job: JobState, ended: Assignment, context: Context) -> Transition:
    """Close the attempt if it waited only for an assignment that has ended."""
    return closing.close_if_due(job, (), context) if closing.is_in_attempt(job, ended) else Transition(job)


def on_rejected(job: JobState, event: events.UpdateRejected, context: Context) -> Transition:
    """End the assignment of a client whose update was received and refused."""
    return _end_one(job, event, AssignmentState.REJECTED, context)


def on_failed(job: JobState, event: events.AssignmentFailed, context: Context) -> Transition:
    """End the assignment of a client that gave it up."""
    return _end_one(job, event, AssignmentState.FAILED, context)


def on_revoked(job: JobState, event: events.AssignmentRevoked, context: Context) -> Transition:
    """End the assignment of a revoked client; a report of it does not count."""
    assignment = job.find(event.key, event.client_id)
    if assignment is not None and assignment.state is AssignmentState.REPORTED:
        return closing.withdraw(job, assignment, context)
    text = REASON_TEXTS[Reason.REVOKED]
    failed = events.AssignmentFailed(event.key, event.client_id, Reason.REVOKED, text)
    return _end_one(job, failed, AssignmentState.FAILED, context)


def _end_one(
    job: JobState, event: events.UpdateRejected | events.AssignmentFailed, state: AssignmentState, context: Context
) -> Transition:
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        same = assignment is not None and (assignment.state, assignment.reason) == (state, event.reason)
        return Transition(job, verdict=ACCEPTED if same else closing.verdict_on_ended(assignment))
    after = commands.put_assignment(job, commands.end_assignment(assignment, state, event.reason, event.text))
    return protocol_of(job, assignment.kind).on_ended(after, assignment, context)


# --- the end of an attempt ---------------------------------------------------------------------------------


def on_aggregated(job: JobState, event: events.AttemptAggregated, context: Context) -> Transition:
    """Commit the attempt whose version is durable."""
    attempt = job.open_attempt
    if attempt is None or attempt.key != event.key or attempt.phase is not AttemptPhase.COMMITTING:
        return Transition(job, verdict=Verdict(Reason.STALE))
    assert event.version.version == attempt.base_version + 1
    refused = [
        commands.end_assignment(each, AssignmentState.REJECTED, Reason.REJECTED_SCHEMA, event.refused[each.client_id])
        for each in attempt.reported
        if each.client_id in event.refused
    ]
    attempt = attempt.with_assignments(refused)
    job = structs.replace(job, attempt=attempt)
    if event.version.num_updates != attempt.num_reported:
        text = f"{event.version.num_updates} of {attempt.num_reported} accepted updates were aggregated"
        return closing.fail_attempt(job, text, context)
    after = closing.commit(job, attempt, context, event.metrics)
    # A job that was paused meanwhile keeps the reason of its pause.
    reason = "" if job.status is JobStatus.RUNNING else job.reason
    after = structs.replace(
        after, latest=event.version, round=attempt.key.round, failures=0, futile=NO_FUTILE, reason=reason
    )
    return training_of(after).on_committed(after, event)


def on_aggregation_failed(job: JobState, event: events.AggregationFailed, context: Context) -> Transition:
    """Fail the attempt whose updates could not be aggregated."""
    attempt = job.open_attempt
    if attempt is None or attempt.key != event.key:
        return Transition(job, verdict=Verdict(Reason.STALE))
    after, text = protocol_of(job, attempt.kind).on_aggregation_failed(job, attempt, event)
    return closing.fail_attempt(after, text, context, is_lasting=event.is_lasting)
