"""The function that applies an event to a job: (state, event, context) to (state', commands, verdict).

Read `COMMON` first: it has one function for each kind of event that all protocols share, except `TimerFired`, which the
coordinator handles itself. The other events are those of one protocol (`RoundProtocol.handlers`). `advance` has the
transitions that need no event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedplat.rounds import approvals, attempts, commands, events, interventions, records
from fedplat.rounds.protocols.base import Handler, protocol_of, training_of
from fedplat.rounds.protocols.registry import OF_EVENTS


def apply(job: records.JobState, event: events.JobEvent, context: commands.Context) -> commands.Transition:
    """Apply one event to one job."""
    handler = COMMON.get(type(event)) or training_of(job).handlers.get(type(event)) or OF_EVENTS[type(event)]
    return handler(job, event, context)


def advance(job: records.JobState, context: commands.Context) -> commands.Transition | None:
    """Open the next attempt or end the job, if it is time to; None if there is nothing to do."""
    attempt = job.open_attempt
    if attempt is None:
        return attempts.begin_next(job, context)
    return protocol_of(job, attempt.kind).advance(job, attempt, context)


COMMON: Mapping[type[Any], Handler] = {
    events.OperatorCommand: interventions.on_operator,
    events.SpecChanged: interventions.on_changed,
    events.ApprovalsCounted: approvals.on_counted,
    events.RollbackOrdered: interventions.on_rollback,
    events.ServerRestarted: interventions.on_restart,
    events.CandidatesDrawn: attempts.on_candidates,
    events.AssignmentReclaimed: attempts.on_reclaimed,
    events.UploadStarted: attempts.on_upload_started,
    events.UpdateReported: attempts.on_reported,
    events.UpdateRejected: attempts.on_rejected,
    events.AssignmentFailed: attempts.on_failed,
    events.AssignmentRevoked: attempts.on_revoked,
    events.AttemptAggregated: attempts.on_aggregated,
    events.AggregationFailed: attempts.on_aggregation_failed,
}
