"""The progress of clients with their open assignments, by their last heartbeats.

It is kept in memory only, since thousands of clients send heartbeats. After a restart it is unknown until the next one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from fedplat.rounds import Assignment, Attempt, AttemptKey, Change, JobState
from fedplat.rounds.protocols.base import PhaseProgress, protocol_of
from fedplat.rounds.states import AssignmentState


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressSummary:
    """The progress of an attempt's clients: fractions of the work, 0 to 1, of those that train and sent a heartbeat.

    `median` and `minimum` are None, and `slowest_client_id` is empty, while no such client is known. Of several clients
    with the least fraction the slowest is the one that began first. `step` is that of a secure aggregation, or of the
    exchange of a decentralised job.
    """

    num_training: int
    num_uploading: int
    num_known: int = 0
    median: float | None = None
    minimum: float | None = None
    slowest_client_id: str = ""
    step: PhaseProgress | None = None


class ProgressTracker:
    """The last fraction that each open assignment's client sent.

    A heartbeat and the end of an assignment cost one look-up, a summary one pass over the open assignments.
    """

    def __init__(self) -> None:
        # With the hash of the assignment's token: a restarted client has a new token and starts again.
        self._fractions: dict[tuple[AttemptKey, str], tuple[bytes, float]] = {}
        self._overdue: dict[str, tuple[str, float]] = {}

    def record(self, assignment: Assignment, fraction: float) -> None:
        """Store the fraction of a heartbeat."""
        self._fractions[assignment.key, assignment.client_id] = (assignment.token_hash, fraction)

    def get(self, assignment: Assignment) -> float | None:
        """Return the fraction of the work that is done; None before the first heartbeat."""
        token_hash, fraction = self._fractions.get((assignment.key, assignment.client_id), (b"", None))
        return fraction if token_hash == assignment.token_hash else None

    def record_overdue(self, client_id: str, job_id: str, until: float) -> None:
        """Store that a client still works for a job although its assignment has ended; forget it at a time."""
        self._overdue[client_id] = (job_id, until)

    def find_overdue(self, client_id: str, now: float) -> str:
        """Return the job for which a client still works although its assignment has ended; "" if it does not."""
        job_id, until = self._overdue.get(client_id, ("", now))
        if until <= now:
            self._overdue.pop(client_id, None)
            return ""
        return job_id

    def drop_overdue(self, client_id: str) -> None:
        """Forget that a client works although its assignment has ended: it has checked in."""
        self._overdue.pop(client_id, None)

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Forget the assignments that stored changes have ended."""
        for change in changes:
            for assignment in change.assignments:
                if not assignment.is_busy:
                    self._fractions.pop((assignment.key, assignment.client_id), None)

    def summarize(self, job: JobState, attempt: Attempt) -> ProgressSummary | None:
        """Return the progress of the clients of a job's open attempt; None if the attempt waits for none."""
        step = protocol_of(job, attempt.kind).count_phase(job, attempt)
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
