"""How an attempt with secure aggregation takes the messages of its clients. Pure functions.

Each message is taken once, in its own phase, and never replaced: the same bytes again, then or later, are accepted
without a change, and other bytes are refused. The driver has validated the messages (`unmasking.check_keys` and the
others), which takes the keys and shares of the other clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from msgspec import structs

from fedplat.errors import SecureAggregationError
from fedplat.job.secure import require_secure
from fedplat.rounds import assignments, reporting
from fedplat.rounds.changes import MESSAGE_KINDS
from fedplat.rounds.events import KeysAdvertised, MasksAnswered, SharesSent, SurvivorsConfirmed, UpdateReported
from fedplat.rounds.protocols.base import PhaseProgress
from fedplat.rounds.protocols.secure_phases import messages_of
from fedplat.rounds.records import Assignment, Attempt, JobState, SecureMessages
from fedplat.rounds.states import (
    ASSIGNMENT_TRANSITIONS,
    REASON_TEXTS,
    AssignmentState,
    AttemptPhase,
    Reason,
    require,
)
from fedplat.rounds.transition import ACCEPTED, Context, Transition, Verdict
from fedplat.secure_aggregation.messages import KeyAdvertisement


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
    return {} if part is None else {kind: sent for kind in MESSAGE_KINDS if (sent := getattr(part, kind))}


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


def on_keys(job: JobState, event: KeysAdvertised, context: Context) -> Transition:
    """Store the keys of a client that has trained. Invalid keys, or those of another client, end its assignment."""
    found = _find_sender(job, event, _KEYS, event.keys)
    if isinstance(found, Verdict):
        return Transition(job, verdict=found)
    assert job.attempt is not None
    if text := _describe_key_fault(job.attempt, event.keys):
        rejected = assignments.end(found, AssignmentState.REJECTED, Reason.REJECTED_MESSAGE, text)
        return Transition(assignments.put(job, rejected), verdict=Verdict(Reason.REJECTED_MESSAGE, text))
    step_s = require_secure(job.spec).step_s
    advertised = structs.replace(
        found,
        state=require(ASSIGNMENT_TRANSITIONS, found.state, AssignmentState.ADVERTISED),
        deadline_at=found.deadline_at + step_s,
        took_s=context.now - found.assigned_at,
        secure=structs.replace(messages_of(found), keys=event.keys),
    )
    return Transition(assignments.put(reporting.measure_duration(job, found, context), advertised))


def on_shares(job: JobState, event: SharesSent, context: Context) -> Transition:
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
    return Transition(assignments.put(job, shared))


def on_confirmation(job: JobState, event: SurvivorsConfirmed, context: Context) -> Transition:
    """Store a client's confirmation of the survivors."""
    found = _find_sender(job, event, _CONFIRMATION, event.confirmation)
    if isinstance(found, Verdict):
        return Transition(job, verdict=found)
    confirmed = structs.replace(messages_of(found), confirmation=event.confirmation)
    return Transition(_count_message(assignments.put(job, structs.replace(found, secure=confirmed))))


def on_answer(job: JobState, event: MasksAnswered, context: Context) -> Transition:
    """Store a client's shares of the others' masks."""
    found = _find_sender(job, event, _ANSWER, event.answer)
    if isinstance(found, Verdict):
        return Transition(job, verdict=found)
    answered = structs.replace(messages_of(found), answer=event.answer)
    return Transition(_count_message(assignments.put(job, structs.replace(found, secure=answered))))


def end_without_keys(job: JobState, assignment: Assignment) -> Transition:
    """End the assignment of a client that was restarted after it had sent its keys."""
    text = REASON_TEXTS[Reason.KEYS_LOST]
    ended = assignments.end(assignment, AssignmentState.FAILED, Reason.KEYS_LOST, text)
    return Transition(assignments.put(job, ended), verdict=Verdict(Reason.KEYS_LOST, text))


def judge_upload(job: JobState, assignment: Assignment) -> Verdict:
    """Return whether a client may upload now: only a masked update, which it has from the shares that it holds."""
    attempt = job.attempt
    assert attempt is not None
    if attempt.phase is AttemptPhase.COLLECTING:  # all other clients have ended
        return ACCEPTED
    text = f"the attempt is {attempt.phase}: a client of a secure aggregation uploads only while it is COLLECTING"
    return Verdict(Reason.STALE, text)


def judge_report(event: UpdateReported) -> Verdict:
    """Return whether a report reveals nothing about its masked update."""
    if event.num_examples != 1.0:
        text = f"a masked update counts as 1 example, not {event.num_examples:g}: its weight is inside"
        return Verdict(Reason.REJECTED_WEIGHT, text)
    if event.metrics:
        return Verdict(Reason.REJECTED_METRICS, "a masked update has its metrics inside; expected none with the report")
    return ACCEPTED


def _find_sender(
    job: JobState,
    event: KeysAdvertised | SharesSent | SurvivorsConfirmed | MasksAnswered,
    step: _Step,
    content: bytes,
) -> Assignment | Verdict:
    """Return the assignment whose next message this is; else the answer to its sender."""
    assignment, attempt = job.find(event.key, event.client_id), job.attempt
    if assignment is not None and assignment.secure is not None and assignment.state is AssignmentState.MERGED:
        return ACCEPTED  # it is part of the version; the messages were forgotten
    if assignment is None or not assignment.is_open:
        return reporting.verdict_on_ended(assignment)
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
        keys = KeyAdvertisement.from_bytes(content)
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
