"""The pure coordinator: the rules of federated learning, without clock, socket, database or global randomness.

Read in this order: `states` (what may follow what), `records` (what is known), `events` and `commands` (what
comes in and goes out), `sync` (the rules of a round), `reporting` (how its attempts take reports in), `closing` (how
they end), `buffered` (what is different when versions are made of a buffer), `warm_start` (what the server does before
round 1), `restart` (how attempts go on after a crash), `rollback` (how a job goes on from an older version),
`selection`, `pool` and `memory` (who is drawn), `coordinator` (several jobs, one fleet).
"""

from fedplat.rounds.changes import Change, HistoryRow, difference
from fedplat.rounds.coordinator import Coordinator, Proposal
from fedplat.rounds.participation import Participation, ParticipationHistory, participations_of, rounds_to_recall
from fedplat.rounds.records import Assignment, AssignmentId, AssignmentSet, Attempt, AttemptKey, JobState, ModelVersion
from fedplat.rounds.reporting import rebuild_attempt
from fedplat.rounds.sync import verdict_on_report
from fedplat.rounds.transition import Context, Verdict

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
