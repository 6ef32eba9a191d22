"""The counters and histograms of a daemon, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from fedplat_server.instruments.catalogue import METRICS, PREFIX
from fedplat_server.instruments.full_writes import FullWrites
from fedplat_server.instruments.labels import JobLabels, PopulationLabels

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
        self.attempt_duration = self._histogram(PREFIX + "attempt_duration_seconds")
        self.assignment_duration = self._histogram(PREFIX + "assignment_duration_seconds")
        self.commit_duration = self._histogram(PREFIX + "commit_duration_seconds")
        self.database_duration = self._histogram(PREFIX + "database_duration_seconds")
        self.blob_duration = self._histogram(PREFIX + "blob_duration_seconds")
        self.event_loop_lag = self._histogram(PREFIX + "event_loop_lag_seconds")
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
        metric = METRICS[PREFIX + name]
        return Counter(metric.name, metric.text, metric.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = METRICS[name]
        return Histogram(metric.name, metric.text, metric.labels, registry=self.registry, buckets=metric.buckets)
