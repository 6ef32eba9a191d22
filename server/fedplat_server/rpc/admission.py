"""Admission of calls by their metadata, before any message is received.

gRPC receives the whole message of a unary method before it calls the handler. The handler of a streaming method reads
messages itself, and until then a call holds no more memory than its first window. So every method accepts a stream here
(see `interceptor.wrap_handler`); on the wire both are the same. Callers without a credential have few concurrent reads,
in total and for each network. When all are taken, the oldest read of the greediest network ends (see `fair_places`), so
that no host can use up the memory or the turns of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any, NamedTuple

from fedplat.fair_places import FairPlaces, Groups, PlaceLimits, PlacesFullError, TooSlowError
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.auth import addresses
from fedplat_server.auth.addresses import Origins
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages.streams import MemoryShare, UploadMemory
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.context import CallContext, ServedCall
from fedplat_server.rpc.operator_access import OperatorAccess

FLEET = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
"""The service for clients; all others need an operator."""
NEWCOMERS = frozenset({"GetChallenge", "Enroll", "OpenSession"})
"""Methods of the Fleet service that are called without a credential."""
LARGE = frozenset({"Report", "Step"})
"""Methods whose first message may be so large that it needs a share of the upload memory."""
READS_PER_CONNECTION = 2
"""First messages that one connection without a credential may send concurrently; a client sends one."""
MAX_WAITING_PER_CONNECTION = 16
"""Calls without a credential that may wait for a turn of their connection; further ones are refused at once."""
MAX_WAITING_PER_NETWORK = 256
"""Calls that may wait for a turn of their network; if there are more, those of the greediest connection are refused."""


def is_public(method: str) -> bool:
    """Return whether a method (`/service/name`) is called without a credential."""
    service, _, name = method.removeprefix("/").partition("/")
    return name in NEWCOMERS if service == FLEET else not service.startswith("fedplat.")


class Caller(NamedTuple):
    """A caller without a credential: the groups of its address, and its connection ("": unknown)."""

    groups: Groups
    connection: str


class Reads:
    """Limits the concurrent reads of first messages, and the concurrent calls of public services.

    gRPC may receive up to `wire.MAX_REQUEST_BYTES` for each read, and does not report how much has arrived. So the
    budget of `newcomer_reads` is one of memory. A message that is complete takes milliseconds; one that is not gives
    its place away after `newcomer_share_s` if another caller waits.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._newcomers = FairPlaces(self._newcomer_limits)
        self._open = FairPlaces(self._open_limits)
        self._identified: Counter[str] = Counter()

    def _newcomer_limits(self) -> PlaceLimits:
        limits = self._limits
        return PlaceLimits(
            limits.newcomer_reads,
            limits.newcomer_reads_per_network,
            MAX_WAITING_PER_NETWORK,
            limits.newcomer_read_s,
            limits.newcomer_read_s,
            limits.newcomer_share_s,
            READS_PER_CONNECTION,
            MAX_WAITING_PER_CONNECTION,
        )

    def _open_limits(self) -> PlaceLimits:
        limits = self._limits
        return PlaceLimits(
            limits.open_calls,
            limits.open_calls_per_network,
            MAX_WAITING_PER_NETWORK,
            limits.newcomer_read_s,
            share_s=0.0,
        )

    @property
    def num_newcomers(self) -> int:
        """The number of first messages of callers without a credential that are being received."""
        return self._newcomers.num_held

    @property
    def num_waiting(self) -> int:
        """The number of calls without a credential that wait for a turn of their connection or network."""
        return self._newcomers.num_waiting

    @contextlib.asynccontextmanager
    async def read_newcomer(self, caller: Caller) -> AsyncGenerator[None]:
        """Wait for the turn of a caller without a credential, and limit the time of its read.

        A connection that holds many calls open only delays itself, and each of its calls waits unread: so it costs the
        window of a stream.
        """
        with _refusing("too many callers without a credential are sending"):
            async with self._newcomers.place(caller.groups, caller.connection):
                yield

    @contextlib.asynccontextmanager
    async def read_identified(self, name: str, method: str) -> AsyncGenerator[None]:
        """Count the read of a caller that named a session, or sent a token or certificate, and limit its time."""
        limits = self._limits
        if self._identified[name] >= limits.max_calls:
            raise RefusedError(Code.TOO_MANY_CALLS, f"at most {limits.max_calls} may be sent at a time")
        timeout_s = max(limits.idle_s, interceptor.max_bytes(method) / limits.min_bytes_per_s)
        with _count(self._identified, name):
            try:
                async with asyncio.timeout(timeout_s):
                    yield
            except TimeoutError as exc:
                raise RefusedError(Code.TOO_SLOW, f"the message was not complete after {timeout_s:g} s") from exc

    @contextlib.asynccontextmanager
    async def open_call(self, caller: Caller) -> AsyncGenerator[None]:
        """Count a call of a public service while it is open: a watch of the health service stays open forever.

        When there are too many, the oldest of the network and connection with the most ends.
        """
        with _refusing("too many calls of this service are open; close some, or poll"):
            async with self._open.place(caller.groups, caller.connection):
                yield


@contextlib.contextmanager
def _refusing(reason: str) -> Generator[None]:
    """Refuse a call that has no place, or is too slow for it."""
    try:
        yield
    except PlacesFullError as exc:
        raise RefusedError(Code.TOO_MANY_REQUESTS, f"{reason} ({exc})") from exc
    except TooSlowError as exc:
        raise RefusedError(Code.TOO_SLOW, f"the message is incomplete: {exc}") from exc


@contextlib.contextmanager
def _count(counter: Counter[str], name: str) -> Generator[None]:
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


class ReadPermit:
    """The permission to send a first message, with the limits to hold while it is received."""

    def __init__(
        self,
        read: contextlib.AbstractAsyncContextManager[None],
        share: MemoryShare | None = None,
        *,
        is_poll: bool = False,
    ) -> None:
        self._read = read
        self._share = share
        self._is_poll = is_poll

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """Receive the first message. Raises `RefusedError` if it is missing or too late."""
        async with self._read:
            message = await anext(requests, None)
        if message is None:
            raise RefusedError(Code.INVALID_REQUEST, "the call ended without a message")
        if self._share is not None:
            # A long poll waits for other clients: if it held a share, they might have to wait for it.
            self._share.shrink(0 if self._is_poll else len(interceptor.INCOMING.get().request))
        return message


@dataclasses.dataclass(eq=False, repr=False)
class Admission:
    """Admits calls of clients and of operators. Raises `RefusedError` for others.

    `read_claim` returns the client that a call claims to be. The message is needed to verify that: it is signed, too.
    `expect_report` lets other reports wait for the one of a client while its block runs.
    """

    operator_access: OperatorAccess
    read_claim: Callable[[str, CallContext], Awaitable[str]]
    origins: Origins
    reads: Reads
    memory: UploadMemory
    expect_report: Callable[[str], contextlib.AbstractContextManager[None]]

    @contextlib.asynccontextmanager
    async def admit(self, method: str, context: ServedCall) -> AsyncGenerator[ReadPermit]:
        """Admit a call; hold its share of the upload memory until it ends."""
        client_id = ""
        service, _, name = method.removeprefix("/").partition("/")
        if service != FLEET:
            operator = await self.operator_access.admit(method, context)
            read = self.reads.read_identified(f"operator {operator}", method)
        elif name in NEWCOMERS:
            caller = _find_caller(self.origins, context)
            await _signal_gateway(context)
            yield ReadPermit(self.reads.read_newcomer(caller))
            return
        else:
            client_id = await self.read_claim(method, context)
            read = self.reads.read_identified(client_id, method)
        if name not in LARGE:
            await _signal_gateway(context)
            yield ReadPermit(read)
            return
        async with self.memory.reports.share(interceptor.max_bytes(method)) as share:
            await _signal_gateway(context)
            # Not before it has its share: other reports might hold that until they are stored.
            with self.expect_report(client_id) if name == "Report" else contextlib.nullcontext():
                yield ReadPermit(read, share, is_poll=name == "Step")


class OpenAdmission:
    """Admits calls of the public services: health and reflection. Raises `RefusedError` beyond their limits."""

    def __init__(self, reads: Reads, origins: Origins) -> None:
        self._reads = reads
        self._origins = origins

    @contextlib.asynccontextmanager
    async def admit(self, method: str, context: ServedCall) -> AsyncGenerator[ReadPermit]:
        """Admit a call, and count it while it is open."""
        caller = _find_caller(self._origins, context)
        async with self._reads.open_call(caller):
            yield ReadPermit(self._reads.read_newcomer(caller))


def _find_caller(origins: Origins, context: CallContext) -> Caller:
    return Caller(origins.of(context).groups, origins.connection(context))


async def _signal_gateway(context: ServedCall) -> None:
    """Signal a gateway that the call is admitted: it cannot check sessions or tokens, and reads no message before."""
    if addresses.is_forwarded(interceptor.INCOMING.get().metadata.items()):
        await context.send_initial_metadata(())
