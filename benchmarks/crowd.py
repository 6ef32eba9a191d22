"""Many clients in one process: each signs its calls as the SDK does, and they share connections.

A client of the SDK is a process; ten thousand of them fit on no benchmark's machine. These say the same to the server.
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

from fedplat import auth, wire
from fedplat.auth import Ticket
from fedplat.wire.v1 import fleet_pb2

FLEET = "/fedplat.wire.v1.Fleet/"
TRAINER = "noop"
VERSION = "bench"
AT_ONCE = 256
"""So many calls of newcomers are under way at a time: this process shall not be what is measured."""
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
    """Channels that share their connection with nobody; `ca` (PEM) is empty without TLS."""
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
        """A signed call; in a new session if the server has forgotten this one."""
        for _ in range(2):
            try:
                return await _start(self.channel, method, request, self.signed(method, request))
            except aio.AioRpcError as exc:
                if code_of(exc) != "SESSION_UNKNOWN":
                    raise
            await self.open_session()
        raise RuntimeError("the server forgets each session at once")

    async def enroll(self, ticket: Ticket) -> None:
        """Becomes a client of the server."""
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
        """Opens a session."""
        request = fleet_pb2.OpenSessionRequest(client_id=self.client_id, protocol_version=wire.PROTOCOL_VERSION)
        answer = await self._prove("OpenSession", request)
        self.session_id, self.counter = fleet_pb2.OpenSessionResponse.FromString(answer).session_id, 0

    async def check_in(self, wait_s: float) -> fleet_pb2.CheckInResponse:
        """Waits for work."""
        request = fleet_pb2.CheckInRequest(
            protocol_version=wire.PROTOCOL_VERSION, trainers=[TRAINER], wait_s=wait_s, software_version=VERSION
        )
        return fleet_pb2.CheckInResponse.FromString(await self.call("CheckIn", request.SerializeToString()))

    async def report(self, token: str, update: bytes) -> fleet_pb2.ReportResponse:
        """Reports an update that travels in the message."""
        request = fleet_pb2.ReportRequest(
            token=token, digest=hashlib.sha256(update).hexdigest(), num_examples=1.0, update=update
        )
        return fleet_pb2.ReportResponse.FromString(await self.call("Report", request.SerializeToString()))

    async def _prove(self, method: str, request: Message) -> bytes:
        data = request.SerializeToString()
        asked = await _start(self.channel, "GetChallenge", CHALLENGE, ())
        nonce = fleet_pb2.GetChallengeResponse.FromString(asked).nonce
        signature = self.key.sign(auth.proof_payload(FLEET + method, nonce, data))
        metadata = ((auth.METADATA_NONCE, nonce), (auth.METADATA_SIGNATURE, signature))
        return await _start(self.channel, method, data, metadata)

    def signed(self, method: str, request: bytes) -> Metadata:
        """The metadata of the next call in the session."""
        self.counter += 1
        payload = auth.call_payload(FLEET + method, self.session_id, self.counter, request)
        return (
            (auth.METADATA_SESSION, self.session_id),
            (auth.METADATA_COUNTER, str(self.counter)),
            (auth.METADATA_SIGNATURE, self.key.sign(payload)),
        )


async def _start(channel: aio.Channel, method: str, request: bytes, metadata: Metadata) -> bytes:
    call: Any = channel.unary_unary(FLEET + method)
    return await call(request, metadata=metadata, timeout=600.0)


def code_of(exc: aio.AioRpcError) -> str:
    """The server's own code for a refusal; empty if the server did not make it."""
    return str(dict(exc.trailing_metadata() or ()).get(auth.METADATA_CODE, ""))


def members(channels: Sequence[aio.Channel], count: int) -> list[Member]:
    """Newcomers, spread over the connections."""
    return [Member(Ed25519PrivateKey.generate(), channels[number % len(channels)]) for number in range(count)]


async def each(who: Sequence[Member], what: Callable[[Member], Awaitable[_T]]) -> list[_T]:
    """Does something with each member, `AT_ONCE` at a time."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(member: Member) -> _T:
        async with turns:
            return await what(member)

    return await asyncio.gather(*(one(member) for member in who))


async def wait_through_outages(member: Member, wait_s: float) -> fleet_pb2.CheckInResponse:
    """Checks in as the SDK does: with jittered back-off, and not before the server wants to be asked again."""
    backoff_s = 0.5
    while True:
        try:
            return await member.check_in(wait_s)
        except aio.AioRpcError as exc:
            earliest_s, latest_s = _window(exc)
        await asyncio.sleep(max(random.uniform(0.0, backoff_s), random.uniform(earliest_s, latest_s)))
        backoff_s = min(2 * backoff_s, 30.0)


async def until_taken(start: Callable[[], Awaitable[_T]]) -> _T:
    """The answer of a call; one that is refused because the server takes too many at once is made again, when asked."""
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
