"""Many clients in one process. Each signs its calls as the SDK does, and they share connections.

A client of the SDK is a process, and no benchmark machine can run ten thousand of them. To the server these look the
same.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from grpc import aio

from fedplat import wire
from fedplat.wire import auth
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import fleet_pb2

FLEET = "/fedplat.wire.v1.Fleet/"
TRAINER = "noop"
VERSION = "bench"
AT_ONCE = 256
"""The number of concurrent calls of new clients. It is limited so that this process is not the bottleneck."""
CHALLENGE = fleet_pb2.GetChallengeRequest(protocol_version=wire.PROTOCOL_VERSION).SerializeToString()
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
Metadata = tuple[tuple[str, str | bytes], ...]
_T = TypeVar("_T")


@contextlib.asynccontextmanager
async def connections(address: str, ca: str, count: int) -> AsyncGenerator[list[aio.Channel]]:
    """Open `count` channels with separate connections. `ca` is the certificate authority in PEM, or "" without TLS."""
    async with contextlib.AsyncExitStack() as stack:
        made: list[aio.Channel] = []
        for _ in range(count):
            if ca:
                credentials = grpc.ssl_channel_credentials(ca.encode())
                channel = aio.secure_channel(address, credentials, options=_OPTIONS)
            else:
                channel = aio.insecure_channel(address, options=_OPTIONS)
            made.append(await stack.enter_async_context(channel))
        yield made


@dataclasses.dataclass
class Member:
    """A client."""

    key: Ed25519PrivateKey
    channel: aio.Channel
    client_id: str = ""
    session_id: str = ""
    counter: int = 0

    async def call(self, method: str, request: bytes) -> bytes:
        """Make a signed call, in a new session if the server does not have this one any more."""
        for _ in range(2):
            try:
                return await _start(self.channel, method, request, self.signed(method, request))
            except aio.AioRpcError as exc:
                if code_of(exc) != "SESSION_UNKNOWN":
                    raise
            await self.open_session()
        raise RuntimeError("the server forgets each session at once")

    async def enroll(self, ticket: Ticket) -> None:
        """Enroll as a client of the server."""
        public_key = self.key.public_key().public_bytes_raw()
        request = fleet_pb2.EnrollRequest(
            protocol_version=wire.PROTOCOL_VERSION,
            population=ticket.population,
            token=ticket.secret,
            public_key=public_key,
            idempotency_key=public_key.hex(),
            software_version=VERSION,
        )
        self.client_id = fleet_pb2.EnrollResponse.FromString(await self._prove("Enroll", request)).client_id

    async def open_session(self) -> None:
        """Open a session."""
        request = fleet_pb2.OpenSessionRequest(client_id=self.client_id, protocol_version=wire.PROTOCOL_VERSION)
        answer = await self._prove("OpenSession", request)
        self.session_id, self.counter = fleet_pb2.OpenSessionResponse.FromString(answer).session_id, 0

    async def check_in(self, wait_s: float) -> fleet_pb2.CheckInResponse:
        """Check in, and wait up to `wait_s` seconds for an assignment."""
        request = _check_in(wait_s)
        return fleet_pb2.CheckInResponse.FromString(await self.call("CheckIn", request.SerializeToString()))

    async def report(self, token: str, update: bytes, wait_s: float | None = None) -> fleet_pb2.ReportResponse:
        """Report an update that is part of the message, with the next check-in if there is a `wait_s` for it."""
        request = fleet_pb2.ReportRequest(
            token=token, digest=hashlib.sha256(update).hexdigest(), num_examples=1.0, update=update
        )
        if wait_s is not None:
            request.check_in.CopyFrom(_check_in(wait_s))
        return fleet_pb2.ReportResponse.FromString(await self.call("Report", request.SerializeToString()))

    async def _prove(self, method: str, request: Message) -> bytes:
        data = request.SerializeToString()
        asked = await _start(self.channel, "GetChallenge", CHALLENGE, ())
        nonce = fleet_pb2.GetChallengeResponse.FromString(asked).nonce
        signature = self.key.sign(auth.proof_payload(FLEET + method, nonce, data))
        metadata = ((auth.METADATA_NONCE, nonce), (auth.METADATA_SIGNATURE, signature))
        return await _start(self.channel, method, data, metadata)

    def signed(self, method: str, request: bytes) -> Metadata:
        """Return the metadata of the next call in the session."""
        self.counter += 1
        payload = auth.call_payload(FLEET + method, self.session_id, self.counter, request)
        return (
            (auth.METADATA_SESSION, self.session_id),
            (auth.METADATA_COUNTER, str(self.counter)),
            (auth.METADATA_SIGNATURE, self.key.sign(payload)),
        )


def _check_in(wait_s: float) -> fleet_pb2.CheckInRequest:
    return fleet_pb2.CheckInRequest(
        protocol_version=wire.PROTOCOL_VERSION, trainers=[TRAINER], wait_s=wait_s, software_version=VERSION
    )


async def _start(channel: aio.Channel, method: str, request: bytes, metadata: Metadata) -> bytes:
    call: Any = channel.unary_unary(FLEET + method)
    return await call(request, metadata=metadata, timeout=600.0)


def code_of(exc: aio.AioRpcError) -> str:
    """Return the server's own code of a refusal, or "" if the refusal is not the server's."""
    return str(dict(exc.trailing_metadata() or ()).get(auth.METADATA_CODE, ""))


def members(channels: Sequence[aio.Channel], count: int) -> list[Member]:
    """Create new clients, spread over the connections."""
    return [Member(Ed25519PrivateKey.generate(), channels[number % len(channels)]) for number in range(count)]


async def each(who: Sequence[Member], what: Callable[[Member], Awaitable[_T]]) -> list[_T]:
    """Run an operation for each member, `AT_ONCE` at a time."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(member: Member) -> _T:
        async with turns:
            return await what(member)

    return await asyncio.gather(*(one(member) for member in who))


async def wait_through_outages(member: Member, wait_s: float) -> fleet_pb2.CheckInResponse:
    """Check in as the SDK does: with jittered back-off, and not before the server's retry window."""
    backoff_s = 0.5
    while True:
        try:
            return await member.check_in(wait_s)
        except aio.AioRpcError as exc:
            earliest_s, latest_s = _window(exc)
        await asyncio.sleep(max(random.uniform(0.0, backoff_s), random.uniform(earliest_s, latest_s)))
        backoff_s = min(2 * backoff_s, 30.0)


async def until_taken(start: Callable[[], Awaitable[_T]]) -> _T:
    """Return the answer of a call. Repeats a call that the server refuses for its load, in the retry window."""
    while True:
        try:
            return await start()
        except aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            window = _window(exc)
        await asyncio.sleep(random.uniform(*window))


def _window(exc: aio.AioRpcError) -> tuple[float, float]:
    for name, value in exc.trailing_metadata() or ():
        if name == wire.METADATA_RETRY:
            earliest, latest = map(float, str(value).split())
            return earliest, latest
    return 0.0, 0.0
