"""The pure coordinator: the rules of federated learning, without clock, socket, database or global randomness.

Read in this order: `states` (the allowed transitions), `records` (the stored state), `events` and `commands` (input and
output), `sync` (which function takes an event), `attempts` (how one opens, gets clients and their reports), `closing`
(how it accepts reports and ends), `protocols` (what each kind of job does differently), `interventions` (orders of
operators, recovery after a crash), `demand` and `selection` (which clients are drawn), `coordinator` (several jobs, one
fleet).
"""

from fedplat.rounds.changes import Change, HistoryRow, difference
from fedplat.rounds.closing import rebuild_attempt, verdict_on_report
from fedplat.rounds.commands import Context, Verdict
from fedplat.rounds.coordinator import Coordinator, Proposal
from fedplat.rounds.demand import Participation, ParticipationHistory, participations_of, rounds_to_recall
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
