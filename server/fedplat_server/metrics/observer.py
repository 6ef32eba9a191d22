"""Records the ends of assignments and attempts, commits and updates when their changes are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import override

from fedplat.rounds import Assignment, AttemptKey, Change, HistoryRow
from fedplat.rounds.commands import Command, Commit
from fedplat.rounds.disclosure import disclosure_of
from fedplat.rounds.states import OPEN_PHASES, OPEN_STATES, AssignmentState, AttemptPhase
from fedplat_server.coordination.runner import Actor
from fedplat_server.instruments import Instruments
from fedplat_server.metrics.job_series import JobSeriesTable


class ObservedActor(Actor):
    """An actor whose commands and stored changes are recorded.

    `now` is the time on the coordinator's clock. `on_release` is called after each release of a private job.
    """

    def __init__(
        self,
        inner: Actor,
        instruments: Instruments,
        table: JobSeriesTable,
        now: Callable[[], float],
        on_release: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._instruments = instruments
        self._table = table
        self._now = now
        self._on_release = on_release
        self._commits: dict[AttemptKey, float] = {}

    @override
    def act(self, command: Command) -> None:
        if isinstance(command, Commit):
            self._commits[command.key] = self._now()
        self._inner.act(command)

    @override
    def on_stored(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._record(change)
        self._inner.on_stored(changes)

    def _record(self, change: Change) -> None:
        self._table.follow(change.job)
        labels = self._instruments.jobs.of(change.job.job_id)
        if disclosure_of(change.job.spec).shows_cohorts:
            self._record_clients(change, labels)
        for row in change.history:
            if row.entity == "attempt" and row.to_state not in OPEN_PHASES:
                self._record_attempt(change, row, labels)
        if any(row.entity == "attempt" and row.to_state == AttemptPhase.UNMASKING for row in change.history):
            self._on_release()
        if change.version is not None and change.version.restored_from is None:
            self._table.note_commit(change.job.job_id)
            if disclosure_of(change.job.spec).is_charged:
                self._on_release()

    def _record_clients(self, change: Change, labels: tuple[str, str]) -> None:
        for assignment in change.assignments:
            if assignment.state not in OPEN_STATES:
                self._record_assignment(assignment, labels)
        for row in change.history:
            if row.entity == "assignment" and row.to_state == AssignmentState.REPORTED:
                self._instruments.update_bytes.labels(*labels).inc(row.update_bytes)

    def _record_assignment(self, assignment: Assignment, labels: tuple[str, str]) -> None:
        outcome = assignment.state.value.lower()
        took_s = assignment.took_s
        self._instruments.assignments.labels(*labels, outcome).inc()
        self._instruments.assignment_duration.labels(outcome).observe(
            max(self._now() - assignment.assigned_at, 0.0) if took_s is None else took_s
        )

    def _record_attempt(self, change: Change, row: HistoryRow, labels: tuple[str, str]) -> None:
        kind, outcome = row.kind.lower(), row.to_state.lower()
        key = AttemptKey(change.job.job_id, row.round, row.attempt)
        self._instruments.attempts.labels(*labels, kind, outcome).inc()
        attempt = change.attempt
        if attempt is not None and attempt.opened_at:  # unknown after a restart
            duration_s = max(self._now() - attempt.opened_at, 0.0)
            self._instruments.attempt_duration.labels(kind, outcome).observe(duration_s)
        started = self._commits.pop(key, None)
        if row.to_state == AttemptPhase.COMMITTED:
            self._table.note_metrics(key.job_id, kind, row.metrics)
            if started is not None:
                self._instruments.commit_duration.observe(max(self._now() - started, 0.0))
