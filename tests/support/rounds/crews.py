"""What must hold for the assignments of an attempt, and for those that a job carries over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fedplat.rounds import Assignment, AssignmentSet, AttemptKey, JobState
from fedplat.rounds.selection import WaitingRoom
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus


def check_crew(crew: AssignmentSet, cohorts: Mapping[AttemptKey, Mapping[str, Assignment]]) -> None:
    """It equals its rows, counts them correctly, and wakes in time."""
    rows = crew.assignments
    assert all(cohorts[row.key][name] == row for name, row in rows.items())
    recount = Counter(row.state for row in rows.values())
    assert {state: count for state, count in crew.counts.items() if count} == dict(recount)
    deadlines = [row.deadline_at for row in rows.values() if row.is_busy]
    if deadlines:
        assert crew.next_deadline is not None
        assert crew.next_deadline <= min(deadlines)
    numbers = [each.report_number or 0 for each in crew.reported]
    assert len(set(numbers)) == len(numbers) == crew.num_reported
    assert all(1 <= number < crew.next_report for number in numbers)


def check_buffer(job: JobState, unended: Sequence[Assignment], room: WaitingRoom) -> None:
    """As many clients work as allowed, each with a recent version; an open attempt takes over all carried ones."""
    mode, attempt = job.spec.buffered, job.attempt
    assert mode is not None
    assert attempt is not None
    train = [row for row in unended if row.kind is AttemptKind.TRAIN]
    assert sum(row.is_busy for row in train) <= mode.concurrency
    if mode.max_staleness is not None:
        assert all(job.latest.version - row.base_version <= mode.max_staleness for row in train if row.is_busy)
    if attempt.kind is AttemptKind.TRAIN and attempt.phase in (AttemptPhase.SELECTING, AttemptPhase.COLLECTING):
        assert not job.carried_over.num_busy
        assert not job.carried_over.num_reported
        assert attempt.num_reported < attempt.goal
        demand = room.demands.get(job.job_id)
        assert (demand.target if demand is not None else 0) == mode.concurrency - attempt.num_busy
        assert demand is None or demand.excluded is attempt.assignments
    if job.status is not JobStatus.RUNNING:
        assert all(row.folded_into == attempt.key for row in train), "a client works for a job that does not run"
