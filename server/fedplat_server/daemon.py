"""The daemon: builds the server's parts, starts them in order and stops them in reverse order.

Start with `Daemon.run`. If a part fails, the daemon ends: a restart is always safe, a half-running server is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from fedplat.loaded_plugins import describe_versions
from fedplat.rounds import Change, Coordinator, HistoryRow, JobState, ModelVersion, selection
from fedplat.rounds.commands import Abandon, Abort, Assign, Command, Commit, Fold, Refuse, Restart, RunWarmStart
from fedplat.rounds.events import ServerRestarted
from fedplat.rounds.states import ENDED_JOBS, AttemptKind, AttemptPhase
from fedplat_server import __version__, logs
from fedplat_server.aggregation.service import Accelerators, Aggregation
from fedplat_server.auth import tls
from fedplat_server.auth.addresses import Origins
from fedplat_server.auth.audit_limits import BoundedAudit
from fedplat_server.auth.authentication import Authenticator
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.enrollment import Enrollments, Trust
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.config import ServerConfig
from fedplat_server.coordination.budgets import Budgets
from fedplat_server.coordination.conflicts import Conflicts
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.retention import RetentionTask
from fedplat_server.coordination.revocation import Revocation
from fedplat_server.coordination.runner import STORE_RETRY_S, Runner
from fedplat_server.database.engine import async_url, sqlite_path
from fedplat_server.database.ports import Store, recall_participations
from fedplat_server.database.store import open_store as _open_store
from fedplat_server.errors import LeadershipLostError, StoreError, StoreUnavailableError
from fedplat_server.flower.runs import FlowerRuns
from fedplat_server.leadership.election import Election, open_election
from fedplat_server.records import audit
from fedplat_server.records.lease import Candidate, HeldLease, Lease
from fedplat_server.rpc import serving
from fedplat_server.rpc.memory import UploadMemory
from fedplat_server.rpc.routing.follower import Follower
from fedplat_server.rpc.routing.gateway import GatewayOptions
from fedplat_server.rpc.routing.router import NoLeader
from fedplat_server.rpc.services import JobRegistry, Services, has_pending_warm_start
from fedplat_server.storage import data_dir
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.read_cache import Chunks, InlineModels
from fedplat_server.storage.spool import Spool
from fedplat_server.training.evaluation import EvaluationScheduler, Trainers
from fedplat_server.training.server_training import ServerTraining
from fedplat_server.workers.client import WorkerPool

FAREWELL_S = 0.5
"""Time for answers just given to be delivered, and for the audit row of the stop, before connections are closed."""
OpenStore = Callable[[str], Awaitable[Store]]
_T = TypeVar("_T")


class Daemon:
    """One server process. `port` is set when it has started.

    Of several daemons on one PostgreSQL one leads, and the others forward calls to it. A daemon may change its role at
    any time; its port stays the same. `utc_now` is the clock for checking clients' certificates, `store_retry_s` the
    first delay before a retry if the database does not answer.
    """

    def __init__(
        self,
        config: ServerConfig,
        open_store: OpenStore | None = None,
        utc_now: Callable[[], datetime.datetime] = tls.utc_now,
        store_retry_s: float = STORE_RETRY_S,
    ) -> None:
        self._config = config
        self._store_retry_s = store_retry_s
        self._utc_now = utc_now
        self._open_store = open_store or functools.partial(_open_store, plugins=config.plugins.table)
        self.port = self.mtls_port = 0
        self.started = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make the daemon drain and end."""
        self._stopping.set()

    async def run(self) -> None:
        """Start, lead or follow until `stop`, then drain and end. Raises the error of a part that failed."""
        config = self._config
        with data_dir.lock_data_dir(config.data_dir, shared=config.is_shared):
            for warning in data_dir.protect(config.data_dir, sqlite_path(async_url(config.database))):
                logs.get().warning(warning)
            async with contextlib.AsyncExitStack() as stack:
                endpoint = serving.Endpoint(config, self._utc_now)
                self.port, self.mtls_port = endpoint.port, endpoint.mtls_port
                stack.push_async_callback(endpoint.stop, 0)
                watch = asyncio.create_task(self._watch(endpoint.certificates), name="certificates")
                stack.push_async_callback(_cancel, watch)
                candidate = Candidate(f"d-{uuid4().hex[:12]}", config.address(self.port))
                election = await self._wait_unless_stopped(open_election(config, candidate))
                if election is None:
                    return
                stack.push_async_callback(election.close)
                while not self._stopping.is_set():
                    held_lease = await self._follow(endpoint, election, candidate)
                    if held_lease is not None:
                        await self._lead(endpoint, election, held_lease)
                await endpoint.stop(FAREWELL_S)

    async def _watch(self, certificates: tls.Certificates | None) -> None:
        # Warnings wait for the start: a daemon that cannot start logs only the reason.
        await self.started.wait()
        await tls.watch(certificates, self._config.listen)

    async def _follow(self, endpoint: serving.Endpoint, election: Election, candidate: Candidate) -> HeldLease | None:
        """Forward calls to the leader until this daemon is elected; return None if it is stopped before that."""

        async def set_serving(is_serving: bool) -> None:
            await endpoint.health.set_ready(is_serving)
            if is_serving:
                await self._start_once(endpoint)

        options = GatewayOptions(self._config.tls, endpoint.peers.client_of, UploadMemory(self._config.limits))
        follower = Follower(candidate.holder, endpoint.router, set_serving, options)
        try:
            return await self._wait_unless_stopped(election.elect(follower.follow))
        finally:
            await follower.close()
            await endpoint.health.set_ready(False)

    async def _lead(self, endpoint: serving.Endpoint, election: Election, held_lease: HeldLease) -> None:
        """Run the jobs until the daemon is stopped or loses the lead."""
        lease_task = asyncio.create_task(election.keep(held_lease), name="lease")
        try:
            async with contextlib.AsyncExitStack() as stack:
                parts = await self._wait_unless_stopped(self._start(stack, endpoint, held_lease), lease_task)
                if parts is None:
                    return
                await self._wait_unless_stopped(asyncio.shield(parts.runner_task), lease_task)
                await self._drain(endpoint, parts)
        except (LeadershipLostError, StoreUnavailableError) as exc:
            if not self.started.is_set():  # it has served no caller yet: end with a clear error, do not wait
                raise
            logs.get().error("this daemon no longer leads the jobs", term=held_lease.lease.term, reason=str(exc))
        finally:
            await _cancel(lease_task)
            await election.resign(held_lease)

    async def _start(
        self, stack: contextlib.AsyncExitStack, endpoint: serving.Endpoint, held_lease: HeldLease
    ) -> _LeaderParts:
        store = await self._open_store(self._config.database)
        stack.push_async_callback(store.close)
        await stack.enter_async_context(_sever_if_lost(store))
        if held_lease.lease.term:
            await store.fence(held_lease.lease.term)
        parts = await _LeaderParts.make(self._config, store, held_lease.lease, endpoint, self._store_retry_s)
        stack.push_async_callback(parts.close)
        parts.runner_task = asyncio.create_task(parts.services.runner.run(parts), name="runner")
        stack.push_async_callback(_cancel, parts.runner_task)
        await stack.enter_async_context(_sever_if_lost(store))
        await parts.restore()
        await _note(store, audit.AuditAction.SERVER_STARTED)
        await stack.enter_async_context(_accept_calls(endpoint, parts.services))
        await stack.enter_async_context(_sever_if_lost(store))
        await endpoint.health.set_ready(True)
        stack.push_async_callback(endpoint.health.set_ready, False)
        watch = asyncio.create_task(endpoint.health.watch(store, parts.services.runner), name="health")
        stack.push_async_callback(_cancel, watch)
        await self._start_once(endpoint)
        logs.get().info("this daemon leads the jobs", term=held_lease.lease.term)
        return parts

    async def _start_once(self, endpoint: serving.Endpoint) -> None:
        """Start the endpoint when this daemon can first answer calls, as leader or by forwarding them."""
        if not self.started.is_set():
            await endpoint.start()
            self.started.set()
            ports = {"port": self.port} | ({"mtls_port": self.mtls_port} if self.mtls_port else {})
            logs.get().info("the server is ready", **ports, data_dir=str(self._config.data_dir))

    async def _wait_unless_stopped(self, result: Awaitable[_T], *guards: asyncio.Task[None]) -> _T | None:
        """Await a result, or return None on `stop`: a database may never answer. Raises the error of a failed guard."""
        task = asyncio.ensure_future(result)
        stop_task = asyncio.create_task(self._stopping.wait(), name="stop signal")
        try:
            await asyncio.wait([task, stop_task, *guards], return_when=asyncio.FIRST_COMPLETED)
            for guard in guards:
                if guard.done():
                    guard.result()
            return await task if task.done() else None
        finally:
            await _cancel(stop_task)
            await _cancel(task)

    async def _drain(self, endpoint: serving.Endpoint, parts: _LeaderParts) -> None:
        """Refuse new work, and let commits finish within the grace period."""
        grace_s, services = self._config.grace_s, parts.services
        logs.get().info("the server is stopping", grace_s=grace_s)
        services.draining = True
        await endpoint.health.stop()
        services.jobs.wake_all()
        services.long_polls.release()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(parts.wait_for_commits(), grace_s)
        with contextlib.suppress(StoreError, TimeoutError):  # the server ends even if it cannot write its audit row
            async with asyncio.timeout(max(grace_s, FAREWELL_S)):
                await services.bounded_audit.finish()
                await _note(services.store, audit.AuditAction.SERVER_STOPPED)
        # Leave time to deliver the answers just given. Heartbeats, which wait longer, are cut off.
        await endpoint.stop(min(grace_s, FAREWELL_S))


@contextlib.asynccontextmanager
async def _sever_if_lost(store: Store) -> AsyncGenerator[None]:
    """Cut the database connections if the lead is lost, so that nothing waits for a database that may be the cause."""
    try:
        yield
    except LeadershipLostError:
        await store.sever()
        raise


@contextlib.asynccontextmanager
async def _accept_calls(endpoint: serving.Endpoint, services: Services) -> AsyncGenerator[None]:
    """Route calls to the services of this daemon; on exit, wait until no call is in progress."""
    endpoint.router.set_route(serving.route(services, endpoint.reads))
    try:
        yield
    finally:
        calls = endpoint.router.set_route(NoLeader())
        await calls.wait_until_none()


class _LeaderParts:
    """The running parts; executes the coordinator's commands."""

    runner_task: asyncio.Task[None]

    def __init__(
        self,
        services: Services,
        aggregation: Aggregation,
        training: ServerTraining,
        flower: FlowerRuns,
        retention: RetentionTask,
    ) -> None:
        self.services = services
        self._aggregation = aggregation
        self._training = training
        self._flower = flower
        self._retention = retention

    @classmethod
    async def make(
        cls, config: ServerConfig, store: Store, lease: Lease, endpoint: serving.Endpoint, store_retry_s: float
    ) -> _LeaderParts:
        """Build the parts and load the jobs."""
        blobs = await asyncio.to_thread(BlobStore, config.blob_dir)
        # Blobs that the database does not reference were left by a crash.
        referenced = await store.retention.list_referenced()
        removed = await asyncio.to_thread(blobs.remove_orphans, referenced)
        logs.get().info("blobs were reconciled", kept=len(referenced), removed=removed)
        loop = asyncio.get_running_loop()
        runner = Runner(Coordinator(max_waiting=config.limits.max_waiting), store, loop, store_retry_s=store_retry_s)
        jobs = JobRegistry(runner)
        for record in await store.jobs.load_jobs(runner.now):
            jobs.add(record, await recall_participations(store.jobs, record.state))
        spool = await asyncio.to_thread(Spool, config.upload_dir, jobs.is_in_memory)
        await asyncio.to_thread(spool.keep, jobs.needed_updates())
        clients = ClientDirectory(store.clients)
        bounded_audit = BoundedAudit(store.audit, config.limits.notes_per_minute, loop.time)
        if config.plugins.versions:
            logs.get().info("plugins were loaded", plugins=describe_versions(config.plugins.versions))
        references = config.plugins.references
        training = ServerTraining(config.trainers, config.data_dir, blobs, runner.post, references)
        await asyncio.to_thread(training.keep, jobs.pending_warm_starts())
        waiting = functools.partial(selection.list_able, runner.coordinator.room)
        flower = FlowerRuns(config.flower_apps, config.data_dir, blobs, runner.post, waiting, clients.list_able)
        evaluation = EvaluationScheduler(
            config.evaluators,
            config.evaluation_s,
            blobs,
            store.jobs.set_version_metrics,
            jobs.notify_watchers,
            Trainers(frozenset(config.trainers), training.score),
        )
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
            long_polls=LongPolls(),
            progress=ProgressTracker(),
            blobs=blobs,
            chunks=Chunks(),
            inline_models=InlineModels(blobs),
            spool=spool,
            evaluation=evaluation,
            quotas=Quotas(config.limits, loop.time),
            origins=Origins(config.trusted_proxies, lease.secret),
            bounded_audit=bounded_audit,
            memory=UploadMemory(config.limits),
            conflicts=Conflicts(store.audit),
            budgets=Budgets(store),
            started_unix_s=time.time(),
            new_id=lambda kind: f"{kind}-{uuid4().hex[:12]}",
            certificates=endpoint.certificates,
            mtls_port=endpoint.mtls_port,
        )
        pool = WorkerPool.at(config.data_dir)
        retention = RetentionTask(blobs, store, jobs.state, clients.drain_last_seen)
        accelerators = Accelerators(pool, training, references, flower)
        aggregation = Aggregation(
            blobs, spool, store.jobs.find_version, runner.post, accelerators, on_leftovers=retention.schedule_blobs
        )
        return cls(services, aggregation, training, flower, retention)

    async def restore(self) -> None:
        """Resume every job, and score the versions that have no metrics yet."""
        services, config_plugins = self.services, self.services.config.plugins
        for record in services.jobs.all():
            loaded = config_plugins.select(record.state.plugins)
            await services.runner.submit(ServerRestarted(record.state.job_id, loaded, record.problem))
            for version in await services.store.jobs.list_versions(record.state.job_id):
                if not version.metrics and version.model_removed_unix_s is None:
                    self._score(record.state, version.version)
            self._retention.schedule_job(record.state.job_id)
        self._retention.begin()

    def act(self, command: Command) -> None:
        """Execute a command of the coordinator."""
        services = self.services
        match command:
            case Assign() | Refuse():
                services.long_polls.deliver(command)
            case Abort():
                services.long_polls.stop(command)
            case Fold() | Restart() | Commit():
                self._aggregation.submit(services.jobs.state(command.key.job_id), command)
            case RunWarmStart():
                job = services.jobs.state(command.key.job_id)
                (self._training if job.spec.flower is None else self._flower).begin(job, command)
            case Abandon():
                self._training.end(command.key)
                self._flower.end(command.key)
                self._aggregation.end(command.key)

    def on_stored(self, changes: Sequence[Change]) -> None:
        """Log stored changes, delete the data that they make obsolete, wake watchers and score new versions."""
        self.services.spool.apply_changes(changes)
        self.services.progress.drop_ended(changes)
        for change in changes:
            job_id = change.job.job_id
            for row in change.history:
                logs.get().info(
                    f"{row.entity} {row.from_state or 'new'} -> {row.to_state}",
                    job=job_id,
                    **{name: value for name, value in _fields(row).items() if value},
                )
            if change.version is not None:
                if change.attempt is not None and change.version.restored_from is None:
                    self._aggregation.end(change.attempt.key)
                    self._flower.end(change.attempt.key)
                self._score(change.job, change.version)
            if change.job.spec.flower is not None and change.job.status in ENDED_JOBS:
                self._flower.forget(job_id)
            if change.version is not None or change.job.status in ENDED_JOBS:
                self._retention.schedule_job(job_id)
            if change.job.spec.warm_start is not None and not has_pending_warm_start(change.job):
                self._training.forget(job_id)
            self.services.jobs.notify_watchers(job_id)

    async def wait_for_commits(self) -> None:
        """Wait until no version is being committed."""
        while self._is_committing() or self.services.runner.has_events:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End every background task."""
        self.services.runner.stop_timers()
        await self._retention.close()
        await self._aggregation.close()
        await self.services.spool.close()
        await self.services.evaluation.close()
        await self._training.close()
        await self._flower.close()
        self.services.budgets.accountant.close()

    def _is_committing(self) -> bool:
        jobs = self.services.runner.coordinator.jobs.values()
        attempts = (job.open_attempt for job in jobs)
        # A warm start may need hours; it resumes from its last checkpoint.
        return any(
            attempt is not None
            and attempt.phase is AttemptPhase.COMMITTING
            and attempt.kind is not AttemptKind.WARM_START
            for attempt in attempts
        )

    def _score(self, job: JobState, version: ModelVersion) -> None:
        if version.version > 0 and self.services.evaluation.is_due(job, version):
            self.services.evaluation.schedule(job, version)


async def _note(store: Store, action: audit.AuditAction) -> None:
    """Add an audit row, and log the head of the hash chain: copies of the audit log are checked against it."""
    await store.audit.append([audit.AuditEntry(audit.SERVER, action, f"fedplat {__version__}")])
    head = await store.audit.read_head()
    logs.get().info("the audit log ends here", rows=head.num_rows, hash=head.hash)


def _fields(row: HistoryRow) -> dict[str, object]:
    return {
        "round": row.round,
        "attempt": row.attempt,
        "client": row.client_id,
        "reason": row.reason,
        "metrics": dict(row.metrics),
    }


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end. Its error is dropped here: whatever awaits the task raises or reports it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` on SIGTERM and SIGINT while the context is open."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
