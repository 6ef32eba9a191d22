"""Checks that the append-only history leads to the stored states, by allowed transitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedplat.rounds.invariants.records import Location, StepRow, StoredAttempt, StoredJob, StrayHistory, Violation
from fedplat.rounds.states import (
    ASSIGNMENT_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    FIRST_PHASES,
    JOB_TRANSITIONS,
    AssignmentState,
    AttemptKind,
    JobStatus,
)

Steps = Mapping[str, frozenset[str]]


def _steps(transitions: Mapping[Any, frozenset[Any]], first: str) -> Steps:
    """Convert a transition table to text, and add the first step of each entity."""
    return {str(state): frozenset(map(str, after)) for state, after in transitions.items()} | {"": frozenset({first})}


_JOB = _steps(JOB_TRANSITIONS, JobStatus.DRAFT)
_ATTEMPT = {str(kind): _steps(ATTEMPT_TRANSITIONS, first) for kind, first in FIRST_PHASES.items()}
_ASSIGNMENT = _steps(ASSIGNMENT_TRANSITIONS, AssignmentState.TRAINING)


def of_job(job: StoredJob) -> Iterator[Violation]:
    """Check that the history of the job leads to its status."""
    rows = [row for row in job.history if row.entity == "job"]
    yield from _chain(rows, _JOB, job.row.status, Location(job.row.job_id))


def of_versions(job: StoredJob) -> Iterator[Violation]:
    """Check that the history has each version but the first once, in order; metrics rows do not change the version."""
    place = Location(job.row.job_id)
    rows = [row for row in job.history if row.entity == "version"]
    made = [row.to_state for row in rows if row.to_state != row.from_state]
    expected = [str(version.version) for version in job.versions if version.version > 0]
    if made != expected:
        yield Violation(
            place,
            f"the history has versions {_join_numbers(made)}",
            f"{_join_numbers(expected)}, each once and in order",
        )
    for row in rows:
        if row.to_state != row.from_state and row.to_state != str(int(row.from_state) + 1):
            found = f"row {row.sequence} of the history leads from version {row.from_state} to {row.to_state}"
            yield Violation(place, found, "the next version")


def of_attempt(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check that the history of the attempt leads to its phase."""
    row = attempt.row
    if row.history_removed_unix_s is not None:
        return
    rows = [one for one in attempt.history if one.entity == "attempt"]
    steps = _ATTEMPT.get(row.kind, _ATTEMPT[AttemptKind.TRAIN])
    yield from _chain(rows, steps, row.phase, Location(row.job_id, row.round, row.number))


def of_assignments(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check that the history of each assignment leads to its state."""
    by_client: dict[str, list[StepRow]] = {one.client_id: [] for one in attempt.made}
    states = {one.client_id: one.state for one in attempt.made}
    for row in attempt.history:
        if row.entity == "assignment":
            by_client.setdefault(row.client_id, []).append(row)
    if attempt.row.history_removed_unix_s is not None:
        return
    for client_id, rows in by_client.items():
        place = Location(attempt.row.job_id, attempt.row.round, attempt.row.number, client_id)
        if client_id in states:
            yield from _chain(rows, _ASSIGNMENT, states[client_id], place)
        else:
            yield Violation(place, "the history has an assignment that is not stored", "a stored assignment")


def of_nothing(strays: StrayHistory) -> Iterator[Violation]:
    """Report history rows of attempts that are not stored, or of unknown entities."""
    for row in strays.history:
        found = f"row {row.sequence} of the history is about the {row.entity} {row.from_state} -> {row.to_state}"
        place = Location(strays.job.job_id, row.round, row.attempt, row.client_id or None)
        yield Violation(place, found, "a stored entity")


def _chain(rows: Iterable[StepRow], steps: Steps, state: str, place: Location) -> Iterator[Violation]:
    """Yield rows that do not begin in the previous row's state, forbidden transitions, and a wrong last state."""
    at = ""
    for row in rows:
        if row.from_state != at:
            found = f"row {row.sequence} of the history begins at {_name_state(row.from_state)}"
            yield Violation(place, found, f"{_name_state(at)}, the state after the previous row")
        if row.to_state not in steps.get(row.from_state, frozenset()):
            before, after = _name_state(row.from_state), _name_state(row.to_state)
            found = f"row {row.sequence} of the history leads from {before} to {after}"
            allowed = sorted(steps.get(row.from_state, frozenset()))
            yield Violation(place, found, f"one of {', '.join(allowed)}" if allowed else "no transition from there")
        at = row.to_state
    if at != state:
        yield Violation(place, f"its state is {state}", f"{_name_state(at)}, the last state of its history")


def _name_state(state: str) -> str:
    return state or "nothing"


def _join_numbers(numbers: list[str]) -> str:
    return ", ".join(numbers) or "none"
