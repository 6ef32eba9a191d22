"""The function that applies an event to a job: (state, event, context) to (state', commands, verdict).

Read `COMMON` first: it has one function for each kind of event that all protocols share, except `TimerFired`, which the
coordinator handles itself. The other events are those of one protocol (`RoundProtocol.handlers`). `advance` has the
transitions that need no event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedplat.rounds import attempts, operators, restart
from fedplat.rounds.commands import Context, Transition
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    AssignmentReclaimed,
    AssignmentRevoked,
    AttemptAggregated,
    CandidatesDrawn,
    JobEvent,
    OperatorCommand,
    RollbackOrdered,
    ServerRestarted,
    SpecChanged,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.protocols.base import Handler, protocol_of, training_of
from fedplat.rounds.protocols.registry import OF_EVENTS
from fedplat.rounds.records import JobState


def apply(job: JobState, event: JobEvent, context: Context) -> Transition:
    """Apply one event to one job."""
    handler = COMMON.get(type(event)) or training_of(job).handlers.get(type(event)) or OF_EVENTS[type(event)]
    return handler(job, event, context)


def advance(job: JobState, context: Context) -> Transition | None:
    """Open the next attempt or end the job, if it is time to; None if there is nothing to do."""
    attempt = job.open_attempt
    if attempt is None:
        return attempts.begin_next(job, context)
    return protocol_of(job, attempt.kind).advance(job, attempt, context)


COMMON: Mapping[type[Any], Handler] = {
    OperatorCommand: operators.on_operator,
    SpecChanged: operators.on_changed,
    RollbackOrdered: operators.on_rollback,
    ServerRestarted: restart.on_restart,
    CandidatesDrawn: attempts.on_candidates,
    AssignmentReclaimed: attempts.on_reclaimed,
    UploadStarted: attempts.on_upload_started,
    UpdateReported: attempts.on_reported,
    UpdateRejected: attempts.on_rejected,
    AssignmentFailed: attempts.on_failed,
    AssignmentRevoked: attempts.on_revoked,
    AttemptAggregated: attempts.on_aggregated,
    AggregationFailed: attempts.on_aggregation_failed,
}
