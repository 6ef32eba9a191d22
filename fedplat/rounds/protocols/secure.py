"""Secure aggregation: rounds in phases (`secure_phases`), of which the server learns the sum only.

Each message is taken once, in its own phase, and never replaced: the same bytes again, then or later, are accepted
without a change, and other bytes are refused. The driver has validated the messages (`unmasking.check_keys` and the
others), which takes the keys and shares of the other clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from msgspec import structs

from fedplat.errors import SecureAggregationError
from fedplat.job import JobSpec
from fedplat.job.secure import group_minimum, num_groups, require_secure
from fedplat.rounds import attempts, changes, closing, commands, events, interventions
from fedplat.rounds.commands import ACCEPTED, Context, Transition, Verdict
from fedplat.rounds.demand import Demand
from fedplat.rounds.protocols import averaging, secure_phases
from fedplat.rounds.protocols.base import AttemptSizes, Ending, PhaseProgress, RoundProtocol, register
from fedplat.rounds.protocols.secure_phases import messages_of
from fedplat.rounds.records import Assignment, Attempt, JobState, SecureMessages
from fedplat.rounds.states import ASSIGNMENT_TRANSITIONS, REASON_TEXTS, AssignmentState, AttemptPhase, Reason, require
from fedplat.secure_aggregation import messages, setup


@dataclasses.dataclass(frozen=True)
class _Step:
    """A message: its field, the phase and the state in which it is taken, and the phases in which it is too late.

    A message that is too late is accepted without an effect: its client is a survivor without it.
    """

    field: str
    phase: AttemptPhase
    state: AssignmentState
    later: frozenset[AttemptPhase] = frozenset()


_KEYS = _Step("keys", AttemptPhase.ADVERTISING, AssignmentState.TRAINING)
_SHARES = _Step("shares", AttemptPhase.SHARING, AssignmentState.ADVERTISED)
_CONFIRMATION = _Step(
    "confirmation",
    AttemptPhase.CONFIRMING,
    AssignmentState.REPORTED,
    frozenset({AttemptPhase.UNMASKING, AttemptPhase.COMMITTING}),
)
_ANSWER = _Step("answer", AttemptPhase.UNMASKING, AssignmentState.REPORTED, frozenset({AttemptPhase.COMMITTING}))


def list_sent(assignment: Assignment) -> Mapping[str, bytes]:
    """Return the messages that a client has sent, by their kinds."""
    part = assignment.secure
    return {} if part is None else {kind: sent for kind in changes.MESSAGE_KINDS if (sent := getattr(part, kind))}


def forget(attempt: Attempt) -> Attempt:
    """Remove the messages from an attempt that ends; groups and positions stay.

    No row changes: the store keeps the messages apart, and removes them with the end of the attempt.
    """
    changed: list[Assignment] = []
    for each in attempt.assignments.values():
        if each.secure is not None:
            bare = SecureMessages(each.secure.group, each.secure.position)
            if bare != each.secure:
                changed.append(structs.replace(each, secure=bare))
    return attempt.with_assignments(changed) if changed else attempt


def count_phase(job: JobState, attempt: Attempt) -> PhaseProgress | None:
    """Count the clients that have sent their messages of a phase."""
    counts, phase = attempt.counts, attempt.phase
    advertised, shared, uploading, reported = (
        counts.get(state, 0)
        for state in (
            AssignmentState.ADVERTISED,
            AssignmentState.SHARED,
            AssignmentState.UPLOADING,
            AssignmentState.REPORTED,
        )
    )
    match phase:
        case AttemptPhase.ADVERTISING:
            return PhaseProgress(phase, advertised, attempt.goal)
        case AttemptPhase.SHARING:
            return PhaseProgress(phase, shared, advertised + shared)
        case AttemptPhase.COLLECTING:
            return PhaseProgress(phase, reported, shared + uploading + reported)
        case AttemptPhase.CONFIRMING:
            return PhaseProgress(phase, _count_sent(attempt, "confirmation"), reported)
        case AttemptPhase.UNMASKING:
            return PhaseProgress(phase, _count_sent(attempt, "answer"), reported)
        case _:
            return None


def _count_sent(attempt: Attempt, kind: str) -> int:
    return sum(kind in list_sent(each) for each in attempt.assignments.values())


def on_keys(job: JobState, event: events.KeysAdvertised, context: Context) -> Transition:
    """Store the keys of a client that has trained. Invalid keys, or those of another client, end its assignment."""
    found = _find_sender(job, event, _KEYS, event.keys)
    if isinstance(found, Verdict):
        return Transition(job, verdict=found)
    assert job.attempt is not None
    if text := _describe_key_fault(job.attempt, event.keys):
        rejected = commands.end_assignment(found, AssignmentState.REJECTED, Reason.REJECTED_MESSAGE, text)
        return Transition(commands.put_assignment(job, rejected), verdict=Verdict(Reason.REJECTED_MESSAGE, text))
    step_s = require_secure(job.spec).step_s
    advertised = structs.replace(
        found,
        state=require(ASSIGNMENT_TRANSITIONS, found.state, AssignmentState.ADVERTISED),
        deadline_at=found.deadline_at + step_s,
        took_s=context.now - found.assigned_at,
        secure=structs.replace(messages_of(found), keys=event.keys),
    )
    return Transition(commands.put_assignment(closing.measure_duration(job, found, context), advertised))


def on_shares(job: JobState, event: events.SharesSent, context: Context) -> Transition:
    """Store the shares of a client."""
    found = _find_sender(job, event, _SHARES, event.shares)
    if isinstance(found, Verdict):
        return Transition(job, verdict=found)
    shared = structs.replace(
        found,
        state=require(ASSIGNMENT_TRANSITIONS, found.state, AssignmentState.SHARED),
        deadline_at=found.deadline_at + job.spec.deadlines.upload_s,
        secure=structs.replace(messages_of(found), shares=event.shares),
    )
    return Transition(commands.put_assignment(job, shared))


def on_confirmation(job: JobState, event: events.SurvivorsConfirmed, context: Context) -> Transition:
    """Store a client's confirmation of the survivors."""
    found = _find_sender(job, event, _CONFIRMATION, event.confirmation)
    if isinstance(found, Verdict):
        return Transition(job, verdict=found)
    confirmed = structs.replace(messages_of(found), confirmation=event.confirmation)
    return Transition(_count_message(commands.put_assignment(job, structs.replace(found, secure=confirmed))))


def on_answer(job: JobState, event: events.MasksAnswered, context: Context) -> Transition:
    """Store a client's shares of the others' masks."""
    found = _find_sender(job, event, _ANSWER, event.answer)
    if isinstance(found, Verdict):
        return Transition(job, verdict=found)
    answered = structs.replace(messages_of(found), answer=event.answer)
    return Transition(_count_message(commands.put_assignment(job, structs.replace(found, secure=answered))))


def end_without_keys(job: JobState, assignment: Assignment) -> Transition:
    """End the assignment of a client that was restarted after it had sent its keys."""
    text = REASON_TEXTS[Reason.KEYS_LOST]
    ended = commands.end_assignment(assignment, AssignmentState.FAILED, Reason.KEYS_LOST, text)
    return Transition(commands.put_assignment(job, ended), verdict=Verdict(Reason.KEYS_LOST, text))


def judge_upload(job: JobState, assignment: Assignment) -> Verdict:
    """Return whether a client may upload now: only a masked update, which it has from the shares that it holds."""
    attempt = job.attempt
    assert attempt is not None
    if attempt.phase is AttemptPhase.COLLECTING:  # all other clients have ended
        return ACCEPTED
    text = f"the attempt is {attempt.phase}: a client of a secure aggregation uploads only while it is COLLECTING"
    return Verdict(Reason.STALE, text)


def judge_report(event: events.UpdateReported) -> Verdict:
    """Return whether a report reveals nothing about its masked update."""
    if event.num_examples != 1.0:
        text = f"a masked update counts as 1 example, not {event.num_examples:g}: its weight is inside"
        return Verdict(Reason.REJECTED_WEIGHT, text)
    if event.metrics:
        return Verdict(Reason.REJECTED_METRICS, "a masked update has its metrics inside; expected none with the report")
    return ACCEPTED


def _find_sender(
    job: JobState,
    event: events.KeysAdvertised | events.SharesSent | events.SurvivorsConfirmed | events.MasksAnswered,
    step: _Step,
    content: bytes,
) -> Assignment | Verdict:
    """Return the assignment whose next message this is; else the answer to its sender."""
    assignment, attempt = job.find(event.key, event.client_id), job.attempt
    if assignment is not None and assignment.secure is not None and assignment.state is AssignmentState.MERGED:
        return ACCEPTED  # it is part of the version; the messages were forgotten
    if assignment is None or not assignment.is_open:
        return closing.verdict_on_ended(assignment)
    assert attempt is not None
    if assignment.secure is None:
        return Verdict(Reason.STALE, "the assignment has no secure aggregation")
    if stored := getattr(assignment.secure, step.field):
        text = f"the client has sent other bytes as its {step.field} before; the first are kept"
        return ACCEPTED if stored == content else Verdict(Reason.REJECTED_CONFLICT, text)
    if attempt.phase is step.phase and assignment.state is step.state:
        return assignment
    if attempt.phase in step.later and assignment.state is step.state:
        return ACCEPTED
    text = f"the attempt is {attempt.phase}: it takes the {step.field} of a client only while it is {step.phase}"
    return Verdict(Reason.STALE, text)


def _describe_key_fault(attempt: Attempt, content: bytes) -> str:
    """Return what is wrong with the keys of a client; empty if they are fresh.

    A key in the message of another client is found as bytes: decoding the messages of all for each takes long.
    """
    try:
        keys = messages.KeyAdvertisement.from_bytes(content)
    except SecureAggregationError as exc:
        return str(exc)
    if keys.encryption_key == keys.masking_key:
        return "the two public keys are the same; expected a fresh key for each purpose"
    for other in attempt.assignments.values():
        sent = messages_of(other).keys
        if sent and (keys.encryption_key in sent or keys.masking_key in sent):
            return "another client of the attempt has sent the same public key; expected fresh keys in each attempt"
    return ""


def _count_message(job: JobState) -> JobState:
    """Count a message of a step in which no client is busy."""
    assert job.attempt is not None
    return structs.replace(job, attempt=structs.replace(job.attempt, num_awaited=max(0, job.attempt.num_awaited - 1)))


def _begin(job: JobState, context: Context) -> Transition:
    """Bar clients with invalid messages from the attempt that begins."""
    begun = averaging.begin(job, context)
    if begun.job.open_attempt is None:
        return begun
    return structs.replace(begun, job=structs.replace(begun.job, barred=secure_phases.bar_culprits(job)))


def _list_needs(spec: JobSpec) -> list[tuple[str, int]]:
    needs, needed = averaging.list_needs(spec), num_groups(spec) * group_minimum(spec)
    return [needs[0], (f"secure_aggregation: its groups need {needed:,} clients", needed), *needs[1:]]


def _demand(job: JobState, attempt: Attempt) -> Demand | None:
    demand = averaging.demand_cohort(job, attempt)
    return dataclasses.replace(demand, barred=frozenset(job.barred)) if demand is not None else None


def _on_reclaimed(job: JobState, assignment: Assignment, context: Context) -> Transition:
    """End the assignment of a client whose keys are lost."""
    if assignment.deadline_at > context.now and assignment.state is not AssignmentState.TRAINING:
        return end_without_keys(job, assignment)
    return attempts.reassign(job, assignment, context)


def _on_reported(job: JobState, assignment: Assignment, event: events.UpdateReported, context: Context) -> Transition:
    """Take a report that reveals nothing, while the attempt collects."""
    if not (verdict := judge_upload(job, assignment)).accepted:
        return Transition(job, verdict=verdict)
    return attempts.take_report(job, assignment, dataclasses.replace(event, norm=None), context)


def _blame(job: JobState, attempt: Attempt, event: events.AggregationFailed) -> tuple[JobState, str]:
    job, text = averaging.describe_failure(job, attempt, event)
    return secure_phases.reject_culprits(job, attempt, event.culprits, event.text), text


def _longest_s(job: JobState, assignment: Assignment) -> float:
    longest = job.spec.deadlines.training_s
    if assignment.state is AssignmentState.ADVERTISED:
        longest += require_secure(job.spec).step_s
    return min(longest, assignment.deadline_at - assignment.assigned_at)


def _resume(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Give the steps their whole time again: clients have to reconnect."""
    job = interventions.bound_deadlines(job, context.now)
    if attempt.phase is not AttemptPhase.COMMITTING and job.spec.durability != "memory":
        job = secure_phases.resume(job, context)
    return interventions.refold_updates(job, attempt, context)


SECURE = register(
    RoundProtocol(
        name="secure",
        has_masks=True,
        features=frozenset({setup.FEATURE}),
        first_phase=AttemptPhase.ADVERTISING,
        handlers={
            events.KeysAdvertised: on_keys,
            events.SharesSent: on_shares,
            events.SurvivorsConfirmed: on_confirmation,
            events.MasksAnswered: on_answer,
        },
        list_needs=_list_needs,
        begin=_begin,
        sizes=lambda job: AttemptSizes(job.spec.selection.goal, secure_phases.minimum(job.spec), job.spec.num_wanted),
        advance=secure_phases.advance,
        count_phase=count_phase,
        demand=_demand,
        make_part=SecureMessages,
        list_messages=list_sent,
        forget_messages=forget,
        longest_s=_longest_s,
        on_reclaimed=_on_reclaimed,
        judge_upload=judge_upload,
        on_reported=_on_reported,
        judge_report=lambda job, attempt, reported, event: (job, judge_report(event)),
        weigh=lambda job, reported, staleness: 1.0,  # its own is inside
        judge_end=lambda job, attempt, context: Ending.WAIT,  # `secure_phases.advance` closes it
        on_aggregation_failed=_blame,
        resume=_resume,
    )
)
