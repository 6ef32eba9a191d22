"""Events: changes that operators and their programs may want to know of, such as a committed round.

The database stores an event in the transaction of the change that it is about, and numbers events without gaps. So a
program that reads the events after the last number that it has seen misses none. Pure: no clock and no database.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from fedplat.rounds import Change, HistoryRow
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus


class EventType(StrEnum):
    """The types of events: what the event is about, and what has happened to it."""

    JOB_CREATED = "job.created"
    JOB_STARTED = "job.started"
    JOB_PAUSED = "job.paused"
    JOB_RESUMED = "job.resumed"
    JOB_COMPLETED = "job.completed"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    JOB_ROLLED_BACK = "job.rolled_back"
    ROUND_COMMITTED = "round.committed"
    ROUND_ABANDONED = "round.abandoned"
    EVALUATION_COMPLETED = "evaluation.completed"
    EVALUATION_ABANDONED = "evaluation.abandoned"
    WARM_START_COMPLETED = "warm_start.completed"
    WARM_START_ABANDONED = "warm_start.abandoned"
    CLIENT_ENROLLED = "client.enrolled"
    CLIENT_REVOKED = "client.revoked"
    OPERATOR_ADDED = "operator.added"
    OPERATOR_REMOVED = "operator.removed"
    BUDGET_SET = "privacy_budget.set"
    BUDGET_REMOVED = "privacy_budget.removed"
    WEBHOOK_ADDED = "webhook.added"
    WEBHOOK_REMOVED = "webhook.removed"
    WEBHOOK_TEST = "webhook.test"
    ALERT_RAISED = "alert.raised"
    ALERT_ENDED = "alert.ended"


TYPE_NAMES = frozenset(EventType)


@dataclasses.dataclass(frozen=True, slots=True)
class EventEntry:
    """An event to store. Fields that do not apply are empty or 0.

    `subject` is the name of an operator or an alert, or the id of a webhook. `text` is a sentence for people.
    """

    type: EventType
    job_id: str = ""
    job_name: str = ""
    population: str = ""
    client_id: str = ""
    round: int = 0
    attempt: int = 0
    subject: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EventRow:
    """A stored event. The sequence number grows by 1 from event to event; `unix_s` is the time of the change.

    A newer version may have stored types that this one does not know, so `type` is a string.
    """

    sequence: int
    unix_s: float
    type: str
    job_id: str = ""
    job_name: str = ""
    population: str = ""
    client_id: str = ""
    round: int = 0
    attempt: int = 0
    subject: str = ""
    text: str = ""


class AlertFacts(Protocol):
    """The properties of an alert that its events contain."""

    @property
    def name(self) -> str:
        """The kind of condition, such as "certificate_expiring"."""
        ...

    @property
    def text(self) -> str:
        """A sentence that describes the problem."""
        ...

    @property
    def job_id(self) -> str:
        """The affected job, if there is one."""
        ...

    @property
    def population(self) -> str:
        """The affected population, if there is one."""
        ...


def alert_event(type_: EventType, alert: AlertFacts) -> EventEntry:
    """Return the event of an alert that was raised or has ended."""
    return EventEntry(type_, job_id=alert.job_id, population=alert.population, subject=alert.name, text=alert.text)


_JOB_TYPES: Mapping[tuple[str, str], EventType] = {
    (JobStatus.DRAFT, JobStatus.RUNNING): EventType.JOB_STARTED,
    (JobStatus.PAUSED, JobStatus.RUNNING): EventType.JOB_RESUMED,
}
_JOB_TYPES_TO: Mapping[str, EventType] = {
    JobStatus.PAUSED: EventType.JOB_PAUSED,
    JobStatus.COMPLETED: EventType.JOB_COMPLETED,
    JobStatus.FAILED: EventType.JOB_FAILED,
    JobStatus.CANCELLED: EventType.JOB_CANCELLED,
}
_ATTEMPT_TYPES: Mapping[tuple[str, str], EventType] = {
    (AttemptKind.TRAIN, AttemptPhase.COMMITTED): EventType.ROUND_COMMITTED,
    (AttemptKind.TRAIN, AttemptPhase.ABANDONED): EventType.ROUND_ABANDONED,
    (AttemptKind.EVALUATE, AttemptPhase.COMMITTED): EventType.EVALUATION_COMPLETED,
    (AttemptKind.EVALUATE, AttemptPhase.ABANDONED): EventType.EVALUATION_ABANDONED,
    (AttemptKind.WARM_START, AttemptPhase.COMMITTED): EventType.WARM_START_COMPLETED,
    (AttemptKind.WARM_START, AttemptPhase.ABANDONED): EventType.WARM_START_ABANDONED,
}


def list_events(change: Change) -> list[EventEntry]:
    """Return the events of one step of a job, in the order of its history. Assignments have no events."""
    events: list[EventEntry] = []
    for row in change.history:
        type_ = _find_type(change, row)
        if type_ is not None:
            events.append(
                EventEntry(
                    type_,
                    job_id=change.job.job_id,
                    job_name=change.job.spec.name,
                    population=change.job.spec.population,
                    round=row.round,
                    attempt=row.attempt,
                    text=row.reason,
                )
            )
    return events


def _find_type(change: Change, row: HistoryRow) -> EventType | None:
    if row.entity == "job":
        return _JOB_TYPES.get((row.from_state, row.to_state)) or _JOB_TYPES_TO.get(row.to_state)
    if row.entity == "attempt":
        return _ATTEMPT_TYPES.get((row.kind, row.to_state))
    if row.entity == "version" and change.version is not None and change.version.restored_from is not None:
        return EventType.JOB_ROLLED_BACK
    return None
