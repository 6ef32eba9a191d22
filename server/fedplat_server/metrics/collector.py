"""A scrape: gauges computed from the coordinator and other parts, and the instruments. Ended jobs have no series."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from fedplat.rounds import Coordinator, JobState
from fedplat.rounds.disclosure import disclosure_of
from fedplat.rounds.protocols.base import protocol_of, training_of
from fedplat.rounds.states import ENDED_JOBS, JobStatus
from fedplat_server import __version__
from fedplat_server.auth.tls import Certificates
from fedplat_server.instruments import Instruments
from fedplat_server.instruments.catalogue import METRICS, PREFIX
from fedplat_server.metrics.job_series import JobSeries, JobSeriesTable, usual_round_s
from fedplat_server.metrics.privacy_costs import PrivacyLosses


@dataclasses.dataclass(frozen=True)
class LeaderState:
    """The state that only the leader has. `losses` returns the privacy losses computed last."""

    coordinator: Coordinator
    losses: Callable[[], PrivacyLosses]


class _Families:
    """The gauges of one scrape. A value that is None has no sample."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        info = METRICS[PREFIX + name]
        family = self._families.get(name)
        if family is None:
            make = GaugeMetricFamily if info.kind == "gauge" else CounterMetricFamily
            family = self._families[name] = make(info.name, info.text, labels=info.labels)
        if value is not None:
            family.add_metric(labels, value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


class DaemonCollector(Collector):
    """The collector of a daemon. `leader` is None while another daemon leads.

    `count_dropped_lines` returns the number of dropped lines of the log.
    """

    def __init__(
        self,
        instruments: Instruments,
        table: JobSeriesTable,
        certificates: Certificates | None,
        count_dropped_lines: Callable[[], int],
    ) -> None:
        self.leader: LeaderState | None = None
        self._instruments = instruments
        self._table = table
        self._certificates = certificates
        self._count_dropped_lines = count_dropped_lines

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without samples, so that Prometheus may select some of them by name."""
        return [Metric(info.name.removesuffix("_total"), info.text, info.kind) for info in METRICS.values()]

    @override
    def collect(self) -> Iterable[Metric]:
        yield from self._collect_gauges()  # first: this removes the counters of ended jobs
        yield from self._instruments.registry.collect()

    def _collect_gauges(self) -> Iterable[Metric]:
        families = _Families()
        families.add("leader", float(self.leader is not None))
        families.add("build_info", 1.0, __version__)
        if self._certificates is not None:
            families.add("certificate_expiry_timestamp_seconds", self._certificates.loaded.expires.timestamp())
        families.add("log_lines_dropped_total", self._count_dropped_lines())
        for place, count in self._instruments.full_writes.by_place.items():
            families.add("storage_full_total", count, place)
        if self.leader is not None:
            self._add_totals(families, self.leader)
            for series in self._table.all():
                self._add_job(families, self.leader, series)
        return families

    def _add_totals(self, families: _Families, leader: LeaderState) -> None:
        coordinator, losses, populations = leader.coordinator, leader.losses(), self._instruments.populations
        jobs = coordinator.jobs.values()
        statuses = Counter(job.status for job in jobs)
        for status in JobStatus:
            families.add("jobs", statuses[status], status.value.lower())
        clients = Counter[tuple[str, str]]()
        for population, count in coordinator.room.count_by_population().items():
            if not populations.is_hidden(population):
                clients[populations.of(population), "waiting"] += count
        for job in jobs:
            if job.status not in ENDED_JOBS and not populations.is_hidden(job.spec.population):
                label = populations.of(job.spec.population)
                clients[label, "waiting"] += 0
                clients[label, "working"] += job.num_busy
        for labels, count in clients.items():
            families.add("clients", count, *labels)
        for population in losses.budgets:
            label = populations.of(population)
            if label == population:  # budgets have no sum
                families.add("privacy_epsilon_committed", losses.committed[population], label)
                families.add("privacy_epsilon_budget", losses.budgets[population], label)

    def _add_job(self, families: _Families, leader: LeaderState, series: JobSeries) -> None:
        job, losses = leader.coordinator.jobs.get(series.job_id), leader.losses()
        if job is None or not self._instruments.jobs.has_own(series.job_id):
            return
        labels = self._instruments.jobs.of(series.job_id)
        families.add("job_round", job.round, *labels)
        families.add("job_rounds_planned", job.spec.rounds, *labels)
        families.add("job_last_commit_timestamp_seconds", series.last_commit, *labels)
        for (source, name), value in series.metrics.items():
            families.add("job_metric", value, *labels, source, name)
        families.add("privacy_epsilon_spent", losses.spent.get(series.job_id), *labels)
        families.add("privacy_epsilon_planned", losses.planned.get(series.job_id), *labels)
        if job.status is JobStatus.RUNNING:
            families.add("job_idle_since_timestamp_seconds", series.idle_since, *labels)
            families.add("job_usual_round_seconds", usual_round_s(series, job), *labels)
            # A Flower app draws its own clients, and some private jobs must not reveal how many clients they have.
            if training_of(job).draws and disclosure_of(job.spec).shows_cohorts:
                families.add("job_clients_available", _count_available(leader.coordinator, job), *labels)
                families.add("job_clients_goal", job.spec.selection.goal, *labels)


def _count_available(coordinator: Coordinator, job: JobState) -> int:
    """Return the number of clients that the job has, or could have: in its open attempt, or waiting for it."""
    attempt = job.open_attempt
    is_training = attempt is not None and protocol_of(job, attempt.kind).folds
    num_reported = attempt.num_reported if attempt is not None and is_training else 0
    return job.num_busy + num_reported + coordinator.room.num_available(job.job_id)
