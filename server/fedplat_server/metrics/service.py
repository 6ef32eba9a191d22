"""The metrics as a part of the daemon: the endpoint for its whole lifetime, and what it shows while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import AsyncGenerator, Callable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from fedplat.rounds import JobState
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server import instruments, logs
from fedplat_server.auth import pki_folder, tls
from fedplat_server.config import ServerConfig
from fedplat_server.coordination.budgets import Accountant
from fedplat_server.coordination.runner import Actor, Runner
from fedplat_server.database.store import Store
from fedplat_server.metrics.collector import DaemonCollector, LeaderState, PrivacyCosts
from fedplat_server.metrics.endpoint import MetricsEndpoint
from fedplat_server.metrics.job_series import NUM_COMMITS, JobSeriesTable, ObservedActor
from fedplat_server.rpc.job_registry import JobRegistry

LAG_EVERY_S = 0.5


def _find_names(config: ServerConfig) -> list[str]:
    """Return the names by which others reach this daemon."""
    names = [config.advertise.rpartition(":")[0]] if config.advertise else []
    return names + (pki_folder.hosts_of(pki_folder.read(config.tls.certificate)[0]) if config.tls is not None else [])


class MetricsService:
    """The metrics of a daemon. Without `metrics_listen` it serves nothing and observes nothing.

    `count_dropped_lines` returns the number of dropped lines of the log.
    """

    def __init__(self, config: ServerConfig, count_dropped_lines: Callable[[], int]) -> None:
        self._config = config
        self._count_dropped_lines = count_dropped_lines
        self._collector: DaemonCollector | None = None
        self.instruments = instruments.Instruments()
        self.table = JobSeriesTable(self.instruments, config.job_metrics, time.time)
        self.port = 0

    @contextlib.asynccontextmanager
    async def serve(self, certificates: tls.Certificates | None) -> AsyncGenerator[None]:
        """Serve the metrics within the block. Raises `ConfigError` if the port is unavailable."""
        if not self._config.metrics_listen:
            yield
            return
        registry = CollectorRegistry()
        endpoint = MetricsEndpoint(self._config.metrics_listen, registry, _find_names(self._config))
        self.port = endpoint.port
        self._collector = DaemonCollector(self.instruments, self.table, certificates, self._count_dropped_lines)
        registry.register(self._collector)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        lag = asyncio.create_task(self._measure_lag(), name="event loop lag")
        try:
            async with endpoint.serve():
                self._log_address()
                yield
        finally:
            lag.cancel()
            await asyncio.gather(lag, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def observe(
        self, actor: Actor, runner: Runner, jobs: JobRegistry, store: Store, accountant: Accountant
    ) -> AsyncGenerator[Actor]:
        """Yield the actor for the runner of the leader: `actor`, observed if metrics are served."""
        if self._collector is None:
            yield actor
            return
        for state in [record.state for record in jobs.all() if record.state.status not in ENDED_JOBS]:
            after = max(state.latest.version - NUM_COMMITS - 1, -1)
            self.table.restore(state, await store.jobs.list_versions(state.job_id, after=after))
        coordinator = runner.coordinator

        def now() -> float:
            return runner.now

        def list_jobs() -> list[JobState]:
            return [coordinator.jobs[each.job_id] for each in self.table.all() if each.job_id in coordinator.jobs]

        costs = PrivacyCosts(store.ledger, accountant, list_jobs)
        task = asyncio.create_task(costs.run(), name="privacy costs")
        self._collector.leader = LeaderState(coordinator, lambda: costs.losses)
        try:
            yield ObservedActor(actor, self.instruments, self.table, now, costs.refresh)
        finally:
            self._collector.leader = None
            self.table.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.instruments.event_loop_lag.observe(max(loop.time() - due, 0.0))

    def _log_address(self) -> None:
        host = self._config.metrics_listen.rpartition(":")[0].strip("[]")
        with contextlib.suppress(ValueError):  # a name
            address = ipaddress.ip_address(host)
            if address.is_unspecified or address.is_global:
                logs.get().warning(
                    "the metrics need no login: every host that reaches this address can read names and numbers of "
                    "jobs",
                    listen=self._config.metrics_listen,
                    mend="listen on loopback or a private network, or allow only Prometheus in the firewall",
                )
        logs.get().info("the metrics are served", port=self.port)
