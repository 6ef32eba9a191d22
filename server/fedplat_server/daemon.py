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
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from fedplat import forks
from fedplat_server import __version__, dashboard_process, errors, logs, retries
from fedplat_server.auth import tls
from fedplat_server.config import ServerConfig
from fedplat_server.database.engine import async_url, sqlite_path
from fedplat_server.database.store import Store
from fedplat_server.database.store import open_store as _open_store
from fedplat_server.leader.leader import Leader
from fedplat_server.leader.parts import Mandate, make_parts
from fedplat_server.leadership import Election, open_election
from fedplat_server.messages.streams import UploadMemory
from fedplat_server.metrics.service import MetricsService
from fedplat_server.records import audit
from fedplat_server.records.lease import Candidate, HeldLease
from fedplat_server.rpc import gateway, serving
from fedplat_server.storage import data_dir

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing

FAREWELL_S = 0.5
"""Time for answers just given to be delivered, and for the audit row of the stop, before connections are closed."""
OpenStore = Callable[[str], Awaitable[Store]]
_T = TypeVar("_T")


class Daemon:
    """One server process. `port` is set when it has started.

    Of several daemons on one PostgreSQL one leads, and the others forward calls to it. A daemon may change its role at
    any time; its port stays the same. `utc_now` is the clock for checking clients' certificates, `store_retry_s` the
    first delay before a retry if the database does not answer. `count_dropped_lines` returns the number of
    dropped lines of the log, for the metrics. `tracing` makes traces; its owner closes it.
    """

    def __init__(
        self,
        config: ServerConfig,
        open_store: OpenStore | None = None,
        utc_now: Callable[[], datetime.datetime] = tls.utc_now,
        store_retry_s: float = retries.STORE_RETRY_S,
        count_dropped_lines: Callable[[], int] = lambda: 0,
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._tracing = tracing
        self.metrics = MetricsService(config, count_dropped_lines)
        self._store_retry_s = store_retry_s
        self._utc_now = utc_now
        self._open_store = open_store or functools.partial(
            _open_store, plugins=config.plugins.table, instruments=self.metrics.instruments
        )
        self.port = self.mtls_port = self.http_port = 0
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
                endpoint = serving.Endpoint(config, self._utc_now, self.metrics.instruments, self._tracing)
                self.port, self.mtls_port, self.http_port = endpoint.port, endpoint.mtls_port, endpoint.http_port
                stack.push_async_callback(endpoint.stop, 0)
                await endpoint.start_probes()
                await stack.enter_async_context(self.metrics.serve(endpoint.certificates))
                watch = asyncio.create_task(self._watch(endpoint.certificates), name="certificates")
                stack.push_async_callback(_cancel, watch)
                pages = asyncio.create_task(self._show_pages(), name="dashboard")
                stack.push_async_callback(_cancel, pages)
                candidate = Candidate(f"d-{uuid4().hex[:12]}", config.address(self.port))
                election = await self._wait_unless_stopped(open_election(config, candidate))
                if election is None:
                    return
                stack.push_async_callback(election.close)
                endpoint.router.explain = lambda: election.problem
                while not self._stopping.is_set():
                    held_lease = await self._follow(endpoint, election, candidate)
                    if held_lease is not None:
                        await self._lead(endpoint, election, held_lease)
                await endpoint.stop(FAREWELL_S)

    async def _watch(self, certificates: tls.Certificates | None) -> None:
        # Warnings wait for the start: a daemon that cannot start logs only the reason.
        await self.started.wait()
        await tls.watch(certificates, self._config.listen)

    async def _show_pages(self) -> None:
        await self.started.wait()
        if not self._config.dashboard_listen:
            return
        try:
            options = dashboard_process.make_options(self._config, self.port)
        except (errors.ConfigError, OSError) as exc:
            logs.get().error("the dashboard cannot be started", reason=str(exc))
        else:
            await dashboard_process.supervise(options)

    async def _follow(self, endpoint: serving.Endpoint, election: Election, candidate: Candidate) -> HeldLease | None:
        """Forward calls to the leader until this daemon is elected; return None if it is stopped before that."""

        async def set_serving(is_serving: bool) -> None:
            await endpoint.health.set_ready(is_serving)
            if is_serving:
                await self._start_once(endpoint)

        options = gateway.GatewayOptions(self._config.tls, endpoint.peers.client_of, UploadMemory(self._config.limits))
        follower = gateway.Follower(candidate.holder, endpoint.router, set_serving, options)
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
                leader = await self._wait_unless_stopped(self._start(stack, endpoint, held_lease), lease_task)
                if leader is None:
                    return
                await self._wait_unless_stopped(asyncio.shield(leader.runner_task), lease_task)
                await self._drain(endpoint, leader)
        except (errors.LeadershipLostError, errors.StoreUnavailableError, errors.BlobUnavailableError) as exc:
            if not self.started.is_set():  # it has served no caller yet: end with a clear error, do not wait
                raise
            logs.get().error("this daemon no longer leads the jobs", term=held_lease.lease.term, reason=str(exc))
        finally:
            await _cancel(lease_task)
            await election.resign(held_lease)

    async def _start(
        self, stack: contextlib.AsyncExitStack, endpoint: serving.Endpoint, held_lease: HeldLease
    ) -> Leader:
        store = await self._open_store(self._config.database)
        stack.push_async_callback(store.close)
        await stack.enter_async_context(_sever_if_lost(store))
        if held_lease.lease.term:
            await store.fence(held_lease.lease.term)
        mandate = Mandate(
            config=self._config,
            lease=held_lease.lease,
            store=store,
            endpoint=endpoint,
            metrics=self.metrics,
            store_retry_s=self._store_retry_s,
            started_unix_s=time.time(),
        )
        parts = await make_parts(stack, mandate)
        leader, runner, jobs = Leader(parts), parts.coordination.runner, parts.coordination.jobs
        observed = self.metrics.observe(leader, runner, jobs, store, parts.production.budgets.accountant)
        actor = await stack.enter_async_context(observed)
        stack.callback(runner.stop_timers)
        leader.runner_task = asyncio.create_task(runner.run(actor), name="runner")
        stack.push_async_callback(_cancel, leader.runner_task)
        await stack.enter_async_context(_sever_if_lost(store))
        await leader.restore()
        await _note(store, audit.AuditAction.SERVER_STARTED)
        await stack.enter_async_context(_accept_calls(endpoint, leader))
        await stack.enter_async_context(_sever_if_lost(store))
        await endpoint.health.set_ready(True)
        stack.push_async_callback(endpoint.health.set_ready, False)
        watch = asyncio.create_task(endpoint.health.watch(store, runner), name="health")
        stack.push_async_callback(_cancel, watch)
        await self._start_once(endpoint)
        logs.get().info("this daemon leads the jobs", term=held_lease.lease.term)
        return leader

    async def _start_once(self, endpoint: serving.Endpoint) -> None:
        """Start the endpoint when this daemon can first answer calls, as leader or by forwarding them."""
        if not self.started.is_set():
            await endpoint.start()
            self.started.set()
            ports = {"port": endpoint.port, "mtls_port": endpoint.mtls_port, "http_port": endpoint.http_port}
            ports["health_port"] = endpoint.health_port
            ports = {name: port for name, port in ports.items() if port}
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

    async def _drain(self, endpoint: serving.Endpoint, leader: Leader) -> None:
        """Refuse new work, and let commits finish within the grace period."""
        grace_s = self._config.grace_s
        logs.get().info("the server is stopping", grace_s=grace_s)
        leader.refuse_work()
        await endpoint.health.stop()
        leader.release_calls()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(leader.wait_for_commits(), grace_s)
        with contextlib.suppress(
            errors.StoreError, TimeoutError
        ):  # the server ends even if it cannot write its audit row
            async with asyncio.timeout(max(grace_s, FAREWELL_S)):
                await leader.finish_audit()
                await _note(leader.store, audit.AuditAction.SERVER_STOPPED)
        # Leave time to deliver the answers just given. Heartbeats, which wait longer, are cut off.
        await endpoint.stop(min(grace_s, FAREWELL_S))
        try:
            await leader.hand_over()
        except errors.BlobError as exc:  # only a daemon of an earlier release needs these files
            logs.get().warning("small updates were not written to files", error=str(exc))


@contextlib.asynccontextmanager
async def _sever_if_lost(store: Store) -> AsyncGenerator[None]:
    """Cut the database connections if the lead is lost, so that nothing waits for a database that may be the cause."""
    try:
        yield
    except errors.LeadershipLostError:
        await store.sever()
        raise


@contextlib.asynccontextmanager
async def _accept_calls(endpoint: serving.Endpoint, leader: Leader) -> AsyncGenerator[None]:
    """Route calls to the services of this daemon; on exit, wait until no call is in progress."""
    endpoint.router.set_route(leader.make_route())
    try:
        yield
    finally:
        calls = endpoint.router.end_route()
        await calls.wait_until_none()


async def _note(store: Store, action: audit.AuditAction) -> None:
    """Add an audit row, and log the head of the hash chain: copies of the audit log are checked against it."""
    await store.audit.append([audit.AuditEntry(audit.SERVER, action, f"fedplat {__version__}")])
    head = await store.audit.read_head()
    logs.get().info("the audit log ends here", rows=head.num_rows, hash=head.hash)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end. Its error is dropped here: whatever awaits the task raises or reports it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` on SIGTERM and SIGINT while the context is open."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    with forks.keep_signals(signals):
        for number in signals:
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
