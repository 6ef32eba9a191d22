"""The catalogue of all metrics: name, type, labels and meaning. `docs/operations.md` has the same table.

Labels never have client ids, rounds, versions, digests or free text as values. `job_id` and `job_name` are bounded by
`labels.JobLabels`, `population` by `labels.PopulationLabels`, `name` by the names that the server's owner declares; all
other labels have the values of an enumeration. Prometheus adds `job` and `instance` itself.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

PREFIX = "fedplat_"
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
    return MetricInfo(f"{PREFIX}{name}_total", "counter", labels, text)


def _gauge(name: str, labels: tuple[str, ...], text: str) -> MetricInfo:
    return MetricInfo(PREFIX + name, "gauge", labels, text)


def _histogram(name: str, labels: tuple[str, ...], text: str, buckets: tuple[float, ...]) -> MetricInfo:
    return MetricInfo(f"{PREFIX}{name}_seconds", "histogram", labels, text, buckets)


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
