"""The instruments that the parts of the daemon record into, and the catalogue of all metrics.

Recording takes about a microsecond and never fails, so parts record whether or not metrics are served.

Labels never have client ids, rounds, versions, digests or free text as values. `job_id` and `job_name` are bounded by
`JobLabels`, `population` by `PopulationLabels`, `name` by the names that the server's owner declares; all
other labels have the values of an enumeration. Prometheus adds `job` and `instance` itself.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Literal

from google.protobuf import descriptor_pool
from prometheus_client import CollectorRegistry, Counter, Histogram

DELIVERY_RESULTS = ("delivered", "failed", "abandoned")
"""The values of `result` of `webhook_deliveries`."""


class Instruments:
    """The counters and histograms that parts record into. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.jobs = JobLabels()
        self.populations = PopulationLabels()
        self.full_writes = FullWrites()
        self.check_ins = self._counter("check_ins_total")
        self.assignments = self._counter("assignments_total")
        self.attempts = self._counter("attempts_total")
        self.update_bytes = self._counter("update_bytes_total")
        self.model_bytes = self._counter("model_bytes_total")
        self.audit_events = self._counter("audit_events_total")
        self.webhook_deliveries = self._counter("webhook_deliveries_total")
        self.attempt_duration = self._histogram(METRIC_PREFIX + "attempt_duration_seconds")
        self.assignment_duration = self._histogram(METRIC_PREFIX + "assignment_duration_seconds")
        self.commit_duration = self._histogram(METRIC_PREFIX + "commit_duration_seconds")
        self.database_duration = self._histogram(METRIC_PREFIX + "database_duration_seconds")
        self.blob_duration = self._histogram(METRIC_PREFIX + "blob_duration_seconds")
        self.event_loop_lag = self._histogram(METRIC_PREFIX + "event_loop_lag_seconds")
        self.call_duration = self._histogram("grpc_server_call_duration_seconds")
        for result in DELIVERY_RESULTS:  # a rate needs a first sample before the first failure
            self.webhook_deliveries.labels(result)

    def remove_job(self, job_id: str) -> None:
        """Remove the time series of a job."""
        if self.jobs.has_own(job_id):
            for counter in (self.assignments, self.attempts, self.update_bytes, self.model_bytes):
                counter.remove_by_labels({"job_id": job_id})
        self.jobs.remove(job_id)

    def _counter(self, name: str) -> Counter:
        metric = METRICS[METRIC_PREFIX + name]
        return Counter(metric.name, metric.text, metric.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = METRICS[name]
        return Histogram(metric.name, metric.text, metric.labels, registry=self.registry, buckets=metric.buckets)


METRIC_PREFIX = "fedplat_"
JOB = ("job_id", "job_name")
"""The labels of a job's own metrics."""
FAST_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Upper bounds of the buckets for operations of the database, of the disk and of the event loop, in seconds."""
CALL_S = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
"""The same for calls: long polls last up to minutes."""
SLOW_S = (0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0, 7200.0)
"""The same for attempts, assignments and commits."""


@dataclasses.dataclass(frozen=True)
class MetricInfo:
    """A metric as Prometheus knows it. `name` has the prefix and, for a counter, the suffix `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


def _counter(name: str, labels: tuple[str, ...], text: str) -> MetricInfo:
    return MetricInfo(f"{METRIC_PREFIX}{name}_total", "counter", labels, text)


def _gauge(name: str, labels: tuple[str, ...], text: str) -> MetricInfo:
    return MetricInfo(METRIC_PREFIX + name, "gauge", labels, text)


def _histogram(name: str, labels: tuple[str, ...], text: str, buckets: tuple[float, ...]) -> MetricInfo:
    return MetricInfo(f"{METRIC_PREFIX}{name}_seconds", "histogram", labels, text, buckets)


_RECORDED = (
    _counter("check_ins", ("population", "result"), "Answered check-ins: assigned, or the reason of the refusal."),
    _counter("assignments", (*JOB, "outcome"), "Ended assignments by their final state."),
    _counter("attempts", (*JOB, "kind", "outcome"), "Ended attempts: committed or abandoned."),
    _counter("update_bytes", JOB, "Size of the reported updates as received, in bytes."),
    _counter(
        "model_bytes",
        (*JOB, "form"),
        "Bytes of models sent to clients: in assignments (inline), as files, or as steps between versions (delta).",
    ),
    _counter("audit_events", ("action",), "Rows that this daemon added to the audit log."),
    _counter(
        "webhook_deliveries",
        ("result",),
        "Attempts to deliver an event to a webhook; abandoned: the last attempt has failed.",
    ),
    _histogram("attempt_duration", ("kind", "outcome"), "Time from the start of an attempt to its end.", SLOW_S),
    _histogram(
        "assignment_duration", ("outcome",), "Time from an assignment to its report, or else to its end.", SLOW_S
    ),
    _histogram("commit_duration", (), "Time from the end of an attempt's collection to its stored result.", SLOW_S),
    _histogram("database_duration", ("operation",), "Time of a transaction, including its wait in a queue.", FAST_S),
    _histogram("blob_duration", ("operation", "store"), "Time of an operation of the store of models.", FAST_S),
    _histogram("event_loop_lag", (), "Delay of a timer of the event loop, which is measured twice a second.", FAST_S),
    MetricInfo(
        "grpc_server_call_duration_seconds",
        "histogram",
        ("grpc_method", "grpc_status"),
        "Time of a call from its start to its status (gRFC A66). Long polls and watches last for minutes.",
        CALL_S,
    ),
)
"""Metrics that are recorded when something happens."""

_COLLECTED = (
    _gauge("leader", (), "1 if this daemon leads the jobs, 0 if it forwards calls or has no leader."),
    _gauge("build_info", ("version",), "Always 1; the version of this daemon."),
    _gauge("certificate_expiry_timestamp_seconds", (), "When the server's TLS certificate expires, in Unix time."),
    _counter("storage_full", ("place",), "Writes that failed because a disk was full."),
    _counter("log_lines_dropped", (), "Lines of the log that were dropped because they were not read in time."),
    _gauge("jobs", ("status",), "Jobs by status, including ended ones."),
    _gauge("clients", ("population", "state"), "Clients that wait for work, and clients that work."),
    _gauge("job_round", JOB, "Committed rounds of a job."),
    _gauge("job_rounds_planned", JOB, "Rounds that a job will have."),
    _gauge("job_clients_available", JOB, "Clients that work for a running job, or wait and may be drawn by it."),
    _gauge("job_clients_goal", JOB, "Reports that an attempt of a running job needs."),
    _gauge("job_last_commit_timestamp_seconds", JOB, "When a job last committed a version, in Unix time."),
    _gauge(
        "job_idle_since_timestamp_seconds",
        JOB,
        "When a running job last committed a version, or was started, resumed or taken over if that is later.",
    ),
    _gauge(
        "job_usual_round_seconds",
        JOB,
        "Median time between the last 20 commits of a running job; before the third, the sum of its deadlines.",
    ),
    _gauge(
        "job_metric",
        (*JOB, "source", "name"),
        "A declared metric of the last committed round, from clients' training (train), their evaluation (evaluate) "
        "or the server's evaluator (server).",
    ),
    _gauge("privacy_epsilon_spent", JOB, "Privacy loss of a private job's releases so far, at its delta."),
    _gauge("privacy_epsilon_planned", JOB, "Privacy loss of all releases that a private job may make."),
    _gauge(
        "privacy_epsilon_committed",
        ("population",),
        "Privacy loss that counts against a population's budget: released, and planned by its open jobs.",
    ),
    _gauge("privacy_epsilon_budget", ("population",), "Budget of a population: the largest privacy loss."),
)
"""Metrics that are computed when Prometheus scrapes."""

METRICS = {metric.name: metric for metric in (*_COLLECTED, *_RECORDED)}
"""All metrics by name."""


MAX_JOBS = 100
MAX_POPULATIONS = 50
OTHER_LABEL = "other"
"""The label of all values beyond the limit."""


class JobLabels:
    """The label values of open jobs: the first `MAX_JOBS` have their own, the others share `other`.

    A job keeps its labels until it is removed, so its counters never move to other labels.
    """

    def __init__(self) -> None:
        self._own: dict[str, tuple[str, str]] = {}
        self._others: set[str] = set()

    def add(self, job_id: str, name: str) -> None:
        """Give a job labels, unless it has some."""
        if job_id not in self._own and job_id not in self._others:
            if len(self._own) < MAX_JOBS:
                self._own[job_id] = (job_id, name)
            else:
                self._others.add(job_id)

    def remove(self, job_id: str) -> None:
        """Make room for another job."""
        self._own.pop(job_id, None)
        self._others.discard(job_id)

    def has_own(self, job_id: str) -> bool:
        """Return whether a job has labels of its own."""
        return job_id in self._own

    def of(self, job_id: str) -> tuple[str, str]:
        """Return the values of `job_id` and `job_name` for a job."""
        return self._own.get(job_id, (OTHER_LABEL, OTHER_LABEL))


class PopulationLabels:
    """The label values of populations: the first `MAX_POPULATIONS` have their own, the others share `other`.

    Numbers of clients of a hidden population are not counted, because they would reveal the secret sample of a private
    job. A population stays hidden until the daemon ends.
    """

    def __init__(self) -> None:
        self._own: set[str] = set()
        self._hidden: set[str] = set()

    def hide(self, population: str) -> None:
        """Hide a population, which has a job whose sample is secret."""
        self._hidden.add(population)

    def is_hidden(self, population: str) -> bool:
        """Return whether a population is hidden."""
        return population in self._hidden

    def of(self, population: str) -> str:
        """Return the value of `population` for a population."""
        if population not in self._own:
            if len(self._own) >= MAX_POPULATIONS:
                return OTHER_LABEL
            self._own.add(population)
        return population


def method_label(method: str) -> str:
    """Return the value of `grpc_method` for `/service/name`: without the slash; `other` for unknown methods (A66)."""
    service, _, name = method.removeprefix("/").partition("/")
    try:
        methods = descriptor_pool.Default().FindServiceByName(service).methods_by_name
    except KeyError:
        return OTHER_LABEL
    return f"{service}/{name}" if name in methods else OTHER_LABEL


Place = Literal["models", "updates", "database"]
"""What a disk is full for."""


class _Process:
    def __init__(self) -> None:
        self.counts: dict[Place, int] = {"models": 0, "updates": 0, "database": 0}
        self.last_unix_s: float | None = None
        self.lock = threading.Lock()


_process = _Process()


def note_full(place: Place) -> None:
    """Count a write that failed because the disk was full."""
    with _process.lock:
        _process.counts[place] += 1
        _process.last_unix_s = time.time()


class FullWrites:
    """The writes of this process that have failed since this was made because a disk was full."""

    def __init__(self) -> None:
        self._before = dict(_process.counts)

    @property
    def by_place(self) -> Mapping[Place, int]:
        """Their number: those of models, updates and the database."""
        return {place: count - self._before[place] for place, count in _process.counts.items()}

    @property
    def num(self) -> int:
        """Their number."""
        return sum(self.by_place.values())

    @property
    def last_unix_s(self) -> float | None:
        """The time of the last of them; None if there was none."""
        return _process.last_unix_s if self.num else None
