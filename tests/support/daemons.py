"""A daemon in this process on a real socket, and an operator; the clients are those of `raw_client`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedplat.model import Parameters
from fedplat.wire.auth import METADATA_CODE, Ticket
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, events_pb2_grpc, fleet_pb2
from fedplat_server.config import LeaseTimes, Limits, ServerConfig
from fedplat_server.daemon import Daemon
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import Code
from support import access, raw_client
from support.access import ADMIN_TOKEN, add_operator, authorized
from support.faulty_store import Faults, FaultyStore
from support.raw_client import PATIENCE_S, RawClient, again, digest_of, in_parts, private_key, reason_name

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing

__all__ = ["digest_of", "reason_name"]  # what belongs to the clients, and most tests need
STORM: Faults | None = None
"""What befalls the stores of daemons that are started now; `conftest.py` runs the tests again with it."""
BEFELL = Counter[str]()
"""What befell them, by kind, and how many calls there were."""
_AGAIN = {
    "maxAttempts": 5,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.05s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_NOT_AGAIN = [
    {"service": "fedplat.wire.v1.Fleet"},
    {"service": "fedplat.wire.v1.Jobs", "method": "UploadModel"},
]
_METHODS = [{"name": [{}], "retryPolicy": _AGAIN}, {"name": _NOT_AGAIN}]
RETRIES = (("grpc.service_config", json.dumps({"methodConfig": _METHODS})),)
"""gRPC itself asks again when the server is unavailable, as long as there was no answer; `raw_client.again` does so for
streams to the server, which gRPC would keep to send them again, and sometimes stall, and for calls that are signed:
each signature is good once."""

CLIENTS_OF_CHANNEL = 80
"""Clients of a site that share a connection."""
_keys = itertools.count()
raw_client.is_stormy = lambda: STORM is not None


def initial_model() -> Parameters:
    return Parameters.from_arrays({"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2, "f4")})


def update_of(base: Parameters, seed: int) -> Parameters:
    """A random update of a model's floating-point entries."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.normal(size=array.shape).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in base.items()
    }
    return Parameters.from_arrays(arrays, base.schema.carry)


class Gate:
    """Holds a coroutine up until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self._open.wait()

    def open(self) -> None:
        self._open.set()


class _Patient:
    """A stub of a service for operators whose calls are made again until the store does not fail.

    gRPC's own retries end after five, which is not enough for a test that makes hundreds of calls.
    """

    STREAMS = frozenset({"WatchJob", "WatchEvents", "ExportModel", "UploadModel"})

    def __init__(self, stub: object) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        if STORM is None or name in self.STREAMS:
            return method

        def call(*args: Any, **options: Any) -> asyncio.Future[Any]:
            return asyncio.ensure_future(again(lambda: method(*args, **options)))

        return call


def _patient(stub: object, token: str) -> _Patient:
    return _Patient(authorized(stub, token))


class Operator:
    """An operator: a stub of each service, and what tests ask for most."""

    def __init__(self, channel: aio.Channel, token: str = ADMIN_TOKEN) -> None:
        self.jobs = cast("admin_pb2_grpc.JobsAsyncStub", _patient(admin_pb2_grpc.JobsStub(channel), token))
        self.clients = cast("admin_pb2_grpc.ClientsAsyncStub", _patient(admin_pb2_grpc.ClientsStub(channel), token))
        self.operators = cast(
            "admin_pb2_grpc.OperatorsAsyncStub", _patient(admin_pb2_grpc.OperatorsStub(channel), token)
        )
        self.privacy = cast("admin_pb2_grpc.PrivacyAsyncStub", _patient(admin_pb2_grpc.PrivacyStub(channel), token))
        self.event_log = cast("events_pb2_grpc.EventsAsyncStub", _patient(events_pb2_grpc.EventsStub(channel), token))
        self.webhooks = cast(
            "events_pb2_grpc.WebhooksAsyncStub", _patient(events_pb2_grpc.WebhooksStub(channel), token)
        )
        self._tickets = asyncio.Semaphore(16)  # an operator may have 32 calls open

    async def ticket(self, population: str = "demo", num_uses: int = 1, expires_s: float = 3600.0) -> Ticket:
        return (await self.enrollment(population, num_uses, expires_s))[1]

    async def enrollment(
        self, population: str = "demo", num_uses: int = 1, expires_s: float = 3600.0
    ) -> tuple[str, Ticket]:
        """Creates an enrollment; returns its id and its ticket. If a reply is lost, it creates another one."""
        request = admin_pb2.CreateEnrollmentRequest(
            population=population, num_uses=num_uses, expires_s=expires_s, address="127.0.0.1:7443"
        )
        async with self._tickets:
            answer = await self.clients.CreateEnrollment(request)
        return answer.enrollment.enrollment_id, Ticket.from_text(answer.ticket)

    async def upload(self, model: Parameters | bytes) -> str:
        content = model if isinstance(model, bytes) else model.to_bytes()
        parts = [admin_pb2.UploadModelRequest(data=part) for part in in_parts(content)]
        return (await again(lambda: self.jobs.UploadModel(iter(parts)))).digest

    async def create(self, text: str, model: Parameters | None = None, key: str | None = None) -> admin_pb2.Job:
        digest = await self.upload(initial_model() if model is None else model)
        key = key or f"idempotency-{next(_keys)}"
        request = admin_pb2.CreateJobRequest(job_file=text, initial_digest=digest, idempotency_key=key)
        return await self.jobs.CreateJob(request)

    async def start(self, text: str, model: Parameters | None = None) -> str:
        """Creates and starts a job; its id."""
        job = await self.create(text, model)
        await self.jobs.StartJob(admin_pb2.JobRequest(job=job.job_id))
        return job.job_id

    async def show(self, job: str) -> admin_pb2.Job:
        return await self.jobs.ShowJob(admin_pb2.JobRequest(job=job))

    async def rounds(self, job: str) -> list[admin_pb2.Round]:
        return list((await self.jobs.ListRounds(admin_pb2.ListRoundsRequest(job=job, all_attempts=True))).rounds)

    async def versions(self, job: str) -> list[admin_pb2.ModelVersion]:
        return list((await self.jobs.ListModelVersions(admin_pb2.ListModelVersionsRequest(job=job))).versions)

    def watch(self, job: str, after: int = 0) -> aio.UnaryStreamCall[Any, admin_pb2.JobEvent]:
        return self.jobs.WatchJob(admin_pb2.WatchJobRequest(job=job, after_sequence=after))

    async def follow(self, job: str, after: int = 0) -> AsyncGenerator[admin_pb2.JobEvent]:
        """The job's events to its end, also over interruptions."""
        while True:
            call = self.watch(job, after)
            try:
                async for event in call:
                    after = event.sequence
                    yield event
                return
            except aio.AioRpcError as exc:
                code = dict(exc.trailing_metadata() or ()).get(METADATA_CODE)
                if STORM is None or code != Code.STORE_UNAVAILABLE.name:
                    raise
            finally:
                call.cancel()

    async def events(self, job: str, after: int = 0) -> list[admin_pb2.JobEvent]:
        """The whole history of a job, which must end."""
        return [event async for event in self.follow(job, after)]

    async def until(self, job: str, entity: str, to_state: str, round_: int = 0) -> admin_pb2.JobEvent:
        """Waits for an event."""
        async with contextlib.aclosing(self.follow(job)) as events:
            async for event in events:
                if (event.entity, event.to_state) == (entity, to_state) and round_ in (0, event.round):
                    if STORM is not None or entity == "job":
                        await self._settled(job)
                    return event
        raise AssertionError(f"the job ended before {entity} became {to_state}")

    async def _settled(self, job: str) -> None:
        """The server knows what its database knows: it may just have stored it, or an answer may have been lost."""
        if (await self.show(job)).status == admin_pb2.JOB_STATUS_DRAFT:
            return
        try:
            await self.jobs.StartJob(admin_pb2.JobRequest(job=job))  # changes nothing, and waits for its turn
        except aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise

    async def export(self, job: str, version: int | None = None) -> bytes:
        request = admin_pb2.ExportModelRequest(job=job)
        if version is not None:
            request.version = version
        return b"".join([part.data async for part in self.jobs.ExportModel(request)])

    async def model(self, job: str, version: int | None = None) -> Parameters:
        return Parameters.from_bytes(await self.export(job, version))

    async def reasons(self, job: str) -> dict[str, str]:
        """Why the assignments of the job ended, by client: STATE reason."""
        found: dict[str, str] = {}
        async for event in self.follow(job):
            if event.entity == "assignment":
                found[event.client_id] = f"{event.to_state} {event.reason}".strip()
        return found


@dataclasses.dataclass
class Site:
    """A daemon that runs, with a channel to it."""

    daemon: Daemon
    store: FaultyStore
    channel: aio.Channel
    operator: Operator
    task: asyncio.Task[None]
    folder: Path
    open_channel: Callable[[], aio.Channel] | None = None
    channels: list[aio.Channel] = dataclasses.field(default_factory=list[aio.Channel])
    num_enrolled: int = 0

    def __post_init__(self) -> None:
        self._roomy = self.channel
        self._newcomers = asyncio.Semaphore(8)  # a connection may have 18 open calls without a credential

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.daemon.port}"

    def connect(self, ca: bytes) -> aio.Channel:
        """A connection of its own, with TLS; it lasts as long as the site."""
        self.channels.append(access.secure_channel(self.daemon.port, ca))
        return self.channels[-1]

    async def status(self) -> admin_pb2.GetStatusResponse:
        return await self.operator.operators.GetStatus(admin_pb2.GetStatusRequest())

    async def enroll(self, population: str = "demo", key: str | None = None) -> RawClient:
        """A client with a session; the same `key` is the same client, with the same private key."""
        key = key or f"idempotency-{next(_keys)}"
        client = RawClient(self._roomy_channel(), private_key(key))
        async with self._newcomers:
            token = (await self.operator.ticket(population, num_uses=1)).secret
            await client.enroll(population=population, idempotency_key=key, token=token)
            await client.open_session()
        return client

    def _roomy_channel(self) -> aio.Channel:
        """The connection of the next client: a server takes so many calls of one, and a poll is one."""
        self.num_enrolled += 1
        if self.open_channel is None or self.num_enrolled <= CLIENTS_OF_CHANNEL:
            return self.channel
        if self.num_enrolled % CLIENTS_OF_CHANNEL == 1:
            self.channels.append(self.open_channel())
            self._roomy = self.channels[-1]
        return self._roomy

    async def fleet(self, count: int) -> list[RawClient]:
        return [await self.enroll() for _ in range(count)]

    async def assign(self, clients: list[RawClient]) -> list[fleet_pb2.Assignment]:
        return list(await asyncio.gather(*(client.assignment() for client in clients)))

    async def readiness(self, service: str = "") -> int:
        """What the health service says."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    async def back(self) -> None:
        """Ends the outage, and returns when the server has noticed."""
        self.store.outage = False
        seen = self.store.calls["ping"] + 2  # what the health service says is true after a whole ping of its own

        async def serving() -> bool:
            serving = await self.readiness() == health_pb2.HealthCheckResponse.SERVING
            return serving and self.store.calls["ping"] >= seen

        await until(serving, "a database that answers")

    async def waiting(self, count: int) -> None:
        """Returns when so many clients are in the waiting room."""

        async def there() -> bool:
            return (await self.operator.operators.GetStatus(admin_pb2.GetStatusRequest())).num_waiting == count

        await until(there, f"{count} waiting clients")


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *,
    limits: Limits | None = None,
    evaluators: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.time,
    tracing: Tracing | None = None,
    **config: Any,
) -> AsyncGenerator[Site]:
    """A daemon on the blobs of a folder, and on the SQLite database there; stopped as SIGTERM does it.

    `clock` is the wall's.
    """
    store = FaultyStore()  # opened once the daemon leads

    async def open_faulty(database: str) -> Store:
        store.inner = await open_store(database, clock, made.plugins.table, daemon.metrics.instruments)
        return cast(Store, store)

    settings: dict[str, Any] = {
        "database": f"sqlite:///{folder / 'fedplat.sqlite'}",
        "grace_s": 5.0,
        "lease": LeaseTimes.of(60),  # a busy machine may suspend this process for seconds
        **config,
    }
    made = ServerConfig(
        listen="127.0.0.1:0",
        data_dir=folder,
        evaluators=evaluators or {},
        limits=limits or Limits(refusal_delay_s=0.0),
        **settings,
    )

    def utc_now() -> datetime.datetime:
        return datetime.datetime.fromtimestamp(clock(), datetime.UTC)

    daemon = Daemon(made, open_faulty, utc_now, store_retry_s=0.02, tracing=tracing)
    task = asyncio.create_task(daemon.run(), name="daemon")
    started = asyncio.create_task(daemon.started.wait())
    await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if task.done():
        await task
    store.faults = STORM
    try:

        def open_channel() -> aio.Channel:
            own = ("grpc.use_local_subchannel_pool", 1)
            return access.channel(daemon.port, made.tls, (own, *(RETRIES if STORM else ())))

        async with open_channel() as channel:
            if store.is_open:
                await add_operator(store.inner)
            site = Site(daemon, store, channel, Operator(channel), task, folder, open_channel)
            yield site
            for another in site.channels:
                await another.close()
    finally:
        daemon.stop()
        await asyncio.gather(task, return_exceptions=True)
        BEFELL.update(store.injected, calls=store.calls.total())
    await task


async def until_spool_is_empty(folder: Path) -> None:
    """Waits until nothing of an update is left on the disk: files are removed behind a commit."""

    async def empty() -> bool:
        return not list((folder / "uploads").iterdir())

    await until(empty, "the folder of uploads to be empty")


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits for something that no event tells of."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"gave up waiting for: {what}") from None
