"""A scrape: gauges computed from the coordinator and other parts, privacy losses, and the instruments.

Computing an epsilon may take seconds, so a scrape returns the results of the last computation. The accountant's thread
computes them after each change, and spends at most a twentieth of the time on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from fedplat.rounds import Coordinator, JobState, privacy_rules, states
from fedplat.rounds.protocols.base import protocol_of, training_of
from fedplat_server import __version__, logs
from fedplat_server.auth.tls import Certificates
from fedplat_server.coordination import job_checks
from fedplat_server.coordination.job_checks import Accountant
from fedplat_server.database.records import Population
from fedplat_server.database.sql_ledger import LedgerStore
from fedplat_server.errors import LeadershipLostError, StoreError
from fedplat_server.instruments import METRIC_PREFIX, METRICS, Instruments
from fedplat_server.metrics.job_series import JobSeries, JobSeriesTable, usual_round_s


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
        info = METRICS[METRIC_PREFIX + name]
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
        for status in states.JobStatus:
            families.add("jobs", statuses[status], status.value.lower())
        clients = Counter[tuple[str, str]]()
        for population, count in coordinator.room.count_by_population().items():
            if not populations.is_hidden(population):
                clients[populations.of(population), "waiting"] += count
        for job in jobs:
            if job.status not in states.ENDED_JOBS and not populations.is_hidden(job.spec.population):
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
        if job.status is states.JobStatus.RUNNING:
            families.add("job_idle_since_timestamp_seconds", series.idle_since, *labels)
            families.add("job_usual_round_seconds", usual_round_s(series, job), *labels)
            # A Flower app draws its own clients, and some private jobs must not reveal how many clients they have.
            if training_of(job).draws and privacy_rules.disclosure_of(job.spec).shows_cohorts:
                families.add("job_clients_available", _count_available(leader.coordinator, job), *labels)
                families.add("job_clients_goal", job.spec.selection.goal, *labels)


def _count_available(coordinator: Coordinator, job: JobState) -> int:
    """Return the number of clients that the job has, or could have: in its open attempt, or waiting for it."""
    attempt = job.open_attempt
    is_training = attempt is not None and protocol_of(job, attempt.kind).folds
    num_reported = attempt.num_reported if attempt is not None and is_training else 0
    return job.num_busy + num_reported + coordinator.room.num_available(job.job_id)


MIN_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
"""A budget that an operator has changed is read after this time."""
PAUSE_FACTOR = 19.0
"""The pause after a computation, as a multiple of its duration."""


@dataclasses.dataclass(frozen=True)
class PrivacyLosses:
    """Epsilons: what jobs have spent and planned, and what counts against budgets, by job and by population."""

    spent: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    planned: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    committed: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    budgets: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


def compute_privacy_costs(jobs: Sequence[JobState], populations: Sequence[Population]) -> PrivacyLosses:
    """Compute the losses of the private ones of some jobs, and of populations with a budget."""
    losses = PrivacyLosses()
    accounts = {account.job_id: account for population in populations for account in population.accounts}
    for job in jobs:
        account, options = accounts.get(job.job_id), job.spec.privacy
        if account is None or account.planned is None or options is None:
            continue
        losses.spent[job.job_id] = job_checks.epsilon(account.released, options.delta)
        losses.planned[job.job_id] = job_checks.epsilon((account.planned,), options.delta)
    for population in populations:
        if population.budget is not None:
            losses.committed[population.name] = job_checks.epsilon(population.charges, population.budget.delta)
            losses.budgets[population.name] = population.budget.epsilon
    return losses


class PrivacyCosts:
    """The task that keeps `losses` up to date while this daemon leads. `jobs` returns the jobs to compute."""

    def __init__(self, ledger: LedgerStore, thread: Accountant, jobs: Callable[[], Sequence[JobState]]) -> None:
        self.losses = PrivacyLosses()
        self._ledger = ledger
        self._thread = thread
        self._jobs = jobs
        self._changed = asyncio.Event()

    def refresh(self) -> None:
        """Compute again soon: a private job has released something, or a job has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Compute the losses after each change and once a minute, until cancelled."""
        while True:
            self._changed.clear()
            started = time.monotonic()
            try:
                populations = await self._ledger.load_populations()
                jobs = [job for job in self._jobs() if privacy_rules.disclosure_of(job.spec).is_charged]
                if jobs or any(population.budget is not None for population in populations):
                    self.losses = await self._thread.run(compute_privacy_costs, jobs, populations)
                else:
                    self.losses = PrivacyLosses()
            except LeadershipLostError:
                return
            except StoreError as exc:
                logs.get().warning("the privacy budgets could not be read for the metrics", error=str(exc))
            await asyncio.sleep(max(MIN_PAUSE_S, PAUSE_FACTOR * (time.monotonic() - started)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), MAX_PAUSE_S)
