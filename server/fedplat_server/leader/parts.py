"""The parts of a leading daemon, built from the database: only this package sees them all.

What must be closed enters one exit stack when it is made. So the parts are closed in reverse order, each before those
that it uses, and after a failed start exactly those that were made.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from fedplat.config.loaded_plugins import describe_versions
from fedplat.rounds import AssignmentId, Coordinator, JobState, selection
from fedplat_server import logs
from fedplat_server.aggregation import secure_attempts, service
from fedplat_server.aggregation.backend import AggregationBackend
from fedplat_server.auth import client_directory, rate_limits
from fedplat_server.config import ServerConfig
from fedplat_server.coordination import alert_monitor, job_checks, owner
from fedplat_server.coordination.approvals import ApprovalBoards
from fedplat_server.coordination.availability import AvailabilityTracker
from fedplat_server.coordination.long_polls import EventFeed, LongPolls
from fedplat_server.coordination.progress import Downloads, ProgressTracker
from fedplat_server.coordination.retention import RetentionTask
from fedplat_server.coordination.runner import Runner
from fedplat_server.database import sql_audit, sql_contents, sql_jobs
from fedplat_server.database.store import Store
from fedplat_server.flower.runs import FlowerRuns
from fedplat_server.instruments import Instruments
from fedplat_server.messages.streams import UploadMemory
from fedplat_server.metrics.service import MetricsService
from fedplat_server.protocols import half
from fedplat_server.protocols.registry import KindParts, ServerHalves
from fedplat_server.protocols.relay import Relay
from fedplat_server.records.lease import Lease
from fedplat_server.rpc import job_registry, serving
from fedplat_server.storage import blob_stores, files, read_cache, segments, spool_backend, spool_file
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.object_store import StoreHealth
from fedplat_server.storage.spool import Spool
from fedplat_server.tracing.attempts import AttemptTraces, SentMark
from fedplat_server.training.evaluation import EvaluationScheduler, Trainers
from fedplat_server.training.server_training import ServerTraining
from fedplat_server.webhooks.addresses import parse_network
from fedplat_server.webhooks.delivery import DeliveryTask, WebhookSender
from fedplat_server.workers import client, task_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mandate:
    """What a daemon leads with: its configuration and ports, the lease, and the database under that lease."""

    config: ServerConfig
    lease: Lease
    store: Store
    endpoint: serving.Endpoint
    metrics: MetricsService
    store_retry_s: float
    started_unix_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordination:
    """The jobs, the clients and their calls. Nothing of it must be closed."""

    runner: Runner
    jobs: job_registry.JobRegistry
    clients: client_directory.ClientDirectory
    long_polls: LongPolls
    progress: ProgressTracker
    quotas: rate_limits.Quotas
    audit: rate_limits.BoundedAudit
    boards: ApprovalBoards
    draining: asyncio.Event
    """It is set when the daemon stops."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """The files of models and updates, and the memory that their transfer may take."""

    blobs: BlobStore
    spool: Spool
    relay: spool_file.RelayStore
    chunks: read_cache.Chunks
    memory: UploadMemory
    health: StoreHealth | None
    """That of the object store for updates, if there is one."""


@dataclasses.dataclass(frozen=True)
class Production:
    """What makes versions, scores them and removes old ones."""

    budgets: job_checks.Budgets
    halves: ServerHalves
    evaluation: EvaluationScheduler
    aggregation: service.Aggregation
    retention: RetentionTask


@dataclasses.dataclass(frozen=True)
class Records:
    """What shows and stores how the server and its jobs fare."""

    availability: AvailabilityTracker
    alerts: alert_monitor.AlertMonitor
    alert_recorder: alert_monitor.AlertRecorder
    downloads: Downloads
    traces: AttemptTraces | None
    event_feed: EventFeed
    webhooks: DeliveryTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaderParts:
    """All parts of a leading daemon."""

    mandate: Mandate
    coordination: Coordination
    files: Files
    production: Production
    records: Records


async def make_parts(stack: contextlib.AsyncExitStack, mandate: Mandate) -> LeaderParts:
    """Build the parts and load the jobs. What must be closed enters `stack`."""
    blobs = await _open_blobs(mandate.config, mandate.store, mandate.metrics.instruments)
    coordination = await _make_coordination(mandate)
    files = await _make_files(stack, mandate, coordination, blobs)
    versions = mandate.config.plugins.versions
    if versions:
        logs.get().info("plugins were loaded", plugins=describe_versions(versions))
    production = await _make_production(stack, mandate, coordination, files)
    records = _make_records(stack, mandate, coordination, production.budgets, files.health)
    return LeaderParts(mandate=mandate, coordination=coordination, files=files, production=production, records=records)


async def _make_coordination(mandate: Mandate) -> Coordination:
    config, store, loop = mandate.config, mandate.store, asyncio.get_running_loop()
    coordinator = Coordinator(max_waiting=config.limits.max_waiting)
    runner = Runner(coordinator, store, loop, store_retry_s=mandate.store_retry_s)
    jobs = job_registry.JobRegistry(runner)
    creators = await sql_audit.list_creators(store.audit)
    for record in await store.jobs.load_jobs(runner.now):
        participations = await sql_jobs.recall_participations(store.jobs, record.state)
        initial = await job_checks.find_initial_digest(store.jobs, record.state)
        digest = await job_checks.digest_stored(record, initial, config.plugins.table)
        jobs.add(record.with_digest(digest), participations, initial, creator=creators.get(record.state.job_id, ""))
    return Coordination(
        runner=runner,
        jobs=jobs,
        clients=client_directory.ClientDirectory(store.clients),
        long_polls=LongPolls(),
        progress=ProgressTracker(),
        quotas=rate_limits.Quotas(config.limits, loop.time),
        audit=rate_limits.BoundedAudit(store.audit, config.limits.notes_per_minute, loop.time),
        boards=ApprovalBoards(runner, store.clients, config.limits.max_text),
        draining=asyncio.Event(),
    )


async def _make_files(
    stack: contextlib.AsyncExitStack, mandate: Mandate, coordination: Coordination, blobs: BlobStore
) -> Files:
    config = mandate.config
    health = StoreHealth(config.spool_url) if config.spool_url else None
    spool = await _open_spool(config, mandate.store, mandate.lease.term, coordination.jobs, health)
    stack.push_async_callback(spool.close)
    relay = await asyncio.to_thread(spool_file.RelayStore, config.data_dir / "relay")
    memory = UploadMemory(config.limits)
    return Files(blobs=blobs, spool=spool, relay=relay, chunks=read_cache.Chunks(), memory=memory, health=health)


async def _make_production(
    stack: contextlib.AsyncExitStack, mandate: Mandate, coordination: Coordination, files: Files
) -> Production:
    config, store, post = mandate.config, mandate.store, coordination.runner.post
    budgets = job_checks.Budgets(store)
    stack.callback(budgets.accountant.close)
    training = ServerTraining(config.trainers, config.data_dir, files.blobs, post, config.plugins.references)
    halves = ServerHalves.make(_make_kind_parts(mandate, coordination, files, training))
    stack.push_async_callback(halves.close)
    states = [each.state for each in coordination.jobs.all()]
    await halves.keep(states, await owner.list_attempts(store))
    evaluation = _make_evaluation(mandate, coordination.jobs, files.blobs, training)
    stack.push_async_callback(evaluation.close)

    def open_attempt(
        job: JobState, find_job: Callable[[], JobState], inputs: task_inputs.AttemptInputs, blobs: BlobStore
    ) -> AggregationBackend:
        return halves.training_of(job.spec).open_backend(job, find_job, inputs, blobs)

    def stores_rows(job: JobState) -> bool:
        return halves.training_of(job.spec).stores_rows(job)

    def stores_row(key: AssignmentId, size_bytes: int) -> bool:
        return size_bytes <= sql_contents.MAX_BYTES and stores_rows(coordination.jobs.state(key.attempt.job_id))

    def stores_record(key: AssignmentId, size_bytes: int) -> bool:
        is_middle = sql_contents.MAX_BYTES < size_bytes <= segments.MAX_BYTES
        return is_middle and stores_rows(coordination.jobs.state(key.attempt.job_id))

    files.spool.stores_row = stores_row
    if files.spool.segments is not None:
        files.spool.segments.stores_record = stores_record
    aggregation = service.Aggregation(
        files.blobs,
        files.spool,
        store.jobs.find_version,
        post,
        service.AggregationParts(open_attempt, training, config.plugins.references, stores_rows),
    )
    stack.push_async_callback(aggregation.close)
    retention = RetentionTask(
        files.blobs,
        store,
        coordination.jobs.state,
        coordination.clients.drain_last_seen,
        (files.blobs.expire, files.spool.expire, files.relay.expire, training.expire),
        lambda: alert_monitor.DiskSpace.of(config.data_dir).is_scarce,
    )
    # It is closed before the aggregation, and so removes nothing of attempts that are cut off: another daemon may lead
    # already, have the same files from the same updates, and be about to name them in a version.
    stack.push_async_callback(retention.close)
    aggregation.on_leftovers = retention.schedule_blobs
    return Production(budgets, halves, evaluation, aggregation, retention)


def _make_kind_parts(mandate: Mandate, coordination: Coordination, files: Files, training: ServerTraining) -> KindParts:
    config, store, runner = mandate.config, mandate.store, coordination.runner
    find_waiting = functools.partial(selection.list_able, runner.coordinator.room)
    find_enrolled = coordination.clients.list_able
    return KindParts(
        common=half.HalfParts(
            limits=config.limits, blobs=files.blobs, training=training, pool=client.WorkerPool.at(config.data_dir)
        ),
        calls=half.StepPolls(runner, store.jobs, coordination.clients, coordination.long_polls, coordination.quotas),
        secure=secure_attempts.SecureAttempts(files.blobs, store.clients, store.audit),
        make_relay=lambda list_waiting: Relay(
            list_waiting=list_waiting,
            limits=config.limits,
            coordinator=runner.coordinator,
            quotas=coordination.quotas,
            memory=files.memory,
            relay=files.relay,
            chunks=files.chunks,
        ),
        clients=store.clients,
        flower=FlowerRuns(config.flower_apps, config.data_dir, files.blobs, runner.post, find_waiting, find_enrolled),
    )


def _make_evaluation(
    mandate: Mandate, jobs: job_registry.JobRegistry, blobs: BlobStore, training: ServerTraining
) -> EvaluationScheduler:
    config, table = mandate.config, mandate.metrics.table

    async def store_scores(job_id: str, version: int, scores: Mapping[str, float]) -> None:
        await mandate.store.jobs.set_version_metrics(job_id, version, scores)
        table.note_scores(job_id, scores)

    return EvaluationScheduler(
        config.evaluators,
        config.evaluation_s,
        blobs,
        store_scores,
        jobs.notify_watchers,
        Trainers(frozenset(config.trainers), training.score),
    )


def _make_records(
    stack: contextlib.AsyncExitStack,
    mandate: Mandate,
    coordination: Coordination,
    budgets: job_checks.Budgets,
    health: StoreHealth | None,
) -> Records:
    config, store, coordinator = mandate.config, mandate.store, coordination.runner.coordinator
    instruments, tracing = mandate.metrics.instruments, mandate.endpoint.tracing
    availability = AvailabilityTracker(store.fleet, coordinator)
    stack.push_async_callback(availability.close)
    alerts = _make_alerts(mandate, coordination, budgets, health)
    stack.push_async_callback(alerts.close)
    alert_recorder = alert_monitor.AlertRecorder(alerts, store, config.data_dir)
    stack.push_async_callback(alert_recorder.close)
    downloads = Downloads(store.assignments)
    stack.push_async_callback(downloads.close)
    traces = None
    if tracing is not None:
        traces = AttemptTraces(tracing, store.traces, SentMark(config.data_dir))
        stack.push_async_callback(traces.close)
    event_feed = EventFeed(store.events)
    stack.push_async_callback(event_feed.close)
    webhooks = DeliveryTask(store, WebhookSender(list(map(parse_network, config.webhook_networks))), instruments)
    stack.push_async_callback(webhooks.close)
    return Records(availability, alerts, alert_recorder, downloads, traces, event_feed, webhooks)


def _make_alerts(
    mandate: Mandate, coordination: Coordination, budgets: job_checks.Budgets, health: StoreHealth | None
) -> alert_monitor.AlertMonitor:
    config, coordinator, clock = mandate.config, coordination.runner.coordinator, asyncio.get_running_loop().time
    alerts = alert_monitor.AlertMonitor(coordinator, coordination.jobs.record, budgets.accountant, clock)
    full_writes = mandate.metrics.instruments.full_writes
    alerts.watch_disk(full_writes, config.prune_options, is_alone=not config.is_shared)
    if (certificates := mandate.endpoint.certificates) is not None:
        alerts.watch_certificate(lambda: certificates.days_left, certificates.renewal)
    if health is not None:
        alerts.watch_store(health)
    return alerts


async def _open_blobs(config: ServerConfig, store: Store, instruments: Instruments) -> BlobStore:
    """Return the blobs of the database, without those that a crash left. Raises `ConfigError` if they are not its."""
    blobs, stored = await owner.open_blobs(store, blob_stores.BlobPlace.of(config), config.database, instruments)
    await _restore_blobs(store, blobs, stored.referenced)
    found = await asyncio.to_thread(blob_stores.reconcile, blobs, blob_stores.BlobPlace.of(config), stored)
    removed, num_aside = found.orphans
    logs.get().info("blobs were reconciled", kept=len(stored.referenced), removed=removed, copied=found.copied)
    if num_aside:
        files.warn_of_set_aside(f"{config.blobs or config.data_dir / 'blobs'}/{files.SET_ASIDE_FOLDER}", num_aside)
    if found.missing:
        logs.get().error(
            "models are missing: check --blobs (FEDPLAT_BLOBS), and run fedplat-server verify with the same options",
            missing=len(found.missing),
            first=min(found.missing),
        )
    return blobs


async def _restore_blobs(store: Store, blobs: BlobStore, referenced: Collection[str]) -> None:
    """Write the blobs that are rows, and that their place has lost; remove the rows that no version references."""
    rows = await store.contents.list_blobs()
    await store.contents.remove_blobs(rows - {*referenced})  # a daemon of the last release does not remove them
    lost = await asyncio.to_thread(blobs.find_lost, rows & {*referenced})
    for start in range(0, len(lost), sql_contents.BATCH):
        contents = await store.contents.load_blobs(lost[start : start + sql_contents.BATCH])
        await asyncio.to_thread(blobs.restore, contents)
    if lost:
        logs.get().info("blobs were restored from the database", blobs=len(lost))


async def _open_spool(
    config: ServerConfig, store: Store, term: int, jobs: job_registry.JobRegistry, health: StoreHealth | None
) -> Spool:
    """Return the spool with the updates that the jobs need. Raises `ConfigError` if it is another database's."""
    backend: spool_backend.SpoolBackend = spool_backend.FolderBackend(Path(config.spool) if config.spool else None)
    if health is not None:
        backend = spool_backend.open_backend(config.spool_url, term, health, 2 * config.limits.max_model_bytes)
    known = await owner.list_attempts(store)
    if config.spool:
        await asyncio.to_thread(backend.claim, await owner.identify(store, config.database), known)
    # An object store makes updates durable on another host, and by itself.
    records = segments.Segments(config.upload_dir.with_name(segments.FOLDER)) if health is None else None
    spool = await asyncio.to_thread(Spool, config.upload_dir, jobs.is_in_memory, backend, records)
    needed = jobs.needed_updates()
    await asyncio.to_thread(spool.keep, needed, known)
    wanted = frozenset(needed)
    rows = await store.contents.load_updates()
    await store.contents.remove_updates(rows.keys() - wanted)  # of attempts that a daemon of the last release ended
    await asyncio.to_thread(spool.restore_rows, {key: row for key, row in rows.items() if key in wanted})
    return spool
