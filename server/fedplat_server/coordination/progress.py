"""The progress of clients with their open assignments, by their last heartbeats.

It is kept in memory only, since thousands of clients send heartbeats. After a restart it is unknown until the next one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from fedplat.rounds import Assignment, Attempt, AttemptKey, Change
from fedplat.rounds.states import AssignmentState, AttemptPhase


@dataclasses.dataclass(frozen=True, slots=True)
class SecureStepProgress:
    """How many clients have done their part of a step of secure aggregation, and how many are to do it."""

    phase: AttemptPhase
    num_done: int
    num_wanted: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressSummary:
    """The progress of an attempt's clients: fractions of the work, 0 to 1, of those that train and sent a heartbeat.

    `median` and `minimum` are None, and `slowest_client_id` is empty, while no such client is known. Of several clients
    with the least fraction the slowest is the one that began first. `step` is that of a secure aggregation.
    """

    num_training: int
    num_uploading: int
    num_known: int = 0
    median: float | None = None
    minimum: float | None = None
    slowest_client_id: str = ""
    step: SecureStepProgress | None = None


class ProgressTracker:
    """The last fraction that each open assignment's client sent.

    A heartbeat and the end of an assignment cost one look-up, a summary one pass over the open assignments.
    """

    def __init__(self) -> None:
        # With the hash of the assignment's token: a restarted client has a new token and starts again.
        self._fractions: dict[tuple[AttemptKey, str], tuple[bytes, float]] = {}

    def record(self, assignment: Assignment, fraction: float) -> None:
        """Store the fraction of a heartbeat."""
        self._fractions[assignment.key, assignment.client_id] = (assignment.token_hash, fraction)

    def get(self, assignment: Assignment) -> float | None:
        """Return the fraction of the work that is done; None before the first heartbeat."""
        token_hash, fraction = self._fractions.get((assignment.key, assignment.client_id), (b"", None))
        return fraction if token_hash == assignment.token_hash else None

    def drop_ended(self, changes: Iterable[Change]) -> None:
        """Forget the assignments that stored changes have ended."""
        for change in changes:
            for assignment in change.assignments:
                if not assignment.is_busy:
                    self._fractions.pop((assignment.key, assignment.client_id), None)

    def summarize(self, attempt: Attempt) -> ProgressSummary | None:
        """Return the progress of an attempt's clients; None if the attempt waits for none."""
        step = find_step(attempt)
        if not attempt.num_busy and step is None:
            return None
        training = [each for each in attempt.busy if each.state is AssignmentState.TRAINING]
        known = [
            (fraction, each.assigned_at, each.client_id)
            for each in training
            if (fraction := self.get(each)) is not None
        ]
        num_uploading = attempt.counts.get(AssignmentState.UPLOADING, 0)
        summary = ProgressSummary(len(training), num_uploading, len(known), step=step)
        if not known:
            return summary
        median = statistics.median(fraction for fraction, _, _ in known)
        minimum, _, slowest = min(known)
        return dataclasses.replace(summary, median=median, minimum=minimum, slowest_client_id=slowest)


def find_step(attempt: Attempt) -> SecureStepProgress | None:
    """Return the progress of a step of secure aggregation; None if the attempt is in no step."""
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
            return SecureStepProgress(phase, advertised, attempt.goal)
        case AttemptPhase.SHARING:
            return SecureStepProgress(phase, shared, advertised + shared)
        case AttemptPhase.COLLECTING if any(each.secure is not None for each in attempt.assignments.values()):
            return SecureStepProgress(phase, reported, shared + uploading + reported)
        case AttemptPhase.CONFIRMING:
            return SecureStepProgress(phase, _count_messages(attempt, "confirmation"), reported)
        case AttemptPhase.UNMASKING:
            return SecureStepProgress(phase, _count_messages(attempt, "answer"), reported)
        case _:
            return None


def _count_messages(attempt: Attempt, kind: str) -> int:
    return sum(each.secure is not None and bool(getattr(each.secure, kind)) for each in attempt.assignments.values())
