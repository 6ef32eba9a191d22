"""A small training whose server dies once on its way: an operator and clients that ask again until they are answered.

What a client sends depends on nothing but who it is and the round, so that the outcome can be computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import grpc
import numpy as np
from grpc import aio

from fedplat import codecs
from fedplat.codecs.container import Format, options_from_text
from fedplat.model import Parameters
from fedplat.wire import digests
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from support import daemons, transports
from support.crash.nursery import Nursery, Order, Process
from support.daemons import RawClient, Site, digest_of
from support.jobs import job_file

_T = TypeVar("_T")
ROUNDS = 3
NUM_CLIENTS = 3
CODECS = tuple(codecs.CODECS)
KILLED = -signal.SIGKILL
_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN})
_QUICK = (("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 100))


class Receipt(NamedTuple):
    """A report that the server has acknowledged."""

    client_id: str
    round: int
    attempt: int
    digest: str


SMALL, LARGE = 16, 72
"""The sides of models that are rows of the database, and that are files only."""


def base_model(side: int = SMALL) -> Parameters:
    rng = np.random.default_rng(0)
    return Parameters.from_arrays({"weight": rng.normal(size=(side, side)).astype("f4"), "bias": np.ones(5, "f4")})


def update(number: int, round_: int, side: int = SMALL) -> Parameters:
    """What the client of this number sends in a round."""
    return daemons.update_of(base_model(side), 100 * round_ + number)


def content_of(number: int, round_: int, codec: codecs.CodecOptions | None, side: int = SMALL) -> bytes:
    """The file of that update."""
    values = update(number, round_, side)
    if codec is None:
        return values.to_bytes()
    rng = np.random.default_rng([number, round_])
    return b"".join(Format(codec, values.schema).encode(values, rng))


def num_examples(number: int) -> float:
    return 1.1 + number


@dataclasses.dataclass
class Life:
    """One life of the server, from its start to its end."""

    process: Process
    over: asyncio.Event
    channel: aio.Channel
    site: Site


class World:
    """The server in all its lives, and what the clients know."""

    side = SMALL
    """That of the model."""
    offers: ClassVar[Mapping[str, Any]] = {"codecs": CODECS}
    """What clients state when they check in."""

    def __init__(self, nursery: Nursery, order: Order) -> None:
        self._nursery = nursery
        self.order = order
        self._life: asyncio.Future[Life] = asyncio.get_running_loop().create_future()
        self.statuses: list[int] = []
        self.receipts: set[Receipt] = set()
        self.numbers: dict[str, int] = {}
        self.job = ""

    async def live(self, crash_at: Sequence[str]) -> None:
        """One life after the other, each with the point that it ends at, until one ends in peace."""
        while not self.statuses or self.statuses[-1] != 0:
            number = len(self.statuses)
            assert number <= len(crash_at), f"it died once too often:\n{self.log()}"
            here = crash_at[number] if number < len(crash_at) else ""
            await self._one_life(self.order.armed(here))

    async def _one_life(self, order: Order) -> None:
        process = self._nursery.start(order)
        await asyncio.wait([process.port, process.status], return_when=asyncio.FIRST_COMPLETED)
        if not process.port.done():
            self._ended(await process.status)
            return
        address = f"127.0.0.1:{process.port.result()}"
        async with transports.connect(address, "http" if order.http else "grpc", _QUICK) as channel:
            site = _site(channel, order)
            life = Life(process, asyncio.Event(), channel, site)
            self._life.set_result(life)
            status = await process.status
            self._life = asyncio.get_running_loop().create_future()
            life.over.set()
            self._ended(status)

    def _ended(self, status: int) -> None:
        assert status in (0, KILLED), f"the daemon ended with {status}:\n{self.log()}"
        self.statuses.append(status)

    def first_model(self) -> Parameters:
        """The initial model."""
        return base_model(self.side)

    def content(self, number: int, work: fleet_pb2.Assignment) -> bytes:
        """What a client sends."""
        codec = options_from_text(work.uplink) if work.uplink else None
        return content_of(number, work.round, codec, self.side)

    def num_examples(self, number: int) -> float:
        """How many examples a client claims."""
        return num_examples(number)

    def log(self) -> str:
        return self.order.log.read_text() if self.order.log.exists() else ""

    async def ask(self, question: Callable[[Site], Awaitable[_T]]) -> _T:
        """Asks the server that lives now; again, if it dies before it has answered."""
        while True:
            life = await asyncio.shield(self._life)
            try:
                return await question(life.site)
            except aio.AioRpcError as exc:
                if not _is_gone(exc):
                    raise
            except asyncio.CancelledError:  # how grpc.aio tells that a stream to the server broke
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            await life.over.wait()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends the server that lives now."""
        life = await asyncio.shield(self._life)
        await life.process.signal(number)
        await life.over.wait()


def _is_gone(exc: aio.AioRpcError) -> bool:
    """Whether a call failed because the server died. Of a stream that it was writing to, grpc.aio says INTERNAL."""
    broken = exc.code() is grpc.StatusCode.INTERNAL and "execute_batch" in (exc.debug_error_string() or "")
    return broken or exc.code() in _GONE


def _site(channel: aio.Channel, order: Order) -> Site:
    """A way to talk to a daemon that is not in this process."""
    elsewhere: Any = None
    return Site(elsewhere, elsewhere, channel, daemons.Operator(channel), elsewhere, order.data_dir)


Disturb: TypeAlias = Callable[[World], Awaitable[None]]


# --- who is there ------------------------------------------------------------------------------------------


async def operate(world: World, text: str) -> None:
    """Creates the job and starts it."""

    async def create(site: Site) -> admin_pb2.Job:
        return await site.operator.create(text, world.first_model(), key="the-one-job-of-all")

    while not world.job:
        try:
            world.job = (await world.ask(create)).job_id
        except aio.AioRpcError as exc:  # the uploaded model was an orphan when the server died
            if exc.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
    await world.ask(lambda site: site.operator.jobs.StartJob(admin_pb2.JobRequest(job=world.job)))


@dataclasses.dataclass
class Member:
    """A client, whichever server it talks to."""

    world: World
    number: int
    client: RawClient
    channel: aio.Channel

    async def at(self, site: Site) -> RawClient:
        """The client with a session of the server that lives now."""
        if self.channel is not site.channel:
            again = RawClient(site.channel, self.client.key)
            again.client_id = self.client.client_id
            await again.open_session()
            self.client, self.channel = again, site.channel
        return self.client

    async def ask(self, question: Callable[[RawClient], Awaitable[_T]]) -> _T:
        """Asks the server as this client, until there is an answer."""

        async def asked(site: Site) -> _T:
            return await question(await self.at(site))

        return await self.world.ask(asked)

    async def take_part(self) -> None:
        """Works until it is cancelled."""
        while True:
            answer = await self.ask(
                lambda client: client.check_in(labels={"device": str(self.number)}, **self.world.offers)
            )
            if not answer.HasField("assignment"):
                continue
            work = answer.assignment
            if self.number == 0:
                await self.ask(lambda client, work=work: client.download(work.model.digest))
            content = self.world.content(self.number, work)
            send = {0: self._stream, 1: self._stream_by_id}.get(self.number, self._inline)
            response = await send(work, content)
            if response is not None and response.HasField("receipt"):
                self.world.receipts.add(
                    Receipt(self.client.client_id, work.round, work.attempt, response.receipt.digest)
                )

    async def _inline(self, work: fleet_pb2.Assignment, content: bytes) -> fleet_pb2.ReportResponse:
        """The update inside its report."""
        examples = self.world.num_examples(self.number)
        while True:
            try:
                return await self.ask(lambda client: client.report_inline(work.token, content, num_examples=examples))
            except aio.AioRpcError as exc:
                if exc.code() is not grpc.StatusCode.ABORTED:  # else the assignment ended while the bytes came
                    raise

    async def _stream_by_id(self, work: fleet_pb2.Assignment, content: bytes) -> fleet_pb2.ReportResponse | None:
        """The same, with the digest after the bytes, which is one of BLAKE3 if both ends have it."""
        kind = digests.BLAKE3 if work.blake3 and digests.has_blake3() else ""
        return await self._stream(work, content, kind + digest_of(content)[:32])

    async def _stream(
        self, work: fleet_pb2.Assignment, content: bytes, upload_id: str = ""
    ) -> fleet_pb2.ReportResponse | None:
        """The update as a stream, from where it stopped; then its report. None: the assignment is open no more."""
        digest, examples = digest_of(content, digests.kind_of(upload_id)), self.world.num_examples(self.number)
        names: dict[str, Any] = {"digest": "" if upload_id else digest, "upload_id": upload_id}

        async def upload(client: RawClient) -> None:
            await client.upload(work.token, content, await client.query(work.token, **names), **names)

        while True:
            try:
                await self.ask(upload)
                return await self.ask(lambda client: client.report(work.token, digest, examples, upload_id=upload_id))
            except aio.AioRpcError as exc:
                if exc.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                # Else the bytes were lost before the report, or the assignment ended while they came.
                if exc.code() not in (grpc.StatusCode.ABORTED, grpc.StatusCode.OUT_OF_RANGE):
                    raise


async def enroll(world: World, number: int) -> Member:
    async def known(site: Site) -> Member:
        return Member(world, number, await site.enroll(key=f"the client of number {number}"), site.channel)

    member = await world.ask(known)
    world.numbers[member.client.client_id] = number
    return member


async def train(
    world: World,
    text: str,
    crash_at: Sequence[str] = (),
    disturb: Disturb | None = None,
    num_clients: int = NUM_CLIENTS,
) -> None:
    """A whole training, from an empty server to one that was stopped; `disturb` does something meanwhile."""
    try:
        await _train(world, text, crash_at, disturb, num_clients)
    except BaseException as exc:
        exc.add_note(f"the log of the server:\n{world.log()}")
        raise


async def _train(world: World, text: str, crash_at: Sequence[str], disturb: Disturb | None, num_clients: int) -> None:
    patience_s = daemons.PATIENCE_S + 20.0 * len(crash_at)
    async with asyncio.timeout(patience_s), asyncio.TaskGroup() as group:
        living = group.create_task(world.live(crash_at))
        members = [await enroll(world, number) for number in range(num_clients)]
        await operate(world, text)
        working = [group.create_task(member.take_part()) for member in members]
        if disturb is not None:
            await disturb(world)
        await world.ask(lambda site: site.operator.events(world.job))
        for task in working:
            task.cancel()
        await world.stop()
        await living


async def kill_in_the_second_round(world: World) -> None:
    """SIGKILL when one of its updates was reported."""
    await world.ask(lambda site: site.operator.until(world.job, "assignment", "REPORTED", round_=2))
    await world.stop(signal.SIGKILL)


BUFFERED = '[mode]\nkind = "buffered"\nconcurrency = 4\nmax_staleness = 5\n'
"""Four clients work all the time, and two of them make a version."""


def buffered_text(rounds: int = 5) -> str:
    return job_text(rounds=rounds, goal=2, more=BUFFERED)


CLOCKS = '[mode]\nkind = "ssp"\nconcurrency = 3\nslack = 1\n'
"""Each update of three clients makes a version."""


def clocks_text(rounds: int = 7) -> str:
    text = job_text(rounds=rounds, goal=1, more=CLOCKS)
    return text.replace("min_fraction = 1.0", "min_fraction = 1.0\nwait_for = 3")


async def kill_after_the_second_version(world: World) -> None:
    """SIGKILL when an update was accepted after the second version; in a job with a buffer, that is half full."""

    async def until_reported(site: Site) -> None:
        version = await site.operator.until(world.job, "version", "2")
        async with contextlib.aclosing(site.operator.follow(world.job, version.sequence)) as events:
            async for event in events:
                if (event.entity, event.to_state) == ("assignment", "REPORTED"):
                    return

    await world.ask(until_reported)
    await world.stop(signal.SIGKILL)


EVERY_STATE = "[retention]\nstates = 100\n"
"""What is recomputed needs the state of every version."""


def job_text(rounds: int = ROUNDS, goal: int = NUM_CLIENTS, more: str = "", retention: str = EVERY_STATE) -> str:
    rule = '[updates.adaptive_clip]\n[aggregation]\nrule = "fedavgm"\nmomentum = 0.5\n'
    return job_file("matrix", rounds=rounds, goal=goal, more=rule + more + retention)
