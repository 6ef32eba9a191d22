"""What a scrape needs to know about each job and its state does not have, recorded when changes are stored."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from typing_extensions import override

from fedplat.rounds import Assignment, AttemptKey, Change, HistoryRow, JobState, commands, privacy_rules, states
from fedplat_server.coordination.runner import Actor
from fedplat_server.database.records import VersionRecord
from fedplat_server.instruments import Instruments

LINGER_S = 120.0
"""The time series of a job last so long after its end, so that a scrape still finds its last round."""
NUM_COMMITS = 20
"""The number of last commits whose intervals are kept."""
MIN_INTERVALS = 3
MAX_METRICS = 10
"""The maximum number of metrics of one job."""


@dataclasses.dataclass
class JobSeries:
    """The history of a job for its time series. Times are Unix times.

    `idle_since` is the time of the last commit, or of the start or resumption if that is later; `intervals` are the
    seconds from each of the last commits to the next. `metrics` are declared metrics by source and name.
    """

    job_id: str
    status: states.JobStatus
    idle_since: float
    last_commit: float | None = None
    ended: float | None = None
    intervals: deque[float] = dataclasses.field(default_factory=lambda: deque[float](maxlen=NUM_COMMITS))
    metrics: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict[tuple[str, str], float])


def usual_round_s(series: JobSeries, job: JobState) -> float:
    """Return the usual time between two commits of a job; before its third commit, the sum of its deadlines."""
    if len(series.intervals) >= MIN_INTERVALS:
        return statistics.median(series.intervals)
    deadlines = job.spec.deadlines
    return deadlines.selection_s + deadlines.training_s + deadlines.upload_s


class JobSeriesTable:
    """The series of open jobs, and of those that ended recently.

    `declared` are the names of the metrics that get time series, `now` returns the Unix time.
    """

    def __init__(self, instruments: Instruments, declared: Sequence[str], now: Callable[[], float]) -> None:
        self._instruments = instruments
        self._declared = frozenset(declared)
        self._now = now
        self._series: dict[str, JobSeries] = {}

    def all(self) -> list[JobSeries]:
        """Return the series, without those of jobs that ended more than `LINGER_S` ago."""
        until = self._now() - LINGER_S
        for job_id in [each.job_id for each in self._series.values() if each.ended is not None and each.ended < until]:
            del self._series[job_id]
            self._instruments.remove_job(job_id)
        return list(self._series.values())

    def clear(self) -> None:
        """Remove all series: this daemon no longer leads."""
        for job_id in self._series:
            self._instruments.remove_job(job_id)
        self._series.clear()

    def restore(self, job: JobState, versions: Iterable[VersionRecord]) -> None:
        """Add a job that was read back, with its last versions, oldest first."""
        if job.status in states.ENDED_JOBS or job.status is states.JobStatus.DRAFT:
            return
        series = self._add(job)
        commits = [each for each in versions if each.version.version > 0 and each.version.restored_from is None]
        times = [each.created_unix_s for each in commits]
        series.intervals.extend(later - earlier for earlier, later in itertools.pairwise(times))
        if commits:
            series.last_commit = times[-1]
            self.note_scores(job.job_id, commits[-1].metrics)
        if job.attempt is not None and job.attempt.phase is states.AttemptPhase.COMMITTED:
            self.note_metrics(job.job_id, job.attempt.kind.value.lower(), job.attempt.metrics)

    def follow(self, job: JobState) -> None:
        """Take note of the status of a job that has changed."""
        series = self._series.get(job.job_id)
        if series is None:
            if job.status in states.ENDED_JOBS or job.status is states.JobStatus.DRAFT:
                return
            series = self._add(job)
        if job.status is states.JobStatus.RUNNING and series.status is not states.JobStatus.RUNNING:
            series.idle_since = self._now()
        if job.status in states.ENDED_JOBS and series.ended is None:
            series.ended = self._now()
        series.status = job.status

    def note_commit(self, job_id: str) -> None:
        """Take note of the commit of a version."""
        if (series := self._series.get(job_id)) is not None:
            now = self._now()
            if series.last_commit is not None:
                series.intervals.append(now - max(series.last_commit, series.idle_since))
            series.last_commit = series.idle_since = now

    def note_metrics(self, job_id: str, source: str, metrics: Mapping[str, float]) -> None:
        """Keep the declared ones of the metrics of a committed attempt, at most `MAX_METRICS` for each job."""
        series = self._series.get(job_id)
        if series is None:
            return
        for name in sorted(self._declared & metrics.keys()):
            if (source, name) in series.metrics or len(series.metrics) < MAX_METRICS:
                series.metrics[source, name] = metrics[name]

    def note_scores(self, job_id: str, metrics: Mapping[str, float]) -> None:
        """Do the same with the metrics of a version by the server's evaluator."""
        self.note_metrics(job_id, "server", metrics)

    def _add(self, job: JobState) -> JobSeries:
        shows_cohorts = privacy_rules.disclosure_of(job.spec).shows_cohorts
        if not shows_cohorts:
            self._instruments.populations.hide(job.spec.population)
        self._instruments.jobs.add(job.job_id, job.spec.name)
        series = self._series[job.job_id] = JobSeries(job.job_id, job.status, self._now())
        labels = self._instruments.jobs.of(job.job_id)
        # A rate needs a first sample before the first event.
        for outcome in ("merged", "late", "failed", "rejected", "surplus", "dropped") if shows_cohorts else ():
            self._instruments.assignments.labels(*labels, outcome)
        for phase in (states.AttemptPhase.COMMITTED, states.AttemptPhase.ABANDONED):
            self._instruments.attempts.labels(*labels, states.AttemptKind.TRAIN.value.lower(), phase.value.lower())
        if shows_cohorts:
            self._instruments.update_bytes.labels(*labels)
        return series


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
    def act(self, command: commands.Command) -> None:
        if isinstance(command, commands.Commit):
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
        if privacy_rules.disclosure_of(change.job.spec).shows_cohorts:
            self._record_clients(change, labels)
        for row in change.history:
            if row.entity == "attempt" and row.to_state not in states.OPEN_PHASES:
                self._record_attempt(change, row, labels)
        if any(row.entity == "attempt" and row.to_state == states.AttemptPhase.UNMASKING for row in change.history):
            self._on_release()
        if change.version is not None and change.version.restored_from is None:
            self._table.note_commit(change.job.job_id)
            if privacy_rules.disclosure_of(change.job.spec).is_charged:
                self._on_release()

    def _record_clients(self, change: Change, labels: tuple[str, str]) -> None:
        for assignment in change.assignments:
            if assignment.state not in states.OPEN_STATES:
                self._record_assignment(assignment, labels)
        for row in change.history:
            if row.entity == "assignment" and row.to_state == states.AssignmentState.REPORTED:
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
        if row.to_state == states.AttemptPhase.COMMITTED:
            self._table.note_metrics(key.job_id, kind, row.metrics)
            if started is not None:
                self._instruments.commit_duration.observe(max(self._now() - started, 0.0))
