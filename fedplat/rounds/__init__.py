"""The pure coordinator: the rules of federated learning, without clock, socket, database or global randomness.

Read in this order: `states` (the allowed transitions), `records` (the stored state), `events` and `commands` (input and
output), `sync` (the rules of a round), `reporting` (how attempts accept reports), `closing` (how attempts end),
`operators` (their commands), `secure` (the phases of secure aggregation), `buffered` (jobs with a buffer of updates),
`ssp` and `clock_set` (clocks of stale synchronous parallel jobs), `exchange` (rounds of decentralised jobs),
`warm_start` (server training before round 1), `restart` (recovery after a crash), `rollback` (return to an older
version), `selection`, `eligible` and `participation` (which clients are drawn), `coordinator` (several jobs, one
fleet).
"""

from fedplat.rounds.changes import Change, HistoryRow, difference
from fedplat.rounds.closing import rebuild_attempt, verdict_on_report
from fedplat.rounds.commands import Context, Verdict
from fedplat.rounds.coordinator import Coordinator, Proposal
from fedplat.rounds.participation import Participation, ParticipationHistory, participations_of, rounds_to_recall
from fedplat.rounds.records import Assignment, AssignmentId, AssignmentSet, Attempt, AttemptKey, JobState, ModelVersion

__all__ = [
    "Assignment",
    "AssignmentId",
    "AssignmentSet",
    "Attempt",
    "AttemptKey",
    "Change",
    "Context",
    "Coordinator",
    "HistoryRow",
    "JobState",
    "ModelVersion",
    "Participation",
    "ParticipationHistory",
    "Proposal",
    "Verdict",
    "difference",
    "participations_of",
    "rebuild_attempt",
    "rounds_to_recall",
    "verdict_on_report",
]
