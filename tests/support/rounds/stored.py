"""What a database would hold of the jobs of a test, as the checks of `fedplat.rounds.invariants` read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from fedplat.rounds import Assignment, Attempt, HistoryRow, JobState, ModelVersion, Participation, invariants
from fedplat.rounds.invariants.records import (
    AssignmentRow,
    AttemptRow,
    JobRow,
    JobUnit,
    ParticipationRounds,
    StepRow,
    StoredAttempt,
    StoredJob,
    VersionRow,
)
from fedplat.rounds.protocols.base import training_of
from fedplat.rounds.states import JobStatus

WITHOUT_FILES = [
    check for check in invariants.CHECKS if check.name not in ("optimizer_state_is_kept", "deltas_are_kept")
]
"""All checks but those of digests of files, which these tests do not have."""


def require(unit: JobUnit) -> None:
    """Assert that a unit violates no invariant."""
    violations = [(check.name, violation) for check, violation in invariants.run(WITHOUT_FILES, unit, live=False)]
    assert violations == []


def stored_job(
    job: JobState, versions: Iterable[ModelVersion], attempts: Iterable[Attempt], history: Iterable[HistoryRow]
) -> StoredJob:
    """Return a job with all of its versions and attempts; `history` begins after its creation."""
    own = [row for row in history if row.entity in ("job", "version")]
    return StoredJob(
        row=_job_row(job),
        spec=job.spec,
        unreadable="",
        versions=tuple(_version_row(version) for version in versions),
        ledger=(),
        attempts=tuple(_attempt_row(attempt) for attempt in attempts),
        history=_steps([HistoryRow("job", "", JobStatus.DRAFT), *own]),
    )


def stored_attempt(
    job: JobState,
    attempt: Attempt,
    version: ModelVersion | None,
    assignments: Sequence[Assignment],
    history: Iterable[HistoryRow],
) -> StoredAttempt:
    """Return an attempt with the assignments that were made in it or folded into it, and with its history."""
    rows = [_assignment_row(assignment) for assignment in assignments]
    number = attempt.key[1:]
    return StoredAttempt(
        job=_job_row(job),
        spec=job.spec,
        row=_attempt_row(attempt),
        version=_version_row(version) if version is not None else None,
        made=tuple(row for row in rows if (row.round, row.number) == number),
        assignments=tuple(row for row in rows if row.counted_in == number),
        history=_steps(history),
        seen_unix_s=0.0,
        num_messages=sum(count_messages(assignment) for assignment in assignments if assignment.key == attempt.key),
    )


def count_messages(assignment: Assignment) -> int:
    """Return the number of messages of secure aggregation that an assignment has."""
    return len(list_messages(assignment))


def list_messages(assignment: Assignment) -> list[bytes]:
    """Return the messages of secure aggregation of an assignment."""
    sent = assignment.secure
    return [each for each in (sent.keys, sent.shares, sent.confirmation, sent.answer) if each] if sent else []


def participation_rounds(job: JobState, participations: Iterable[Participation]) -> ParticipationRounds:
    """Return the rounds of each client."""
    rounds: dict[str, set[int]] = {}
    for each in participations:
        rounds.setdefault(each.client_id, set()).add(each.round)
    ordered: Mapping[str, tuple[int, ...]] = {client_id: tuple(sorted(each)) for client_id, each in rounds.items()}
    return ParticipationRounds(_job_row(job), job.spec, ordered)


def _job_row(job: JobState) -> JobRow:
    numbers = job.status, job.round, job.latest.version, job.revision
    return JobRow(job.job_id, "", *numbers, None, protocol=training_of(job).write_state(job))


def _version_row(version: ModelVersion) -> VersionRow:
    return VersionRow(**structs.asdict(version), model_removed_unix_s=None, state_removed_unix_s=None)


def _attempt_row(attempt: Attempt) -> AttemptRow:
    key, ended = attempt.key, None if attempt.is_open else 0.0
    return AttemptRow(
        *key,
        attempt.kind,
        attempt.phase,
        attempt.base_version,
        attempt.minimum,
        ended,
        None,
        num_survivors=attempt.num_survivors,
    )


def _assignment_row(assignment: Assignment) -> AssignmentRow:
    into = assignment.folded_into if assignment.folded_into != assignment.key else None
    return AssignmentRow(
        round=assignment.key.round,
        number=assignment.key.number,
        client_id=assignment.client_id,
        state=assignment.state,
        reason=assignment.reason,
        digest=assignment.digest,
        num_examples=assignment.num_examples,
        weight=assignment.weight,
        metrics=assignment.metrics,
        took_s=assignment.took_s,
        reported_revision=0 if assignment.took_s is not None else None,
        deadline_unix_s=assignment.deadline_at,
        update_bytes=assignment.update_bytes,
        base_version=assignment.base_version,
        staleness=assignment.staleness if assignment.folded_into is not None else None,
        into_round=into.round if into is not None else None,
        into_number=into.number if into is not None else None,
        norm=assignment.norm,
        secure_group=assignment.secure.group if assignment.secure is not None else None,
        secure_position=assignment.secure.position if assignment.secure is not None else None,
    )


def _steps(history: Iterable[HistoryRow]) -> tuple[StepRow, ...]:
    return tuple(
        StepRow(number, row.entity, row.from_state, row.to_state, row.round, row.attempt, row.client_id)
        for number, row in enumerate(history)
    )
