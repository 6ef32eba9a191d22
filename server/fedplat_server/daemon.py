"""The daemon: puts the parts together, starts them in order, and stops them in the reverse order.

Read `Daemon.run`. A part that dies takes the daemon with it: a restart is always safe, a half-dead server never.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpc import aio

from fedplat.rounds import Change, Coordinator, HistoryRow, JobState, ModelVersion
from fedplat.rounds.commands import Abandon, Abort, Assign, Command, Commit, Fold, Refuse, SetTimer
from fedplat.rounds.events import ServerRestarted
from fedplat.rounds.states import AttemptPhase
from fedplat_server import logs
from fedplat_server.aggregation import Aggregation
from fedplat_server.blobs import BlobStore
from fedplat_server.clients import ClientBook
from fedplat_server.config import ServerConfig
from fedplat_server.desk import Desk
from fedplat_server.errors import ConfigError
from fedplat_server.evaluation import Evaluation
from fedplat_server.rpc import serving
from fedplat_server.rpc.health import Health
from fedplat_server.rpc.quotas import Quotas
from fedplat_server.runner import Runner
from fedplat_server.services import JobBook, Services
from fedplat_server.store.port import Store
from fedplat_server.store.sql import open_store
from fedplat_server.uploads import UploadStore

FAREWELL_S = 0.5


@dataclasses.dataclass(frozen=True)
class _Serving:
    """What runs once the daemon has started."""

    parts: _Parts
    runner_task: asyncio.Task[None]
    server: aio.Server
    health: Health


class Daemon:
    """One server process. `port` is known once it has started."""

    def __init__(self, config: ServerConfig, open_store: Callable[[str], Awaitable[Store]] = open_store) -> None:
        self._config = config
        self._open_store = open_store
        self.port = 0
        self.started = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Asks the daemon to drain and end."""
        self._stopping.set()

    async def run(self) -> None:
        """Starts, serves until `stop`, drains, ends. Raises what a part died of."""
        config = self._config
        _make_folder(config.data_dir)
        with _exclusive(config.data_dir / "lock"):
            async with contextlib.AsyncExitStack() as stack:
                serving = await self._unless_stopped(self._start(stack))
                if serving is None:
                    return
                logs.get().info("the server is ready", port=self.port, data_dir=str(config.data_dir))
                self.started.set()
                await self._until_stopped(serving.runner_task)
                await self._drain(serving)

    async def _start(self, stack: contextlib.AsyncExitStack) -> _Serving:
        store = await self._open_store(self._config.database)
        stack.push_async_callback(store.close)
        parts = await _Parts.make(self._config, store)
        stack.push_async_callback(parts.close)
        runner_task = asyncio.create_task(parts.services.runner.run(parts), name="runner")
        stack.push_async_callback(_cancel, runner_task)
        await parts.restore()
        server, health, self.port = await serving.serve(self._config, parts.services)
        stack.push_async_callback(server.stop, 0)
        watch = asyncio.create_task(health.watch(store, parts.services.runner), name="health")
        stack.push_async_callback(_cancel, watch)
        return _Serving(parts, runner_task, server, health)

    async def _unless_stopped(self, start: Coroutine[None, None, _Serving]) -> _Serving | None:
        """Waits for the start, unless somebody does not want it any more: a database may answer late, or never."""
        starting = asyncio.create_task(start, name="start")
        stopping = asyncio.create_task(self._stopping.wait(), name="stop signal")
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            return await starting if starting.done() else None
        finally:
            await _cancel(stopping)
            await _cancel(starting)

    async def _until_stopped(self, runner_task: asyncio.Task[None]) -> None:
        stopping = asyncio.create_task(self._stopping.wait(), name="stop signal")
        try:
            await asyncio.wait([stopping, runner_task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(stopping)
        if runner_task.done():
            await runner_task  # it never ends but by an error

    async def _drain(self, serving: _Serving) -> None:
        """No new work; what is being made durable may finish, within the grace period."""
        grace_s, services = self._config.grace_s, serving.parts.services
        logs.get().info("the server is stopping", grace_s=grace_s)
        services.draining = True
        await serving.health.stop()
        services.jobs.wake_all()
        services.desk.send_away()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving.parts.finished(), grace_s)
        # Those who were just answered shall hear it. Heartbeats wait longer than that; they are cut.
        await serving.server.stop(min(grace_s, FAREWELL_S))


class _Parts:
    """The running parts; carries out what the coordinator commands."""

    def __init__(self, services: Services, aggregation: Aggregation) -> None:
        self.services = services
        self._aggregation = aggregation

    @classmethod
    async def make(cls, config: ServerConfig, store: Store) -> _Parts:
        """Builds the parts and reads the jobs back."""
        blobs = await asyncio.to_thread(BlobStore, config.blob_dir)
        # Only what the database names is real: the rest was left by a crash.
        referenced = await store.referenced_digests()
        removed = await asyncio.to_thread(blobs.remove_orphans, referenced)
        logs.get().info("blobs were reconciled", kept=len(referenced), removed=removed)
        runner = Runner(Coordinator(max_waiting=config.limits.max_waiting), store)
        jobs = JobBook(runner)
        for record in await store.load_jobs(runner.now):
            jobs.add(record)
        uploads = await asyncio.to_thread(UploadStore, config.upload_dir, jobs.is_in_memory)
        await asyncio.to_thread(uploads.keep, jobs.spooled_attempts())
        evaluation = Evaluation(config.evaluators, config.evaluation_s, blobs, store.set_version_metrics, jobs.changed)
        services = Services(
            config=config,
            store=store,
            runner=runner,
            jobs=jobs,
            clients=ClientBook(store),
            desk=Desk(),
            blobs=blobs,
            uploads=uploads,
            evaluation=evaluation,
            quotas=Quotas(config.limits, asyncio.get_running_loop().time),
            started_unix_s=time.time(),
            new_id=lambda kind: f"{kind}-{uuid4().hex[:12]}",
        )
        return cls(services, Aggregation(blobs, uploads, runner.post))

    async def restore(self) -> None:
        """Lets every job go on where it was, and scores what was not scored."""
        services = self.services
        for record in services.jobs.all():
            await services.runner.submit(ServerRestarted(record.state.job_id))
            for version in await services.store.list_versions(record.state.job_id):
                if not version.metrics:
                    self._score(record.state, version.version)

    def act(self, command: Command) -> None:
        """Carries out a command of the coordinator."""
        services = self.services
        match command:
            case Assign() | Refuse():
                services.desk.tell(command)
            case Abort():
                services.desk.stop(command)
            case Fold() | Commit():
                self._aggregation.take(services.jobs.state(command.key.job_id), command)
            case Abandon():
                self._aggregation.end(command.key)
            case SetTimer():
                raise AssertionError("the runner sets timers itself")

    def stored(self, changes: Sequence[Change]) -> None:
        """Tells the log and the watchers what has happened, and has new versions scored."""
        for change in changes:
            job_id = change.job.job_id
            for row in change.history:
                logs.get().info(
                    f"{row.entity} {row.from_state or 'new'} -> {row.to_state}",
                    job=job_id,
                    **{name: value for name, value in _fields(row).items() if value},
                )
            if change.version is not None:
                assert change.attempt is not None
                self._aggregation.end(change.attempt.key)
                self._score(change.job, change.version)
            self.services.jobs.changed(job_id)

    async def finished(self) -> None:
        """Returns when no version is being made durable any more."""
        while self._is_committing() or self.services.runner.has_events:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Ends every background task."""
        self.services.runner.stop_timers()
        await self._aggregation.close()
        await self.services.evaluation.close()

    def _is_committing(self) -> bool:
        jobs = self.services.runner.coordinator.jobs.values()
        attempts = (job.open_attempt for job in jobs)
        return any(attempt is not None and attempt.phase is AttemptPhase.COMMITTING for attempt in attempts)

    def _score(self, job: JobState, version: ModelVersion) -> None:
        if version.version > 0 and self.services.evaluation.is_due(job, version):
            self.services.evaluation.schedule(job, version)


def _fields(row: HistoryRow) -> dict[str, object]:
    return {
        "round": row.round,
        "attempt": row.attempt,
        "client": row.client_id,
        "reason": row.reason,
        "metrics": dict(row.metrics),
    }


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Ends a task. What it died of was raised, or is told, by those who wait for it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the data folder {folder} cannot be made: {exc.strerror}") from exc


@contextlib.contextmanager
def _exclusive(path: Path) -> Generator[None]:
    """Holds the data folder for this process; the kernel lets go of it whatever happens to us."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigError(f"the data folder {path.parent} cannot be written to: {exc.strerror}") from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(
                f"another fedplat-server uses {path.parent}; stop it, or choose another folder with --data-dir"
            ) from exc
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Generator[None]:
    """SIGTERM and SIGINT call `stop`, while the context lasts."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
