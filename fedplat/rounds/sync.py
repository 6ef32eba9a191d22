"""Rounds, as a pure function: (state, event, context) to (state', commands, verdict).

Read `HANDLERS` first: it has one function for each kind of event except `TimerFired`, which the coordinator handles
itself. `advance` has the transitions that need no event: it opens the next attempt, begins the next phase of a secure
aggregation, commits an evaluation, or ends the job. `reporting` defines how attempts accept reports, `closing` how they
end, `restart` how they resume after a crash, `secure` the phases of a secure aggregation, `buffered` the differences of
a job with a buffer, `ssp` the clocks of its clients if they have some, `exchange` the rounds of a decentralised job,
and `states` the allowed transitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from fedplat.rounds import (
    assignments,
    buffered,
    closing,
    exchange,
    influence,
    operators,
    pacing,
    privacy_rules,
    reporting,
    restart,
    rollback,
    secure,
    secure_messages,
    selection,
    ssp,
    warm_start,
)
from fedplat.rounds.commands import Assign, Command
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    AssignmentReclaimed,
    AssignmentRevoked,
    AttemptAggregated,
    CandidatesDrawn,
    JobEvent,
    KeysAdvertised,
    MasksAnswered,
    OperatorCommand,
    RollbackOrdered,
    RollCalled,
    ServerRestarted,
    SharesSent,
    SiloReported,
    SilosLost,
    SpecChanged,
    SurvivorsConfirmed,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.records import NO_FUTILE, Assignment, Attempt, AttemptKey, JobState, SecureMessages
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
from fedplat.rounds.transition import ACCEPTED, Context, Transition, Verdict


def step(job: JobState, event: JobEvent, context: Context) -> Transition:
    """Apply one event to one job."""
    return HANDLERS[type(event)](job, event, context)


def advance(job: JobState, context: Context) -> Transition | None:
    """Open the next attempt or end the job, if it is time to; None if there is nothing to do."""
    if exchange.is_gossip(job):
        return exchange.advance(job, context)
    attempt = job.open_attempt
    return _begin_next(job, context) if attempt is None else _advance_attempt(job, attempt, context)


def _advance_attempt(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    if attempt.kind is AttemptKind.EVALUATE and attempt.phase is AttemptPhase.COMMITTING:
        # There is nothing to aggregate. The commit is a step of its own, because the history has a row for each state.
        return Transition(closing.commit(job, attempt, context))
    if reporting.fills_buffer(job, attempt):
        return _advance_buffer(job, attempt, context)
    return secure.advance(job, attempt, context) if reporting.is_secure(job, attempt) else None


def _begin_next(job: JobState, context: Context) -> Transition | None:
    if job.status is not JobStatus.RUNNING:
        return None
    if job.resume_at is not None and job.resume_at > context.now:
        return None
    if warm_start.is_due(job):
        return warm_start.begin(job, context)
    if _evaluation_is_due(job):
        return Transition(_open(job, AttemptKind.EVALUATE, context))
    if job.round >= job.spec.rounds or (job.spec.flower is not None and not job.cohort):
        return Transition(closing.set_status(job, JobStatus.COMPLETED, ""))
    if spent := privacy_rules.describe_spent_budget(job):
        return Transition(closing.set_status(job, JobStatus.PAUSED, spent))
    return Transition(_open(job, AttemptKind.TRAIN, context))


def _advance_buffer(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    if attempt.phase is AttemptPhase.SELECTING and buffered.has_carried_over(job):
        return buffered.take_over(job, context)
    if attempt.phase is AttemptPhase.COLLECTING and attempt.num_reported >= attempt.goal:
        return closing.close(job, (), context)  # enough reports were waiting
    return None


def _evaluation_is_due(job: JobState) -> bool:
    evaluation, last = job.spec.evaluation, job.attempt
    if evaluation.clients is None or last is None or last.kind is not AttemptKind.TRAIN:
        return False
    if last.phase is not AttemptPhase.COMMITTED:
        return False
    return evaluation.is_due(job.round, job.spec.rounds)


def _open(job: JobState, kind: AttemptKind, context: Context) -> JobState:
    round_ = job.round + 1 if kind is AttemptKind.TRAIN else job.round
    number = job.attempt.key.number + 1 if job.attempt and job.attempt.key.round == round_ else 1
    goal, minimum, target = job.spec.selection.goal, privacy_rules.minimum(job), job.spec.num_wanted
    if job.spec.flower is not None:
        target, goal, minimum = _flower_sizes(job)
    if job.spec.secure_aggregation is not None:
        minimum = secure.minimum(job.spec)
    if kind is AttemptKind.EVALUATE:
        clients = job.spec.evaluation.clients
        assert clients is not None
        goal = target = clients.goal
        minimum = clients.minimum
    attempt = Attempt(
        key=AttemptKey(job.job_id, round_, number),
        kind=kind,
        phase=AttemptPhase.SELECTING,
        base_version=job.latest.version,
        goal=goal,
        minimum=minimum,
        target=target,
        opened_at=context.now,
        selection_ends_at=context.now + job.spec.deadlines.selection_s,
    )
    return structs.replace(job, attempt=attempt, resume_at=None, barred=secure.bar_culprits(job))


def _flower_sizes(job: JobState) -> tuple[int, int, int]:
    """Return the size of the cohort that the Flower app has drawn, the goal, and the minimum of reports."""
    target, selection = len(job.cohort), job.spec.selection
    goal = max(1, math.floor(round(target / selection.over_selection, 9)))
    return target, goal, selection.minimum_of(goal)


# --- selection ---------------------------------------------------------------------------------------------


def _on_candidates(job: JobState, event: CandidatesDrawn, context: Context) -> Transition:
    attempt = job.open_attempt
    if attempt is not None and exchange.is_gossip(job) and exchange.wants_silos(attempt):
        return exchange.assign(job, event, context)
    if attempt is None or not reporting.wants_clients(job, attempt):
        return Transition(job, verdict=Verdict(Reason.NOT_SELECTED))
    attempt = attempt.count_draw(event.num_waiting, event.num_eligible)
    job = structs.replace(job, attempt=attempt)
    if event.error:
        return closing.fail_attempt(job, event.error, context)
    found, needed = len(event.client_ids), attempt.minimum if event.final else 1
    if privacy_rules.makes_release(job, attempt):
        found, needed = privacy_rules.count_candidates(job, event)
    if reporting.fills_buffer(job, attempt):
        if not found:
            return closing.close_without_clients(job, context)
    elif job.spec.flower is not None and (found or job.fills_cohort):
        return _assign_cohort(job, attempt, event, context)
    elif found < needed:
        text = f"{found} of at least {needed} needed clients were available for selection"
        text += selection.describe_excluded(job, event)
        is_lasting = 0 < needed - found <= event.num_declined
        failed = closing.fail_attempt(job, text, context, is_lasting=is_lasting)
        if exhaustion := privacy_rules.describe_exhaustion(failed.job, event, needed):
            return structs.replace(failed, job=closing.set_status(failed.job, JobStatus.PAUSED, exhaustion))
        return failed
    return _assign(job, attempt, ssp.admit(job, event.client_ids), context)


def _assign_cohort(job: JobState, attempt: Attempt, event: CandidatesDrawn, context: Context) -> Transition:
    """Assign clients that a Flower app has drawn as they arrive; when the time is over, do without the others."""
    drawn = _assign(job, attempt, event.client_ids, context)
    after = drawn.job.attempt
    if not event.final or after is None:
        return drawn
    complete = structs.replace(drawn.job, attempt=structs.replace(after, target=len(after.assignments)))
    return closing.close_if_due(complete, drawn.commands, context)


def _assign(job: JobState, attempt: Attempt, client_ids: Iterable[str], context: Context) -> Transition:
    training_s, upload_s = _timeouts(job, attempt.kind)
    is_secure = reporting.is_secure(job, attempt)
    assigned: list[Assignment] = []
    commands: list[Command] = []
    for client_id in client_ids:
        secret, token_hash = context.new_token()
        assigned.append(
            Assignment(
                key=attempt.key,
                client_id=client_id,
                kind=attempt.kind,
                token_hash=token_hash,
                state=AssignmentState.TRAINING,
                base_version=attempt.base_version,
                assigned_at=context.now,
                deadline_at=context.now + training_s,
                secure=SecureMessages() if is_secure else None,
            )
        )
        commands.append(
            Assign(attempt.key, client_id, attempt.kind, attempt.base_version, secret, training_s, upload_s)
        )
    if attempt.phase is AttemptPhase.SELECTING:
        first = AttemptPhase.ADVERTISING if is_secure else AttemptPhase.COLLECTING
        phase = require(ATTEMPT_TRANSITIONS, attempt.phase, first)
        attempt = structs.replace(attempt, phase=phase, closes_at=privacy_rules.closes_at(job, attempt, context.now))
    after = structs.replace(job, attempt=attempt.with_assignments(assigned), reason="")
    return Transition(after, tuple(commands))


def _timeouts(job: JobState, kind: AttemptKind) -> tuple[float, float]:
    clients = job.spec.evaluation.clients
    if kind is AttemptKind.EVALUATE and clients is not None:
        return clients.timeout_s, 0.0
    deadlines = job.spec.deadlines
    # Only reports in time are learned from: a fleet that has become slower would always miss an adaptive deadline. So a
    # round that failed is retried with the longest deadline.
    durations = job.durations if job.failures == 0 else ()
    return pacing.training_timeout_s(deadlines, durations), deadlines.upload_s


def _on_reclaimed(job: JobState, event: AssignmentReclaimed, context: Context) -> Transition:
    """Issue an open assignment again, with a new token (the old one becomes invalid) and the remaining time."""
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        return Transition(job, verdict=Verdict(Reason.STALE))
    if exchange.is_gossip(job):
        return exchange.reassign(job, assignment, context)
    if assignment.deadline_at <= context.now:  # the timer is about to fire, and no time remains
        late = closing.drop_late(job, context)
        return structs.replace(late, verdict=Verdict(Reason.STALE))
    if assignment.secure is not None and assignment.state is not AssignmentState.TRAINING:
        return secure_messages.end_without_keys(job, assignment)
    secret, token_hash = context.new_token()
    _, upload_s = _timeouts(job, assignment.kind)
    left = assignment.deadline_at - context.now
    again = Assign(assignment.key, event.client_id, assignment.kind, assignment.base_version, secret, left, upload_s)
    return Transition(assignments.put(job, structs.replace(assignment, token_hash=token_hash)), (again,))


# --- reporting ---------------------------------------------------------------------------------------------


def _on_upload_started(job: JobState, event: UploadStarted, context: Context) -> Transition:
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        return Transition(job, verdict=reporting.verdict_on_ended(assignment))
    if assignment.kind is AttemptKind.EVALUATE:  # otherwise it could extend its deadline by upload_s
        return Transition(job, verdict=Verdict(Reason.REJECTED_DIGEST, "an evaluation has no update"))
    if assignment.secure is not None and not (verdict := secure_messages.judge_upload(job, assignment)).accepted:
        return Transition(job, verdict=verdict)
    if assignment.state is AssignmentState.UPLOADING:
        return Transition(job)
    uploading = structs.replace(
        assignment,
        state=require(ASSIGNMENT_TRANSITIONS, assignment.state, AssignmentState.UPLOADING),
        deadline_at=context.now + job.spec.deadlines.upload_s,
    )
    return Transition(assignments.put(job, uploading))


def _on_reported(job: JobState, event: UpdateReported, context: Context) -> Transition:
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        return Transition(job, verdict=reporting.verdict_on_report(assignment, event.digest))
    if assignment.secure is not None and not (verdict := secure_messages.judge_upload(job, assignment)).accepted:
        return Transition(job, verdict=verdict)
    reported = structs.replace(
        assignment,
        state=require(ASSIGNMENT_TRANSITIONS, assignment.state, AssignmentState.REPORTED),
        digest=event.digest,
        num_examples=event.num_examples,
        metrics=privacy_rules.kept_metrics(job, event.metrics),
        took_s=context.now - assignment.assigned_at if assignment.took_s is None else assignment.took_s,
        update_bytes=event.update_bytes,
        norm=event.norm if job.spec.privacy is None and assignment.secure is None else None,
    )
    attempt = job.attempt
    assert attempt is not None
    if assignment.kind is AttemptKind.TRAIN:
        job, verdict = _judge(job, attempt, reported, event)
        if not verdict.accepted:
            return _reject(job, structs.replace(assignment, norm=reported.norm), verdict, context)
        if assignment.secure is None:  # otherwise it was measured when the client advertised its keys
            job = reporting.measure_duration(job, assignment, context)
    if not reporting.is_in_attempt(job, assignment):
        return Transition(buffered.hold_report(job, reported))
    accepted = reporting.accept_report(job, attempt, reported, attempt.next_report)
    after = closing.close_if_due(assignments.put(job, accepted), reporting.fold_commands(attempt, [accepted]), context)
    if (now := after.job.find(assignment.key, assignment.client_id)) is not None and now.reason is not None:
        return structs.replace(
            after, verdict=reporting.verdict_on_ended(now)
        )  # its report closed the attempt, as an outlier
    return after


def _judge(job: JobState, attempt: Attempt, reported: Assignment, event: UpdateReported) -> tuple[JobState, Verdict]:
    """Return whether an update is acceptable, and the job with the client's claim."""
    if reported.secure is not None:
        return job, secure_messages.judge_report(event)
    job = influence.remember_claim(job, reported)
    return job, influence.judge_norm(job, attempt, reported)


def _reject(job: JobState, assignment: Assignment, verdict: Verdict, context: Context) -> Transition:
    assert verdict.reason is not None
    rejected = assignments.end(assignment, AssignmentState.REJECTED, verdict.reason, verdict.text)
    after = assignments.put(job, rejected)
    is_in_attempt = reporting.is_in_attempt(job, assignment)
    then = closing.close_if_due(after, (), context) if is_in_attempt else Transition(after)
    return structs.replace(then, verdict=verdict)


def _on_rejected(job: JobState, event: UpdateRejected, context: Context) -> Transition:
    return _end_one(job, event, AssignmentState.REJECTED, context)


def _on_failed(job: JobState, event: AssignmentFailed, context: Context) -> Transition:
    return _end_one(job, event, AssignmentState.FAILED, context)


def _on_revoked(job: JobState, event: AssignmentRevoked, context: Context) -> Transition:
    assignment = job.find(event.key, event.client_id)
    if assignment is not None and assignment.state is AssignmentState.REPORTED:
        return closing.withdraw(job, assignment, context)
    text = REASON_TEXTS[Reason.REVOKED]
    failed = AssignmentFailed(event.key, event.client_id, Reason.REVOKED, text)
    return _end_one(job, failed, AssignmentState.FAILED, context)


def _end_one(
    job: JobState, event: UpdateRejected | AssignmentFailed, state: AssignmentState, context: Context
) -> Transition:
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        same = assignment is not None and (assignment.state, assignment.reason) == (state, event.reason)
        return Transition(job, verdict=ACCEPTED if same else reporting.verdict_on_ended(assignment))
    after = assignments.put(job, assignments.end(assignment, state, event.reason, event.text))
    if exchange.is_gossip(job):
        return exchange.on_ended(after, event.client_id, context)
    return closing.close_if_due(after, (), context) if reporting.is_in_attempt(job, assignment) else Transition(after)


# --- the end of an attempt ---------------------------------------------------------------------------------


def _on_aggregated(job: JobState, event: AttemptAggregated, context: Context) -> Transition:
    attempt = job.open_attempt
    if attempt is None or attempt.key != event.key or attempt.phase is not AttemptPhase.COMMITTING:
        return Transition(job, verdict=Verdict(Reason.STALE))
    assert event.version.version == attempt.base_version + 1
    refused = [
        assignments.end(each, AssignmentState.REJECTED, Reason.REJECTED_SCHEMA, event.refused[each.client_id])
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
        after,
        latest=event.version,
        round=attempt.key.round,
        failures=0,
        futile=NO_FUTILE,
        reason=reason,
        cohort=event.cohort,
    )
    return Transition(after) if job.spec.buffered is None else Transition(*buffered.stop_stale(after))


def _on_aggregation_failed(job: JobState, event: AggregationFailed, context: Context) -> Transition:
    attempt = job.open_attempt
    if attempt is None or attempt.key != event.key:
        return Transition(job, verdict=Verdict(Reason.STALE))
    text = event.text if warm_start.is_warm_start(attempt) else f"aggregation failed: {event.text}"
    job = secure.reject_culprits(job, attempt, event.culprits, event.text)
    return closing.fail_attempt(job, text, context, is_lasting=event.is_lasting)


HANDLERS: Mapping[type[Any], Callable[[JobState, Any, Context], Transition]] = {
    OperatorCommand: operators.on_operator,
    SpecChanged: operators.on_changed,
    RollbackOrdered: rollback.on_rollback,
    ServerRestarted: restart.on_restart,
    CandidatesDrawn: _on_candidates,
    RollCalled: ssp.on_roll_call,
    SiloReported: exchange.on_reported,
    SilosLost: exchange.on_lost,
    AssignmentReclaimed: _on_reclaimed,
    UploadStarted: _on_upload_started,
    KeysAdvertised: secure_messages.on_keys,
    SharesSent: secure_messages.on_shares,
    SurvivorsConfirmed: secure_messages.on_confirmation,
    MasksAnswered: secure_messages.on_answer,
    UpdateReported: _on_reported,
    UpdateRejected: _on_rejected,
    AssignmentFailed: _on_failed,
    AssignmentRevoked: _on_revoked,
    AttemptAggregated: _on_aggregated,
    AggregationFailed: _on_aggregation_failed,
}
