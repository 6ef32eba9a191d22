"""Malformed messages by the thousand against a real daemon, while honest clients work.

    python tests/hostile/flood.py [--database sqlite|postgres|both] [--messages 100000] [--seed 1]
        [--transport grpc|http]

Prints what was sent, how it was answered, and the daemon's memory over time. Exits with 1 if the daemon crashed, failed
internally (status INTERNAL or UNKNOWN, or a traceback in its log), showed a traceback, or grew, if no honest job
was completed meanwhile, or if what was stored makes an answer larger than a message. PostgreSQL is a real one, started
for the flood; it refuses texts that SQLite takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, Literal

import grpc
import numpy as np
import psutil
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from grpc import aio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedplat import wire
from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.wire import auth
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import admin_pb2, fleet_pb2, fleet_pb2_grpc
from fedplat_client import Client, ClientOptions, Task, TrainResult
from hostile import attacks, broken_requests, frames, reading
from support import databases, processes, transports
from support.clients import at_work
from support.raw_client import CHALLENGE, RawClient, is_unheard

NUM_HONEST = 3
NUM_ATTACKERS = 20
NUM_BAITS = 8
"""Jobs that only attackers work for, each with one client at a time."""
NUM_CROWD = 130
"""Clients with the largest labels that are accepted; they enroll at once, as a script with one ticket could."""
AT_ONCE = 4
ANSWER_S = 2.0
WARM_UP = 0.1
"""Share of the flood after which the daemon's memory is first measured."""
GROWTH_BYTES = 64 * 2**20
"""How much more memory the daemon may have at the end than after the warm-up."""
FAILURES = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})
HONEST = """
name = "honest"
population = "honest"
trainer = "toy"
rounds = 5
[model]
initial = "unused.safetensors"
[selection]
goal = 3
over_selection = 1.0
"""
BAIT = """
name = "bait-{number}"
population = "hostile"
trainer = "toy"
rounds = 1000000
[model]
initial = "unused.safetensors"
[selection]
goal = 1
over_selection = 1.0
[deadlines]
selection_s = 3600
training_s = 3600
[retry]
base_s = 0.01
max_s = 0.01
"""


@dataclasses.dataclass
class Outcome:
    """The results of a flood."""

    answers: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter[tuple[str, str]])
    wrong: list[str] = dataclasses.field(default_factory=list[str])
    num_sent: int = 0
    num_completed: int = 0
    rss_bytes: list[int] = dataclasses.field(default_factory=list[int])
    seconds: float = 0.0

    def note(self, kind: str, answer: str) -> None:
        """Counts a message and its answer."""
        self.num_sent += 1
        self.answers[(kind, answer)] += 1

    def judge(self, log: str, *, is_alive: bool) -> None:
        """Checks the daemon, its log and its memory after the flood."""
        if not is_alive:
            self.wrong.append("the daemon is gone")
        for sign in ("Traceback", "a call failed", "could not be aggregated"):
            if sign in log:
                line = next(line for line in log.splitlines() if sign in line)
                self.wrong.append(f"the daemon's log says: {line[:300]}")
        if self.rss_bytes and self.rss_bytes[-1] - self.rss_bytes[0] > GROWTH_BYTES:
            self.wrong.append(f"the daemon's memory grew from {self.rss_bytes[0]} to {self.rss_bytes[-1]} bytes")
        if not self.num_completed:
            self.wrong.append("no honest job was completed")

    def lines(self) -> list[str]:
        """The results as lines of text."""
        kinds: Counter[str] = Counter()
        for (kind, _), count in self.answers.items():
            kinds[kind] += count
        shown = [f"{self.num_sent} messages in {self.seconds:.0f} s; honest jobs completed: {self.num_completed}"]
        for kind, count in kinds.most_common():
            answers = {answer: n for (of, answer), n in self.answers.most_common() if of == kind}
            shown.append(f"  {count:6} {kind}: " + ", ".join(f"{answer} {n}" for answer, n in answers.items()))
        first, last, most = self.rss_bytes[0], self.rss_bytes[-1], max(self.rss_bytes)
        shown.append(f"RSS after warm-up {first / 2**20:.1f} MiB, last {last / 2**20:.1f}, most {most / 2**20:.1f}")
        return shown + [f"WRONG: {line}" for line in self.wrong]


class Attacker:
    """A caller with a connection, with or without an identity."""

    def __init__(
        self, address: str, transport: transports.Name, operator_token: str, seed: int, outcome: Outcome
    ) -> None:
        self._address = address
        self._draw_broken = frames.draw if transport == "grpc" else broken_requests.draw
        self._operator = ((wire.METADATA_AUTHORIZATION, f"Bearer {operator_token}"),)
        self._rng = random.Random(seed)
        self._outcome = outcome
        self._channel = transports.connect(address, transport)
        self._fleet = fleet_pb2_grpc.FleetStub(self._channel)
        self._client = RawClient(self._channel, Ed25519PrivateKey.generate())

    async def enroll(self, token: str) -> None:
        """Becomes a client."""
        await self._client.enroll(population="hostile", idempotency_key=os.urandom(8).hex(), token=token)
        await self._client.open_session()

    async def attack(self) -> None:
        """Sends one malformed message."""
        dice = self._rng.random()
        if dice < 0.02:
            await frames.send(self._address, self._draw_broken(self._rng))
            self._outcome.note("broken connections", "")
        elif dice < 0.04:
            content, examples = attacks.bad_file(self._rng), self._rng.choice((1.0, 1e308))
            await self._told("bad update", self._report(content, examples, {}))
        elif dice < 0.06:
            await self._told("odd report", self._report(*attacks.odd_report(self._rng)))
        else:
            attack = attacks.draw(self._rng)
            await self._told(attack.kind, self._call(attack), attack.method.path)

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()

    async def _told(self, kind: str, call: Any, path: str = "Report") -> None:
        try:
            answer = await call
        except asyncio.CancelledError:  # gRPC's own, where it could not tell the end of what it sends: see is_unheard
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            answer = "unheard"
        except aio.AioRpcError as exc:
            text = exc.details() or ""
            answer = "unheard" if is_unheard(exc) else exc.code().name
            if (exc.code() in FAILURES and not is_unheard(exc)) or "Traceback" in text or 'File "' in text:
                self._outcome.wrong.append(f"{kind}, {path}: {answer} {text[:300]}")
        self._outcome.note(kind, answer)

    async def _call(self, attack: attacks.Attack) -> str:
        method, first = attack.method, attack.messages[0] if attack.messages else b""
        if not method.path.startswith("/fedplat.wire.v1.Fleet/"):
            known = self._operator
        elif method.path.endswith(("/OpenSession", "/Enroll")):
            known = await self._proof(method.path, first)
        else:
            known = self._client.signed_bytes(method.path.rpartition("/")[2], first)
        metadata = known if self._rng.random() < 0.9 else ()
        options: dict[str, Any] = {"metadata": metadata, "timeout": ANSWER_S}
        if method.client_streaming:
            await self._channel.stream_unary(method.path)(iter(attack.messages), **options)
        elif method.server_streaming:
            async for _ in self._channel.unary_stream(method.path)(attack.messages[0], **options):
                pass
        else:
            await self._channel.unary_unary(method.path)(attack.messages[0], **options)
        return "OK"

    async def _proof(self, path: str, request: bytes) -> Any:
        """A nonce from the server, and a signature over it; without a nonce the server looks nothing up."""
        nonce = (await self._fleet.GetChallenge(CHALLENGE, timeout=ANSWER_S)).nonce
        signature = self._client.key.sign(auth.proof_payload(path, nonce, request))
        return (auth.METADATA_NONCE, nonce), (auth.METADATA_SIGNATURE, signature)

    async def _report(self, content: bytes, num_examples: float, metrics: dict[str, float]) -> str:
        """Reports an update that no training makes, for a real assignment."""
        check_in = fleet_pb2.CheckInRequest(
            protocol_version=wire.PROTOCOL_VERSION, trainers=["toy"], wait_s=ANSWER_S / 4
        )
        client = self._client
        response = await self._fleet.CheckIn(check_in, metadata=client.signed("CheckIn", check_in), timeout=ANSWER_S)
        if not response.HasField("assignment"):
            return "no assignment"
        digest = attacks.digest_of(content)
        token = response.assignment.token
        report = fleet_pb2.ReportRequest(token=token, digest=digest, num_examples=num_examples, metrics=metrics)
        if self._rng.random() < 0.5:
            report.update = content
        else:
            header = fleet_pb2.UploadHeader(token=token, digest=digest, size_bytes=len(content))
            parts = [fleet_pb2.UploadRequest(header=header), fleet_pb2.UploadRequest(data=content)]
            await self._fleet.Upload(iter(parts), metadata=client.signed("Upload", parts[0]), timeout=ANSWER_S)
        answer = await self._fleet.Report(report, metadata=client.signed("Report", report), timeout=ANSWER_S)
        return "accepted" if answer.HasField("receipt") else "rejected"


class Honest:
    """Honest clients, and an operator who gives them one job after the other."""

    def __init__(self, server: processes.Server, folder: Path, transport: transports.Name = "grpc") -> None:
        self._server = server
        self._options = ClientOptions(transport=transport)
        self._ticket = server.ticket("honest", NUM_HONEST)
        self.num_completed = 0
        self._over = threading.Event()
        self._clients = [self._client(folder / f"honest-{number}") for number in range(NUM_HONEST)]

    def _client(self, folder: Path) -> Client:
        client = Client.from_ticket(self._ticket, data_dir=folder, options=self._options)

        def train(task: Task) -> TrainResult:
            task.parameters["weight"] += np.float32(1.0)
            return TrainResult(parameters=task.parameters, num_examples=1)

        client.add_trainer("toy", train)
        return client

    @contextlib.contextmanager
    def at_work(self) -> Generator[None]:
        """Works until the end of the block, and to the end of the job that runs then."""
        operator = threading.Thread(target=self._operate)
        with at_work(self._clients):
            operator.start()
            try:
                yield
            finally:
                self._over.set()
                operator.join(120.0)

    def _operate(self) -> None:
        with self._server.admin() as admin:
            while not self._over.is_set():
                job = submit(admin, HONEST)
                for _ in admin.watch_job(job):
                    pass
                self.num_completed += admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED


async def crowd(server: processes.Server, channel: aio.Channel) -> None:
    """Enrolls many clients with the largest labels that are accepted, all with one ticket."""
    rng, token = random.Random(1), Ticket.from_text(server.ticket("crowd", NUM_CROWD)).secret
    for number in range(NUM_CROWD):
        client = RawClient(channel, Ed25519PrivateKey.generate())
        key = f"one of a crowd: {number}"
        with contextlib.suppress(aio.AioRpcError):  # the server may refuse such labels
            await client.enroll(population="crowd", idempotency_key=key, token=token, labels=attacks.wide_labels(rng))
    await channel.close()


def submit(admin: AdminClient, text: str) -> str:
    """Starts a job; returns its id."""
    return submission.submit(admin, submission.Submission(text, parse_job(text), attacks.MODEL)).job_id


@dataclasses.dataclass(frozen=True)
class Storm:
    """What is sent, and over which transport."""

    num_messages: int
    seed: int
    transport: transports.Transport


async def _storm(
    server: processes.Server, storm: Storm, operator: str, process: psutil.Process, outcome: Outcome
) -> None:
    address, transport, num_messages = storm.transport.address(server.address), storm.transport.name, storm.num_messages
    attackers = [
        Attacker(address, transport, operator, storm.seed * 1000 + number, outcome) for number in range(NUM_ATTACKERS)
    ]
    numbers = iter(range(num_messages))
    token = Ticket.from_text(server.ticket("hostile", NUM_ATTACKERS)).secret
    samples = sorted({int(num_messages * share) for share in (WARM_UP, 0.25, 0.5, 0.75)})

    async def work(attacker: Attacker) -> None:
        for number in numbers:
            if number in samples:
                outcome.rss_bytes.append(process.memory_info().rss)
            await attacker.attack()

    await crowd(server, transports.connect(address, transport))
    await asyncio.gather(*(attacker.enroll(token) for attacker in attackers))
    await asyncio.gather(*(work(attacker) for attacker in attackers for _ in range(AT_ONCE)))
    for attacker in attackers:
        await attacker.close()
    outcome.rss_bytes.append(process.memory_info().rss)


def run(
    folder: Path, num_messages: int, seed: int, database: str | None = None, transport: transports.Name = "grpc"
) -> Outcome:
    """Starts everything, runs the flood, and checks the results. `database` is a URL; without one: SQLite."""
    outcome, started = Outcome(), time.monotonic()
    storm = Storm(num_messages, seed, transports.Transport.of(transport))
    options = () if database is None else ("--database", database)
    with processes.server(folder / "server", "--insecure", *options, *storm.transport.options) as server:
        with server.admin() as admin:
            process = psutil.Process(admin.status().process_id)
            baits = [submit(admin, BAIT.format(number=number)) for number in range(NUM_BAITS)]
            # The attackers have their own operator: a daemon limits the calls of each, and honest ones need theirs.
            token = admin.add_operator("hostile", "admin").token
        honest = Honest(server, folder, transport)
        with honest.at_work():
            asyncio.run(_storm(server, storm, token, process, outcome))
        outcome.num_completed = honest.num_completed
        outcome.seconds = time.monotonic() - started
        if process.is_running():
            with server.admin() as admin:
                for bait in baits:
                    admin.cancel(bait)
                outcome.wrong += reading.unreadable(admin, *baits)
        outcome.judge(server.log_text(), is_alive=process.is_running())
    return outcome


@contextlib.contextmanager
def stores(kind: str) -> Generator[dict[str, str | None]]:
    """The databases for `sqlite`, `postgres` or `both`: each one's name, and its URL if it needs one."""
    with contextlib.ExitStack() as stack:
        found: dict[str, str | None] = {}
        if kind != "postgres":
            found["sqlite"] = None
        if kind != "sqlite":
            url = stack.enter_context(databases.postgres_server())
            found["postgres"] = stack.enter_context(databases.postgres_database(url, "template1"))
        yield found


def main(
    messages: Annotated[int, typer.Option(min=1, help="How many malformed messages to send, to each.")] = 100_000,
    seed: Annotated[int, typer.Option(help="What the messages are drawn from.")] = 1,
    database: Annotated[Literal["sqlite", "postgres", "both"], typer.Option(help="Databases of the daemon.")] = "both",
    transport: Annotated[transports.Name, typer.Option(help="The transport of all callers.")] = "grpc",
) -> None:
    """Send malformed messages to a daemon, and check that it survives."""
    failed = False
    with stores(database) as found:
        for name, url in found.items():
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(Path(folder), messages, seed, url, transport)
            print("\n".join([f"{name}, {transport}:", *outcome.lines()]))
            failed = failed or bool(outcome.wrong)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
