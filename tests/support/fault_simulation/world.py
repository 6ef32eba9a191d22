"""The world of a simulation: servers that are started again when they end, clients, an operator, and what befalls them.

The servers are the real `Daemon`, with all that it has, on a simulated loop, network, disk and database.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime
import fcntl
import os
import random
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import structlog
from grpc import aio

from fedplat.wire import digests
from fedplat.wire.v1 import admin_pb2
from fedplat_server import crash_points
from fedplat_server.config import Limits, ServerConfig
from fedplat_server.daemon import Daemon
from fedplat_server.database import schema
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import BlobError, BlobUnavailableError, LeadershipLostError, StoreUnavailableError
from fedplat_server.rpc import serving
from support.crash import scenario
from support.crash.scenario import CODECS, Member, Receipt, content_of
from support.daemons import Operator, Site, digest_of
from support.fault_simulation import ambient
from support.fault_simulation.database import DatabaseServer
from support.fault_simulation.disk import Disk
from support.fault_simulation.network import Network, Weather
from support.fault_simulation.plan import DISK_SYNC, Fault, Plan
from support.fault_simulation.virtual import PROCESS, SimulatedProcess, VirtualLoop, without_threads
from support.faulty_store import Faults, FaultyStore

_T = TypeVar("_T")
PATIENCE_S = 2 * 3600.0
"""Simulated time after the last fault in which the job must be complete."""
QUIET_S = 15.0
NUM_LAST = 200
_AGAIN = frozenset(
    {
        *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN),
        *(grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    }
)


_RESTARTED = (StoreUnavailableError, BlobUnavailableError, LeadershipLostError)
"""The errors with which a server may end before it serves its first caller: it is started again."""


class World:
    """Everything of one simulation."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.trace_hash = 0
        self.last: deque[str] = deque(maxlen=NUM_LAST)
        self.findings: list[str] = []
        self.happened: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.loop = VirtualLoop(plan.seed, self.trace)
        self.loop.slow = plan.slow_threads
        self.network = Network(self.loop, plan.seed, self.trace)
        self.rng = random.Random(f"world {plan.seed}")
        self.disk = Disk(folder, random.Random(f"disk {plan.seed}"))
        self.database = DatabaseServer(self.loop, plan.seed, time.time, self.happened)
        self.servers = [_Server(self, number) for number in range(plan.num_servers)]
        self.clients = [SimulatedProcess(f"client {number}") for number in range(plan.num_clients)]
        self.faults: Faults | None = None
        self.is_outage = False
        self.is_over = False
        self.numbers: dict[str, int] = {}
        self.receipts: set[Receipt] = set()
        self.side = plan.side
        self.job = ""
        self._armed = [fault for fault in plan.faults if fault.point]

    # --- what is observed ---

    def trace(self, text: str) -> None:
        line = f"{self.loop.time():.6f} {text.replace(str(self.folder.parent), '')}"
        self.trace_hash = hash((self.trace_hash, line))
        self.last.append(line)

    def find(self, text: str) -> None:
        """Notes that something must not be as it is."""
        self.trace(f"FINDING {text}")
        self.findings.append(text)

    def on_log(self, _: object, level: str, fields: Any) -> str:
        """Stands in for the log."""
        process = PROCESS.get()
        event, failed = fields.pop("event", ""), fields.pop("exc_info", None)
        name = process.name if process is not None else ""
        self.trace(f"{name} {level}: {event} {' '.join(f'{key}={value}' for key, value in sorted(fields.items()))}")
        error = failed if isinstance(failed, BaseException) else sys.exc_info()[1]
        # A leader that was suspended meets what the next one has done to its files.
        is_expected = isinstance(error, BlobError) and len(self.servers) > 1
        if failed and not is_expected:
            text = "".join(traceback.format_exception(error)) if error is not None else ""
            self.find(f"the log has a traceback: {event}: {text}")
        raise structlog.DropEvent

    def on_error(self, _: object, context: Mapping[str, Any]) -> None:
        """Stands in for the loop's handler of exceptions."""
        self.find(f"{context.get('message')}: {context.get('exception')!r}")

    # --- faults ---

    def reach(self, name: str) -> None:
        """A crash point: stands in for the trap."""
        process = PROCESS.get()
        if process is None:
            return
        self.reached[name] += 1
        for fault in self._armed:
            if fault.point == name:
                self._armed.remove(fault)
                if fault.passage > 1:
                    self._armed.append(fault._replace(passage=fault.passage - 1))
                else:
                    self._strike(fault, process)
                break
        if self.rng.random() < 0.3:
            self.loop.block()

    def _strike(self, fault: Fault, process: SimulatedProcess) -> None:
        """Crashes or suspends a process that has reached the point of a fault, now or a moment later."""

        def strike() -> None:
            if not process.is_alive:
                return
            self.trace(f"{fault.kind} {fault.point}")
            self.happened[fault.kind] += 1
            if fault.kind.startswith("pause"):
                self.loop.pause(process, fault.lasts_s)
                self.loop.block()
            else:
                self.crash(process, is_power=fault.kind.startswith("power"))

        if fault.at_s:
            self.loop.call_later(fault.at_s, strike, context=contextvars.Context())
        else:
            strike()

    def crash(self, process: SimulatedProcess, *, is_power: bool) -> None:
        """Kills a server, or cuts the power of all, which share the disk. Does not return to the server itself."""
        if not is_power:
            self.loop.kill(process)
            return
        for server in self.servers:
            if server.process is not process and server.process is not None:
                self.loop.kill(server.process)
        self.loop.kill(process, self.disk.fail)

    def disarm(self) -> None:
        self._armed.clear()

    async def befall(self, fault: Fault) -> None:
        """Lets a fault happen."""
        await asyncio.sleep(fault.at_s)
        process = self.servers[fault.place % len(self.servers)].process
        if process is None and fault.kind in ("kill", "power failure", "pause"):
            return
        self.trace(str(fault))
        self.happened[fault.kind] += 1
        match fault.kind:
            case "kill" | "power failure" if process is not None:
                self.crash(process, is_power=fault.kind != "kill")
            case "pause" if process is not None:
                self.loop.pause(process, fault.lasts_s)
            case "storm":
                self.set_faults(Faults(self.plan.seed, 0.2 * fault.strength, 0.1 * fault.strength, 0.3, 0.2))
                await asyncio.sleep(fault.lasts_s)
                self.set_faults(None)
            case "outage":
                self.set_outage(True)
                await asyncio.sleep(fault.lasts_s)
                self.set_outage(False)
            case "partition":
                cut = self._draw_cut(fault)
                self.network.cuts.add(cut)
                self.set_outage(self.is_outage)
                await asyncio.sleep(fault.lasts_s)
                self.network.cuts.discard(cut)
                self.set_outage(self.is_outage)
            case _:
                self.network.weather = Weather(0.1 * fault.strength, 0.2, 2.0)
                await asyncio.sleep(fault.lasts_s)
                self.network.weather = Weather()

    def _draw_cut(self, fault: Fault) -> frozenset[str]:
        servers = [server.address for server in self.servers]
        others = ["*", "database", *servers, *(client.name for client in self.clients)]
        one = servers[fault.place % len(servers)]
        return frozenset({one, self.rng.choice([other for other in others if other != one])})

    def set_faults(self, faults: Faults | None) -> None:
        self.faults = faults
        for server in self.servers:
            server.apply_faults()

    def set_outage(self, is_outage: bool) -> None:
        self.is_outage = is_outage
        for server in self.servers:
            server.apply_faults()

    def is_database_away(self, process: SimulatedProcess) -> bool:
        return self.is_outage or self.network.is_cut(process.name, "database")

    # --- from the beginning to the end ---

    async def live(self) -> None:
        """A whole training with all faults, and a quiet life of the first server afterwards."""
        serving = [asyncio.create_task(server.supervise()) for server in self.servers]
        befalling = [asyncio.create_task(self.befall(fault)) for fault in self.plan.faults if not fault.point]
        operator = Caller(self, "operator")
        training = [self._begin_client(number, client) for number, client in enumerate(self.clients)]
        await operator.create_job()
        ending = asyncio.create_task(operator.wait_for_the_job())
        await asyncio.gather(*befalling)
        self.trace("faults are over")
        self.disarm()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ending
        except TimeoutError:
            self.find("the job does not end")
        for task in training:
            task.cancel()
        await asyncio.gather(*training, return_exceptions=True)
        self.is_over = True
        for server in self.servers:
            server.stop()
        await asyncio.gather(*serving)
        self.trace("a quiet life")
        quiet = asyncio.create_task(self.servers[0].live_once())
        await asyncio.sleep(QUIET_S)
        self.servers[0].stop()
        await quiet

    def _begin_client(self, number: int, process: SimulatedProcess) -> asyncio.Task[None]:
        async def take_part() -> None:
            caller = Caller(self, process.name)
            try:
                member = await scenario.enroll(cast(Any, caller), number)
                worker = Worker(cast(Any, caller), number, member.client, member.channel)
                await worker.take_part()
            except Exception as exc:
                self.find(f"{process.name} failed: {exc!r}")

        return self.loop.create_task(take_part(), context=_context_of(process))


def _context_of(process: SimulatedProcess) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(PROCESS.set, process)
    return context


class _Server:
    """A place where a server runs, in one process after the other."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.address = f"10.0.0.{number + 1}:7443"
        self.process: SimulatedProcess | None = None
        self._daemon: Daemon | None = None
        self._store: FaultyStore | None = None

    async def supervise(self) -> None:
        """Starts the server again and again until the simulation is over."""
        world = self._world
        while not world.is_over:
            await self.live_once()
            await asyncio.sleep(world.rng.choice((0.05, world.rng.uniform(0.0, 4.0))))

    async def live_once(self) -> None:
        """One life of the server."""
        world = self._world
        self.process = process = SimulatedProcess(self.address)
        died = asyncio.Event()
        process.on_death.append(died.set)
        dying = asyncio.create_task(died.wait())
        serving = world.loop.create_task(self._serve(process), context=_context_of(process))
        await asyncio.wait([serving, dying], return_when=asyncio.FIRST_COMPLETED)
        self.process = None
        if process.is_alive:
            world.loop.kill(process)
            await dying
            error = serving.exception()
            world.trace(f"{self.address} has ended: {error!r}")
            if not isinstance(error, (*_RESTARTED, type(None))):
                world.find(f"a server ended: {error!r}")

    async def _serve(self, process: SimulatedProcess) -> None:
        world, store = self._world, FaultyStore()
        self._store = store

        async def open_faulty(database: str) -> Store:
            if world.is_database_away(process):
                await asyncio.sleep(2.0)
                raise StoreUnavailableError("the database is away, says the simulation")
            store.inner = await open_store(database, time.time, config.plugins.table, daemon.metrics.instruments)
            self.apply_faults()
            return cast(Store, store)

        config = ServerConfig(
            listen=self.address,
            data_dir=world.folder,
            database=f"sqlite:///{world.folder / 'fedplat.sqlite'}",
            limits=Limits(refusal_delay_s=0.0),
            grace_s=5.0,
        )
        daemon = self._daemon = Daemon(config, open_faulty, _utc_now, store_retry_s=0.1)
        await daemon.run()

    def apply_faults(self) -> None:
        """Lets the store of this server fail as the world says."""
        if self._store is not None and self.process is not None:
            self._store.outage = self._world.is_database_away(self.process)
            if self._store.faults != self._world.faults:
                self._store.faults = self._world.faults

    def stop(self) -> None:
        if self.process is not None and self._daemon is not None:
            self._daemon.stop()


def _utc_now() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time.time(), datetime.UTC)


class Caller:
    """A caller with connections of its own, which asks until it is answered: stands in for `scenario.World`."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._site: Site | None = None
        self._server = 0
        self.numbers, self.receipts, self.side = world.numbers, world.receipts, world.side

    @property
    def job(self) -> str:
        return self._world.job

    @job.setter
    def job(self, job: str) -> None:
        self._world.job = job

    @property
    def world(self) -> World:
        return self._world

    def _connect(self) -> Site:
        servers = self._world.servers
        channel: Any = self._world.network.make_channel(servers[self._server % len(servers)].address)
        channel.origin = self._name
        elsewhere: Any = None
        return Site(elsewhere, elsewhere, channel, Operator(channel), elsewhere, self._world.folder)

    async def ask(self, question: Callable[[Site], Awaitable[_T]]) -> _T:
        """Asks until there is an answer, perhaps another server."""
        rng = self._world.rng
        while True:
            self._site = self._site or self._connect()
            try:
                return await question(self._site)
            except aio.AioRpcError as exc:
                # A leader that was suspended may find that the next one has removed the file of an upload; `on_log`
                # finds all other errors that are internal.
                is_expected = exc.code() is grpc.StatusCode.INTERNAL and len(self._world.servers) > 1
                if exc.code() not in _AGAIN and not is_expected:
                    raise
                if exc.code() is not grpc.StatusCode.UNAVAILABLE or rng.random() < 0.5:
                    self._site = None
                    self._server += rng.randrange(2)
            await asyncio.sleep(rng.uniform(0.02, 1.0))

    async def create_job(self) -> None:
        try:
            await scenario.operate(cast(Any, self), self._world.plan.text)
        except aio.AioRpcError as exc:  # an answer was lost, and the job has ended meanwhile
            if exc.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
        self._world.trace(f"job {self.job}")

    async def wait_for_the_job(self) -> None:
        await self.ask(lambda site: site.operator.events(self.job))
        job = await self.ask(lambda site: site.operator.show(self.job))
        if job.status != admin_pb2.JOB_STATUS_COMPLETED:
            self._world.find(f"the job is {admin_pb2.JobStatus.Name(job.status)}")


class Worker(Member):
    """A client that needs some time for its work, and notices if it is asked again for what was acknowledged."""

    async def take_part(self) -> None:
        world: World = cast(Any, self.world).world
        while True:
            answer = await self.ask(lambda client: client.check_in(labels={"device": str(self.number)}, codecs=CODECS))
            if not answer.HasField("assignment"):
                await asyncio.sleep(world.rng.uniform(0.0, 0.5))
                continue
            work = answer.assignment
            if world.rng.random() < 0.5:
                await self.ask(lambda client, work=work: client.download(work.model.digest))
            await asyncio.sleep(world.rng.uniform(0.0, 2.0))
            codec = scenario.options_from_text(work.uplink) if work.uplink else None
            content = content_of(self.number, work.round, codec, world.side)
            deliver = self._stream if world.rng.random() < 0.5 else self._inline
            deliver = self._stream_by_id if self.number == 1 else deliver  # always: its digest is of another kind
            kind = digests.BLAKE3 if self.number == 1 and work.blake3 and digests.has_blake3() else ""
            receipt = Receipt(self.client.client_id, work.round, work.attempt, digest_of(content, kind))
            if receipt in world.receipts:
                world.find(f"{receipt} was acknowledged, and the server asks for it again")
            response = await deliver(work, content)
            if response is not None and response.HasField("receipt"):
                world.trace(f"receipt {receipt}")
                world.receipts.add(receipt)


# --- what replaces parts of this process ---------------------------------------------------------------------


@contextlib.contextmanager
def simulated(world: World) -> Generator[None]:
    """Puts the simulation in the place of the loop, the network, the disk, the database, clocks and randomness."""
    ambient.take(world.loop.time, world.plan.seed)
    asyncio.set_event_loop(world.loop)
    world.loop.set_exception_handler(world.on_error)
    structlog.configure(processors=[world.on_log], cache_logger_on_first_use=False)
    aio.server, aio.insecure_channel = cast(Any, world.network.make_server), cast(Any, world.network.make_channel)
    world.disk.begin()
    world.disk.install(lambda: world.reach(DISK_SYNC))
    world.database.reach, world.database.find = world.reach, world.find
    world.database.is_away = world.is_database_away
    world.database.install()
    _replace_flock()
    serving.CHECK_S = 5.0  # each ping is a transaction
    require_usable, schema.require_usable = schema.require_usable, _usable
    crash_points._trap = cast(Any, world)  # pyright: ignore[reportPrivateUsage]
    if world.plan.num_servers > 1:
        ServerConfig.is_shared = property(lambda _: True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with without_threads():
            yield
    finally:
        crash_points._trap = None  # pyright: ignore[reportPrivateUsage]
        schema.require_usable = require_usable
        ambient.release()


async def _usable(_: object) -> None:
    """Stands in for the check of the schema, which is that of this version."""


def _replace_flock() -> None:
    """Makes locks of files end with their simulated process."""
    flock = fcntl.flock

    def lock(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        process, copy = PROCESS.get(), os.dup(descriptor)
        assert process is not None

        def release() -> None:
            flock(copy, fcntl.LOCK_UN)
            os.close(copy)

        process.on_death.append(release)

    fcntl.flock = cast(Any, lock)
