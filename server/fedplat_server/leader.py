"""The parts of a leading daemon: built from the database, they execute the coordinator's commands."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from fedplat.config.loaded_plugins import describe_versions
from fedplat.job.sections import Retention
from fedplat.rounds import Change, Coordinator, HistoryRow, JobState, ModelVersion, selection
from fedplat.rounds.commands import (
    Abandon,
    Abort,
    Assign,
    Command,
    Commit,
    Fold,
    NextStep,
    Refuse,
    Restart,
    RunWarmStart,
)
from fedplat.rounds.events import ServerRestarted
from fedplat.rounds.protocols.base import protocol_of
from fedplat.rounds.states import ENDED_JOBS, AttemptPhase
from fedplat_server import logs
from fedplat_server.aggregation.backend import AggregationBackend
from fedplat_server.aggregation.secure_attempts import SecureAttempts
from fedplat_server.aggregation.service import Aggregation, AggregationParts
from fedplat_server.auth.addresses import Origins
from fedplat_server.auth.audit_limits import BoundedAudit
from fedplat_server.auth.authentication import Authenticator
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.enrollment import Enrollments, Trust
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.config import ServerConfig
from fedplat_server.coordination import owner
from fedplat_server.coordination.alert_monitor import AlertMonitor, DiskSpace
from fedplat_server.coordination.alert_recorder import AlertRecorder
from fedplat_server.coordination.availability import AvailabilityTracker
from fedplat_server.coordination.budgets import Budgets
from fedplat_server.coordination.conflicts import Conflicts
from fedplat_server.coordination.downloads import Downloads
from fedplat_server.coordination.event_feed import EventFeed
from fedplat_server.coordination.fleet_counts import FleetCounter
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.retention import RetentionTask
from fedplat_server.coordination.revocation import Revocation
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.sql_audit import list_creators
from fedplat_server.database.sql_jobs import recall_participations
from fedplat_server.database.store import Store
from fedplat_server.flower.runs import FlowerRuns
from fedplat_server.instruments import Instruments
from fedplat_server.messages.memory import UploadMemory
from fedplat_server.metrics.service import MetricsService
from fedplat_server.protocols.half import HalfParts
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.records.lease import Lease
from fedplat_server.rpc import serving
from fedplat_server.rpc.services import JobRegistry, Services
from fedplat_server.storage import set_aside
from fedplat_server.storage.blob_stores import BlobPlace, reconcile
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.read_cache import Chunks, InlineModels
from fedplat_server.storage.relay_store import RelayStore
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_backend import FolderBackend, SpoolBackend, open_backend
from fedplat_server.storage.store_health import StoreHealth
from fedplat_server.tracing.attempts import AttemptTraces, SentMark
from fedplat_server.training.evaluation import EvaluationScheduler, Trainers
from fedplat_server.training.server_training import ServerTraining
from fedplat_server.webhooks.addresses import parse_network
from fedplat_server.webhooks.delivery import DeliveryTask
from fedplat_server.webhooks.sender import WebhookSender
from fedplat_server.workers.attempt_inputs import AttemptInputs
from fedplat_server.workers.client import WorkerPool


class LeaderParts:
    """The running parts; executes the coordinator's commands."""

    runner_task: asyncio.Task[None]

    def __init__(
        self,
        services: Services,
        aggregation: Aggregation,
        retention: RetentionTask,
    ) -> None:
        self.services = services
        self._aggregation = aggregation
        self._retention = retention
        self._retention_options: dict[str, Retention] = {}
        self._alert_recorder = AlertRecorder(services.alerts, services.store, services.config.data_dir)
        self._traces: AttemptTraces | None = None

    @classmethod
    async def make(
        cls,
        config: ServerConfig,
        store: Store,
        lease: Lease,
        endpoint: serving.Endpoint,
        store_retry_s: float,
        metrics: MetricsService,
    ) -> LeaderParts:
        """Build the parts and load the jobs."""
        blobs = await _open_blobs(config, store, metrics.instruments)
        loop = asyncio.get_running_loop()
        runner = Runner(Coordinator(max_waiting=config.limits.max_waiting), store, loop, store_retry_s=store_retry_s)
        jobs = JobRegistry(runner)
        await _load_jobs(store, jobs, runner.now)
        health = StoreHealth(config.spool_url) if config.spool_url else None
        spool = await _open_spool(config, store, lease.term, jobs, health)
        relay = await asyncio.to_thread(RelayStore, config.data_dir / "relay")
        clients = ClientDirectory(store.clients)
        bounded_audit = BoundedAudit(store.audit, config.limits.notes_per_minute, loop.time)
        if config.plugins.versions:
            logs.get().info("plugins were loaded", plugins=describe_versions(config.plugins.versions))
        training = ServerTraining(config.trainers, config.data_dir, blobs, runner.post, config.plugins.references)
        waiting = functools.partial(selection.list_able, runner.coordinator.room)
        flower = FlowerRuns(config.flower_apps, config.data_dir, blobs, runner.post, waiting, clients.list_able)

        async def store_scores(job_id: str, version: int, scores: Mapping[str, float]) -> None:
            await store.jobs.set_version_metrics(job_id, version, scores)
            metrics.table.note_scores(job_id, scores)

        evaluation = EvaluationScheduler(
            config.evaluators,
            config.evaluation_s,
            blobs,
            store_scores,
            jobs.notify_watchers,
            Trainers(frozenset(config.trainers), training.score),
        )
        budgets = Budgets(store)
        alerts = AlertMonitor(runner.coordinator, jobs.record, budgets.accountant, loop.time)
        alerts.watch_disk(metrics.instruments.full_writes, config.prune_options, is_alone=not config.is_shared)
        if (certificates := endpoint.certificates) is not None:
            alerts.watch_certificate(lambda: certificates.days_left, certificates.renewal)
        if health is not None:
            alerts.watch_store(health)
        secure = SecureAttempts(blobs, store.clients, store.audit)
        pool, long_polls, chunks = WorkerPool.at(config.data_dir), LongPolls(), Chunks()
        quotas, memory = Quotas(config.limits, loop.time), UploadMemory(config.limits)
        halves = ServerHalves(
            HalfParts(
                limits=config.limits,
                store=store,
                runner=runner,
                clients=clients,
                long_polls=long_polls,
                quotas=quotas,
                memory=memory,
                chunks=chunks,
                blobs=blobs,
                relay=relay,
                secure=secure,
                training=training,
                flower=flower,
                pool=pool,
            )
        )
        await halves.keep([each.state for each in jobs.all()], await owner.list_attempts(store))
        services = Services(
            config=config,
            lease=lease,
            store=store,
            runner=runner,
            jobs=jobs,
            clients=clients,
            authenticator=Authenticator(bounded_audit, clients),
            enrollments=Enrollments(store.clients, clients, lambda: Trust.of(endpoint.certificates)),
            revocation=Revocation(store.clients, clients),
            issuer=endpoint.issuer,
            peers=endpoint.peers,
            long_polls=long_polls,
            progress=ProgressTracker(),
            downloads=Downloads(store.assignments),
            blobs=blobs,
            chunks=chunks,
            inline_models=InlineModels(blobs),
            spool=spool,
            halves=halves,
            evaluation=evaluation,
            quotas=quotas,
            origins=Origins(config.trusted_proxies, lease.secret),
            bounded_audit=bounded_audit,
            memory=memory,
            conflicts=Conflicts(store.audit),
            budgets=budgets,
            alerts=alerts,
            availability=AvailabilityTracker(store.fleet, runner.coordinator),
            fleet_counter=FleetCounter(store.fleet, loop.time),
            event_feed=EventFeed(store.events),
            webhooks=DeliveryTask(
                store, WebhookSender(list(map(parse_network, config.webhook_networks))), metrics.instruments
            ),
            started_unix_s=time.time(),
            new_id=lambda kind: f"{kind}-{uuid4().hex[:12]}",
            instruments=metrics.instruments,
            certificates=endpoint.certificates,
            mtls_port=endpoint.mtls_port,
            is_tracing=endpoint.tracing is not None,
        )
        set_asides = (blobs.expire, spool.expire, relay.expire, training.expire)
        retention = RetentionTask(
            blobs,
            store,
            jobs.state,
            clients.drain_last_seen,
            set_asides,
            lambda: DiskSpace.of(config.data_dir).is_scarce,
        )

        def open_backend(
            job: JobState, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore
        ) -> AggregationBackend:
            return halves.training_of(job.spec).open_backend(job, find_job, inputs, blobs)

        aggregation = Aggregation(
            blobs,
            spool,
            store.jobs.find_version,
            runner.post,
            AggregationParts(open_backend, training, config.plugins.references),
            on_leftovers=retention.schedule_blobs,
        )
        parts = cls(services, aggregation, retention)
        if endpoint.tracing is not None:
            parts._traces = AttemptTraces(endpoint.tracing, store.traces, SentMark(config.data_dir))
        return parts

    async def restore(self) -> None:
        """Resume every job, and score the versions that have no metrics yet."""
        if self._traces is not None:
            await self._traces.begin()
        services, config_plugins = self.services, self.services.config.plugins
        for record in services.jobs.all():
            loaded = config_plugins.select(record.state.plugins)
            await services.runner.submit(ServerRestarted(record.state.job_id, loaded, record.problem))
            for version in await services.store.jobs.list_versions(record.state.job_id):
                if not version.metrics and version.model_removed_unix_s is None:
                    self._score(record.state, version.version)
            self._retention.schedule_job(record.state.job_id)
        await services.alerts.restore(services.store)
        services.alerts.begin(services.store)
        await self._alert_recorder.begin()
        services.availability.begin()
        services.halves.begin()
        self._retention.begin()
        self.services.webhooks.begin()

    def act(self, command: Command) -> None:
        """Execute a command of the coordinator."""
        services = self.services
        match command:
            case Assign() | Refuse():
                services.long_polls.deliver(command)
            case Abort():
                services.long_polls.stop(command)
            case NextStep():
                services.long_polls.advance(command.key)
            case Fold() | Restart() | Commit():
                self._aggregation.submit(services.jobs.state(command.key.job_id), command)
            case RunWarmStart():
                job = services.jobs.state(command.key.job_id)
                services.halves.training_of(job.spec).begin_alone(job, command)
            case Abandon():
                services.long_polls.advance(command.key)
                services.halves.training_of(services.jobs.state(command.key.job_id).spec).end(command.key)
                self._aggregation.end(command.key)

    def on_stored(self, changes: Sequence[Change]) -> None:
        """Log stored changes, delete the data that they make obsolete, wake watchers and score new versions."""
        if self._traces is not None:
            self._traces.on_stored(changes)
        self.services.spool.apply_changes(changes)
        self.services.progress.drop_ended(changes)
        self.services.downloads.apply_changes(changes)
        self.services.alerts.apply_changes(changes)
        halves = self.services.halves
        for change in changes:
            job_id = change.job.job_id
            halves.on_stored(change)
            for row in change.history:
                logs.get().info(
                    f"{row.entity} {row.from_state or 'new'} -> {row.to_state}",
                    job=job_id,
                    **_fields(row),
                )
            if change.version is not None:
                if change.attempt is not None and change.version.restored_from is None:
                    self._aggregation.end(change.attempt.key)
                    halves.training_of(change.job.spec).end(change.attempt.key)
                self._score(change.job, change.version)
            options, known = change.job.spec.retention, self._retention_options.get(job_id)
            if change.version is not None or change.job.status in ENDED_JOBS or options is not known:
                self._retention_options[job_id] = options
                self._retention.schedule_job(job_id)
            self.services.jobs.notify_watchers(job_id)

    async def wait_for_commits(self) -> None:
        """Wait until no version is being committed."""
        while self._is_committing() or self.services.runner.has_events:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End every background task."""
        self.services.runner.stop_timers()
        await self.services.webhooks.close()
        await self.services.event_feed.close()
        if self._traces is not None:
            await self._traces.close()
        await self.services.downloads.close()
        await self._alert_recorder.close()
        await self.services.alerts.close()
        await self.services.availability.close()
        await self._retention.close()
        await self._aggregation.close()
        await self.services.spool.close()
        await self.services.evaluation.close()
        await self.services.halves.close()
        self.services.budgets.accountant.close()

    def _is_committing(self) -> bool:
        # A warm start does not finish: it may need hours, and resumes from its last checkpoint.
        return any(
            attempt.phase is AttemptPhase.COMMITTING and protocol_of(job, attempt.kind).finishes
            for job in self.services.runner.coordinator.jobs.values()
            if (attempt := job.open_attempt) is not None
        )

    def _score(self, job: JobState, version: ModelVersion) -> None:
        if version.version > 0 and self.services.evaluation.is_due(job, version):
            self.services.evaluation.schedule(job, version)


async def _load_jobs(store: Store, jobs: JobRegistry, now: float) -> None:
    creators = await list_creators(store.audit)
    for record in await store.jobs.load_jobs(now):
        participations = await recall_participations(store.jobs, record.state)
        jobs.add(record, participations, creator=creators.get(record.state.job_id, ""))


async def _open_blobs(config: ServerConfig, store: Store, instruments: Instruments) -> BlobStore:
    """Return the blobs of the database, without those that a crash left. Raises `ConfigError` if they are not its."""
    blobs, stored = await owner.open_blobs(store, BlobPlace.of(config), config.database, instruments)
    found = await asyncio.to_thread(reconcile, blobs, BlobPlace.of(config), stored)
    removed, num_aside = found.orphans
    logs.get().info("blobs were reconciled", kept=len(stored.referenced), removed=removed, copied=found.copied)
    if num_aside:
        set_aside.warn(f"{config.blobs or config.data_dir / 'blobs'}/{set_aside.FOLDER}", num_aside)
    if found.missing:
        logs.get().error(
            "models are missing: check --blobs (FEDPLAT_BLOBS), and run fedplat-server verify with the same options",
            missing=len(found.missing),
            first=min(found.missing),
        )
    return blobs


async def _open_spool(
    config: ServerConfig, store: Store, term: int, jobs: JobRegistry, health: StoreHealth | None
) -> Spool:
    """Return the spool with the updates that the jobs need. Raises `ConfigError` if it is another database's."""
    backend: SpoolBackend = FolderBackend(Path(config.spool) if config.spool else None)
    if health is not None:
        backend = open_backend(config.spool_url, term, health, 2 * config.limits.max_model_bytes)
    known = await owner.list_attempts(store)
    if config.spool:
        await asyncio.to_thread(backend.claim, await owner.identify(store, config.database), known)
    spool = await asyncio.to_thread(Spool, config.upload_dir, jobs.is_in_memory, backend)
    await asyncio.to_thread(spool.keep, jobs.needed_updates(), known)
    return spool


def _fields(row: HistoryRow) -> dict[str, object]:
    fields = {
        "round": row.round,
        "attempt": row.attempt,
        "client": row.client_id,
        "reason": row.reason,
        "metrics": dict(row.metrics),
    }
    # An attempt of round 0 is one, too.
    return {name: value for name, value in fields.items() if value or (name == "round" and row.attempt)}
