"""One attacker of each kind of the security audit, each at a rate that one host can hold; see `soak_attackers.py`.

    python tests/faults/attackers.py --target FILE --folder FOLDER --kind KIND [--kind KIND ...] [--few]

The program enrolls the clients it needs, prints `ready`, and begins at a line on its standard input. It ends at
SIGTERM, or with `--few` after so many calls of each kind as a test can afford, and leaves FOLDER/KIND.json: how many
calls were made and how they were answered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import honest_fleet, least_squares
from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire import auth
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2
from hostile import attacks, half_requests, half_sent
from support import transports
from support.raw_client import CHALLENGE, RawClient, digest_of, reason_name

MISFITS = "misfits"
"""A separate population, whose job has a model so large that an update may have 8 MiB."""
ANSWER_S = 20.0


class Target(msgspec.Struct, frozen=True):
    """What all attackers know: tickets of two populations, and the token of an operator who is a viewer."""

    address: str
    ticket: str
    misfit_ticket: str
    viewer_token: str
    transport: transports.Name = "grpc"


@dataclasses.dataclass
class Attack:
    """One attacker at work; `max_calls` bounds what it does (None: until it is stopped)."""

    target: Target
    stop: asyncio.Event
    begin: asyncio.Event
    max_calls: int | None
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    answers: Counter[str] = dataclasses.field(default_factory=Counter[str])
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.channel = transports.connect(self.target.address, self.target.transport)
        self.rng = random.Random(1)

    def goes_on(self) -> bool:
        return not self.stop.is_set() and (self.max_calls is None or self.num_calls < self.max_calls)

    async def begins(self) -> None:
        """Reports that it is ready, and waits for the start."""
        self.ready.set()
        await self.begin.wait()

    async def pause(self, seconds: float) -> None:
        """Waits for some seconds, or until the end."""
        with_end = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait([with_end], timeout=seconds)
        with_end.cancel()

    async def call(self, call: Awaitable[Any], answer_of: Callable[[Any], str] = lambda _: "OK") -> Any:
        """Makes a call and notes its answer; None if it failed."""
        self.num_calls += 1
        try:
            answer = await call
        except aio.AioRpcError as exc:
            code = dict(exc.trailing_metadata() or ()).get(auth.METADATA_CODE)
            self.answers[str(code or exc.code().name)] += 1
            return None
        self.answers[answer_of(answer)] += 1
        return answer

    async def at_rate(self, per_second: float, make: Callable[[], Awaitable[Any]], *, at_once: int = 64) -> None:
        """Makes calls at this rate, whether or not they are answered, until it is over."""
        running: set[asyncio.Task[Any]] = set()
        clock = asyncio.get_running_loop().time
        started, num_begun = clock(), 0
        while self.goes_on():
            due = int((clock() - started) * per_second) - num_begun
            left = due if self.max_calls is None else min(due, self.max_calls - self.num_calls - len(running))
            for _ in range(min(left, at_once - len(running))):
                task = asyncio.create_task(_awaited(make()))
                running.add(task)
                task.add_done_callback(running.discard)
            num_begun += max(due, 0)  # calls that found no room are not made up for: the rate is a bound
            await self.pause(0.05)
        await asyncio.gather(*running)

    async def member(self, ticket: str) -> RawClient:
        """Becomes a client with a session; tries again while the server has no room for unknown callers."""
        read, client = Ticket.from_text(ticket), RawClient(self.channel, Ed25519PrivateKey.generate())
        while not self.stop.is_set():
            try:
                if not client.client_id:
                    key = os.urandom(8).hex()
                    await client.enroll(population=read.population, idempotency_key=key, token=read.secret)
                await client.open_session()
                return client
            except aio.AioRpcError:
                await self.pause(1.0)
        raise asyncio.CancelledError


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


async def half_messages(attack: Attack) -> None:
    """Messages that never end: on a thousand streams of each of ten connections or, over HTTP/1.1, on 2,000."""
    await attack.begins()
    few = attack.max_calls is not None
    ends = asyncio.get_running_loop().time() + (6.0 if few else 1e9)

    def goes_on() -> bool:
        return not attack.stop.is_set() and asyncio.get_running_loop().time() < ends

    address, answers = attack.target.address, attack.answers
    if attack.target.transport == "http":
        count = 100 if few else 2000
        await asyncio.gather(*(half_requests.attack(address, answers, each, 2.0, goes_on) for each in range(count)))
    else:
        connections, streams, bytes_per_s = (2, 100, 20e6) if few else (10, 1000, 5e5)
        args = address, answers, streams, bytes_per_s, goes_on
        await asyncio.gather(*(half_sent.attack(*args) for _ in range(connections)))
    attack.num_calls = answers.total()


async def challenges(attack: Attack) -> None:
    """A flood of GetChallenge from the clients' own address: a burst first, then at the rate of the refill."""
    client = RawClient(attack.channel, Ed25519PrivateKey.generate())
    await attack.begins()
    for _ in range(100):  # 6,000 calls: what one address has by default
        if attack.goes_on():
            await asyncio.gather(*(attack.call(client.stub.GetChallenge(CHALLENGE)) for _ in range(60)))
    await attack.at_rate(150.0, lambda: attack.call(client.stub.GetChallenge(CHALLENGE, timeout=ANSWER_S)))


async def odd_ids(attack: Attack) -> None:
    """OpenSession with ids that contain a NUL or are invalid."""
    client = RawClient(attack.channel, Ed25519PrivateKey.generate())
    await attack.begins()

    async def one() -> None:
        text = attack.rng.choice(attacks.ODD_TEXTS)
        request = fleet_pb2.OpenSessionRequest(client_id=text, protocol_version=wire.PROTOCOL_VERSION)

        async def proven() -> Any:
            return await client.stub.OpenSession(request, metadata=await client.proof("OpenSession", request))

        await attack.call(proven())

    await attack.at_rate(20.0, one)


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What a client reports."""

    content: bytes
    num_examples: float = 256.0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


async def _work(attack: Attack, make: Callable[[int, Parameters], Delivery]) -> None:
    """Works for the honest clients' job, and reports what `make` returns for a number and the base model."""
    client = await attack.member(attack.target.ticket)
    await attack.begins()
    while attack.goes_on():
        try:
            response = await client.check_in(1.0, trainers=(honest_fleet.TRAINER,))
        except aio.AioRpcError as exc:
            attack.answers[f"check-in {exc.code().name}"] += 1
            await attack.pause(1.0)
            continue
        if not response.HasField("assignment"):
            await attack.pause(0.1)
            continue
        work = response.assignment
        delivery = make(attack.num_calls, Parameters.from_bytes(work.model_bytes))
        await attack.call(_deliver(client, work.token, delivery), _verdict)


async def _deliver(client: RawClient, token: str, delivery: Delivery) -> fleet_pb2.ReportResponse:
    content = delivery.content
    request = fleet_pb2.ReportRequest(
        token=token,
        digest=digest_of(content),
        num_examples=delivery.num_examples,
        metrics=delivery.metrics,
        update=content,
    )
    return await client.stub.Report(request, metadata=client.signed("Report", request), timeout=ANSWER_S)


def _verdict(response: fleet_pb2.ReportResponse) -> str:
    return "receipt" if response.HasField("receipt") else reason_name(response.refusal.reason)


def _step(base: Parameters, weight: Any) -> bytes:
    """The update that leads from the base model to this one."""
    update = base.copy()
    update["weight"][:] = weight - base["weight"]
    return update.to_bytes()


async def huge_values(attack: Attack) -> None:
    """An update with one entry of 3e38, then of 3e30."""

    def make(number: int, base: Parameters) -> Delivery:
        weight = least_squares.TRUE.copy()
        weight[number % len(weight)] = 3e30 if number % 2 else 3e38
        return Delivery(_step(base, weight))

    await _work(attack, make)


async def huge_weights(attack: Attack) -> None:
    """The opposite of the true model, with a claim of 1e18 examples."""
    await _work(attack, lambda _, base: Delivery(_step(base, -least_squares.TRUE), 1e18))


async def tiny_weights(attack: Attack) -> None:
    """The opposite of the true model, with a claim of 1e-50 examples."""
    await _work(attack, lambda _, base: Delivery(_step(base, -least_squares.TRUE), 1e-50))


async def unknown_keys(attack: Attack) -> None:
    """Updates whose header is an unknown key: a megabyte, or as much as an honest client's report."""

    def make(number: int, base: Parameters) -> Delivery:
        entry = {
            "dtype": "F32",
            "shape": [1],
            "data_offsets": [0, 4],
            f"{number}" + "\x1bx" * (30_000 if number % 2 else 140_000): 1,
        }
        text = json.dumps({"weight": entry}).encode()
        return Delivery(len(text).to_bytes(8, "little") + text + bytes(4))

    await _work(attack, make)


async def new_metrics(attack: Attack) -> None:
    """A good update, with 64 names of metrics that were never seen before."""

    def make(number: int, base: Parameters) -> Delivery:
        names = {f"{number}_{metric}_{attacks.WIDE * 90}"[:100]: 1.0 for metric in range(64)}
        return Delivery(_step(base, least_squares.TRUE), metrics=names)

    await _work(attack, make)


async def new_labels(attack: Attack) -> None:
    """Check-ins that change all labels each time."""
    client = await attack.member(attack.target.ticket)
    await attack.begins()

    def one() -> Awaitable[Any]:
        labels = attacks.wide_labels(attack.rng)
        return attack.call(client.check_in(0.0, labels=labels, trainers=()), lambda _: "OK")

    await attack.at_rate(40.0, one, at_once=4)


async def fencing(attack: Attack) -> None:
    """Opens sessions again and again, and calls in the previous session."""
    client = await attack.member(attack.target.ticket)
    await attack.begins()

    async def one() -> None:
        older = client.over(attack.channel)
        await attack.call(client.open_session())
        await attack.call(older.check_in(0.0, trainers=()))

    await attack.at_rate(20.0, one, at_once=1)


async def viewer(attack: Attack) -> None:
    """An operator with the lowest role: expensive reads, and calls that the role may not make."""
    clients, operators = admin_pb2_grpc.ClientsStub(attack.channel), admin_pb2_grpc.OperatorsStub(attack.channel)
    privacy = admin_pb2_grpc.PrivacyStub(attack.channel)
    given: Any = {
        "metadata": ((wire.METADATA_AUTHORIZATION, f"Bearer {attack.target.viewer_token}"),),
        "timeout": ANSWER_S,
    }
    calls: list[Callable[[], Any]] = [
        lambda: privacy.ShowPrivacy(admin_pb2.ShowPrivacyRequest(), **given),
        lambda: clients.ListClients(admin_pb2.ListClientsRequest(), **given),
        lambda: operators.AddOperator(admin_pb2.AddOperatorRequest(name="x", role="admin"), **given),
    ]
    await attack.begins()
    await attack.at_rate(15.0, lambda: attack.call(attack.rng.choice(calls)()), at_once=8)


async def misfits(attack: Attack) -> None:
    """One upload of 8 MiB that fits no model, reported 14 times at once."""
    client = await attack.member(attack.target.misfit_ticket)
    await attack.begins()
    # A header whose length is no multiple of 8, and a tensor that the model does not have.
    size = 8 * 2**20 - 4096
    text = json.dumps({"other": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    text += b" " * ((-len(text)) % 8 + 1)
    content = len(text).to_bytes(8, "little") + text + bytes(size)
    while attack.goes_on():
        try:
            response = await client.check_in(1.0, trainers=(honest_fleet.TRAINER,))
            if not response.HasField("assignment"):
                await attack.pause(0.5)
                continue
            token = response.assignment.token
            await client.upload(token, content)
        except aio.AioRpcError as exc:
            attack.answers[f"upload {exc.code().name}"] += 1
            await attack.pause(1.0)
            continue
        reports = (client.report(token, digest_of(content)) for _ in range(14))
        await asyncio.gather(*(attack.call(report, _verdict) for report in reports))
        await attack.pause(2.0)


async def watches(attack: Attack) -> None:
    """Streams of Health/Watch without a credential, a thousand over ten connections; ended ones are replaced."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [aio.insecure_channel(attack.target.address, options=options) for _ in range(10)]
    await attack.begins()
    limit = attack.max_calls or 1000
    running: set[asyncio.Task[Any]] = set()

    async def watch(channel: aio.Channel) -> str:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
            attack.answers["first answer"] += 1
        return "ended"

    while attack.goes_on():
        for _ in range(min(100, limit - len(running))):
            task = asyncio.create_task(attack.call(watch(channels[attack.num_calls % 10]), str))
            running.add(task)
            task.add_done_callback(running.discard)
        await attack.pause(1.0)
    for channel in channels:
        await channel.close()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def wrong_tokens(attack: Attack) -> None:
    """Operators' calls with unknown tokens."""
    jobs = admin_pb2_grpc.JobsStub(attack.channel)
    await attack.begins()

    def one() -> Awaitable[Any]:
        metadata = ((wire.METADATA_AUTHORIZATION, f"Bearer fedplat_op_{attack.rng.randbytes(32).hex()[:43]}"),)
        return attack.call(jobs.ListJobs(admin_pb2.ListJobsRequest(), metadata=metadata, timeout=ANSWER_S))

    await attack.at_rate(20.0, one)


Kind = Callable[[Attack], Awaitable[None]]
KINDS: dict[str, tuple[Kind, int]] = {
    "half messages": (half_messages, 1),
    "challenges": (challenges, 1500),
    "odd ids": (odd_ids, 60),
    "huge values": (huge_values, 4),
    "huge weights": (huge_weights, 4),
    "tiny weights": (tiny_weights, 4),
    "unknown keys": (unknown_keys, 4),
    "new metrics": (new_metrics, 4),
    "new labels": (new_labels, 100),
    "fencing": (fencing, 200),
    "viewer": (viewer, 24),
    "misfits": (misfits, 28),
    "watches": (watches, 300),
    "wrong tokens": (wrong_tokens, 60),
}
"""Each attacker, and how many calls it makes with `--few`."""
GRPC_ONLY = ("watches",)
"""Those whose calls have no form over HTTP/1.1."""
WORKERS = ("huge values", "huge weights", "tiny weights", "unknown keys", "new metrics")
"""The attackers that take part in the honest clients' rounds."""


def kinds_over(transport: transports.Name) -> tuple[str, ...]:
    """The attackers of a transport."""
    return tuple(kind for kind in KINDS if transport == "grpc" or kind not in GRPC_ONLY)


async def run(target: Target, folder: Path, kinds: list[str], few: bool) -> None:
    """Attacks until SIGTERM, or until enough calls were made."""
    stop, begin, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    running = {kind: Attack(target, stop, begin, KINDS[kind][1] if few else None) for kind in kinds}
    tasks = [asyncio.create_task(_awaited(KINDS[kind][0](attack)), name=kind) for kind, attack in running.items()]
    all_ready = asyncio.gather(*(attack.ready.wait() for attack in running.values()))
    await asyncio.wait([all_ready, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():  # it failed before it was ready
            await task
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    begin.set()
    await asyncio.gather(*tasks)
    for kind, attack in running.items():
        await attack.channel.close()
        result = {"calls": attack.num_calls, "answers": dict(attack.answers.most_common())}
        (folder / f"{kind}.json").write_text(json.dumps(result))


def main(
    target: Annotated[Path, typer.Option(help="A JSON file with the fields of `Target`.")],
    folder: Annotated[Path, typer.Option(help="Where results go.")],
    kind: Annotated[list[str], typer.Option(help="An attacker; repeatable.")],
    few: Annotated[bool, typer.Option("--few", help="Only so many calls as a test can afford.")] = False,
) -> None:
    """Attack a server."""
    np.seterr(all="ignore")
    asyncio.run(run(msgspec.json.decode(target.read_bytes(), type=Target), folder, kind, few))


if __name__ == "__main__":
    typer.run(main)
