"""What a scrape needs to know about each job and its state does not have: times of commits, and metrics of rounds."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from fedplat.rounds import JobState
from fedplat.rounds.disclosure import disclosure_of
from fedplat.rounds.states import ENDED_JOBS, AttemptKind, AttemptPhase, JobStatus
from fedplat_server.database.jobs import VersionRecord
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
    status: JobStatus
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
        if job.status in ENDED_JOBS or job.status is JobStatus.DRAFT:
            return
        series = self._add(job)
        commits = [each for each in versions if each.version.version > 0 and each.version.restored_from is None]
        times = [each.created_unix_s for each in commits]
        series.intervals.extend(later - earlier for earlier, later in itertools.pairwise(times))
        if commits:
            series.last_commit = times[-1]
            self.note_scores(job.job_id, commits[-1].metrics)
        if job.attempt is not None and job.attempt.phase is AttemptPhase.COMMITTED:
            self.note_metrics(job.job_id, job.attempt.kind.value.lower(), job.attempt.metrics)

    def follow(self, job: JobState) -> None:
        """Take note of the status of a job that has changed."""
        series = self._series.get(job.job_id)
        if series is None:
            if job.status in ENDED_JOBS or job.status is JobStatus.DRAFT:
                return
            series = self._add(job)
        if job.status is JobStatus.RUNNING and series.status is not JobStatus.RUNNING:
            series.idle_since = self._now()
        if job.status in ENDED_JOBS and series.ended is None:
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
        shows_cohorts = disclosure_of(job.spec).shows_cohorts
        if not shows_cohorts:
            self._instruments.populations.hide(job.spec.population)
        self._instruments.jobs.add(job.job_id, job.spec.name)
        series = self._series[job.job_id] = JobSeries(job.job_id, job.status, self._now())
        labels = self._instruments.jobs.of(job.job_id)
        # A rate needs a first sample before the first event.
        for outcome in ("merged", "late", "failed", "rejected", "surplus", "dropped") if shows_cohorts else ():
            self._instruments.assignments.labels(*labels, outcome)
        for phase in (AttemptPhase.COMMITTED, AttemptPhase.ABANDONED):
            self._instruments.attempts.labels(*labels, AttemptKind.TRAIN.value.lower(), phase.value.lower())
        if shows_cohorts:
            self._instruments.update_bytes.labels(*labels)
        return series
