"""Admission of calls by their metadata, before any message is received.

gRPC receives the whole message of a unary method before it calls the handler. The handler of a streaming method reads
messages itself, and until then a call holds no more memory than its first window. So every method accepts a stream here
(see `handlers`); on the wire both are the same. Callers without a credential have few concurrent reads, in total and
for each network, so that one host cannot use up the memory or the turns of all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any

from fedplat.wire.v1 import fleet_pb2
from fedplat_server.auth import forwarding
from fedplat_server.auth.addresses import Origins
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.memory import MemoryShare, UploadMemory
from fedplat_server.rpc.operator_access import OperatorAccess

FLEET = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
"""The service for clients; all others need an operator."""
NEWCOMERS = frozenset({"GetChallenge", "Enroll", "OpenSession"})
"""Methods of the Fleet service that are called without a credential."""
LARGE = frozenset({"Report", "SecureStep"})
"""Methods whose first message may be so large that it needs a share of the upload memory."""
READS_PER_CONNECTION = 2
"""First messages that one connection without a credential may send concurrently; a client sends one."""
MAX_WAITING_PER_CONNECTION = 16
"""Calls without a credential that may wait for a turn of their connection; further ones are refused at once."""
MAX_WAITING_PER_NETWORK = 256
"""Calls that may wait for a turn of their network: at most two of each connection."""

Context = Any  # aio.ServicerContext, generic for the type checker only


class _Queue:
    def __init__(self, num_turns: int) -> None:
        self.turns = asyncio.Semaphore(num_turns)
        self.num_calls = 0


class _Queues:
    """A queue for each key: `num_turns` calls run concurrently, and `max_waiting` wait `timeout_s` for a turn."""

    def __init__(self, num_turns: int, max_waiting: int, timeout_s: float) -> None:
        self._num_turns = num_turns
        self._max_calls = num_turns + max_waiting
        self._timeout_s = timeout_s
        self._queues: dict[str, _Queue] = {}

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a turn."""
        return sum(max(queue.num_calls - self._num_turns, 0) for queue in self._queues.values())

    @contextlib.asynccontextmanager
    async def turn(self, key: str, owner: str) -> AsyncGenerator[None]:
        """Wait for a turn, in order of arrival, and hold it. Raises `RefusedError` if too many wait, or on timeout."""
        queue = self._queues.setdefault(key, _Queue(self._num_turns))
        if queue.num_calls >= self._max_calls:
            raise RefusedError(Code.TOO_MANY_REQUESTS, f"too many calls of this {owner} wait to send")
        queue.num_calls += 1
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await queue.turns.acquire()
            except TimeoutError as exc:
                raise RefusedError(Code.TOO_MANY_REQUESTS, f"too many calls of this {owner} are sending") from exc
            try:
                yield
            finally:
                queue.turns.release()
        finally:
            queue.num_calls -= 1
            if not queue.num_calls:
                del self._queues[key]


class Reads:
    """Limits the concurrent reads of first messages, and the concurrent calls of public services."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        timeout_s = limits.newcomer_read_s
        self._connections = _Queues(READS_PER_CONNECTION, MAX_WAITING_PER_CONNECTION, timeout_s)
        self._networks = _Queues(limits.newcomer_reads_per_network, MAX_WAITING_PER_NETWORK, timeout_s)
        self._num_newcomers = 0
        self._identified: Counter[str] = Counter()
        self._open: Counter[str] = Counter()

    @property
    def num_newcomers(self) -> int:
        """The number of first messages of callers without a credential that are being received."""
        return self._num_newcomers

    @property
    def num_waiting(self) -> int:
        """The number of calls without a credential that wait for a turn of their connection or network."""
        return self._connections.num_waiting + self._networks.num_waiting

    @contextlib.asynccontextmanager
    async def wait_for_turn(self, connection: str, network: str) -> AsyncGenerator[None]:
        """Wait for the turn of a call without a credential: in its connection ("": unknown), then in its network.

        A connection that holds many calls open only delays itself, and each of its calls waits unread: so it costs the
        window of a stream, and is refused no more often than once in `newcomer_read_s`.
        """
        own = self._connections.turn(connection, "connection") if connection else contextlib.nullcontext()
        async with own, self._networks.turn(network, "network"):
            yield

    @contextlib.contextmanager
    def count_newcomer(self) -> Generator[float]:
        """Count the read of a caller without a credential; yield its timeout in seconds."""
        if self._num_newcomers >= self._limits.newcomer_reads:
            raise RefusedError(Code.TOO_MANY_REQUESTS, "too many callers without a credential are sending")
        self._num_newcomers += 1
        try:
            yield self._limits.newcomer_read_s
        finally:
            self._num_newcomers -= 1

    @contextlib.contextmanager
    def count_identified(self, name: str, method: str) -> Generator[float]:
        """Count the read of a caller that named a session, or sent a token or certificate; yield its timeout in s."""
        limits = self._limits
        if self._identified[name] >= limits.max_calls:
            raise RefusedError(Code.TOO_MANY_CALLS, f"at most {limits.max_calls} may be sent at a time")
        with _count(self._identified, name):
            yield max(limits.idle_s, interceptor.max_bytes(method) / limits.min_bytes_per_s)

    @contextlib.contextmanager
    def open_call(self, network: str) -> Generator[None]:
        """Count a call of a public service while it is open: a watch of the health service stays open forever."""
        limits = self._limits
        if self._open[network] >= limits.open_calls_per_network or self._open.total() >= limits.open_calls:
            raise RefusedError(Code.TOO_MANY_REQUESTS, "too many calls of this service are open; close some, or poll")
        with _count(self._open, network):
            yield


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
        read: contextlib.AbstractContextManager[float],
        share: MemoryShare | None = None,
        queue: contextlib.AbstractAsyncContextManager[None] | None = None,
        *,
        is_poll: bool = False,
    ) -> None:
        self._read = read
        self._share = share
        self._queue = queue
        self._is_poll = is_poll

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """Receive the first message. Raises `RefusedError` if it is missing or too late."""
        if self._queue is None:
            return await self._receive(requests)
        async with self._queue:
            return await self._receive(requests)

    async def _receive(self, requests: AsyncIterator[Any]) -> Any:
        with self._read as timeout_s:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await anext(requests, None)
            except TimeoutError as exc:
                raise RefusedError(Code.TOO_SLOW, f"the message was not complete after {timeout_s:g} s") from exc
        if message is None:
            raise RefusedError(Code.INVALID_REQUEST, "the call ended without a message")
        if self._share is not None:
            # A long poll waits for other clients: if it held a share, they might have to wait for it.
            self._share.shrink(0 if self._is_poll else len(interceptor.INCOMING.get().request))
        return message


class Admission:
    """Admits calls of clients and of operators. Raises `RefusedError` for others.

    `read_claim` returns the client that a call claims to be. The message is needed to verify that: it is signed, too.
    """

    def __init__(
        self,
        operator_access: OperatorAccess,
        read_claim: Callable[[str, Context], Awaitable[str]],
        origins: Origins,
        reads: Reads,
        memory: UploadMemory,
    ) -> None:
        self._operator_access = operator_access
        self._read_claim = read_claim
        self._origins = origins
        self._reads = reads
        self._memory = memory

    @contextlib.asynccontextmanager
    async def admit(self, method: str, context: Context) -> AsyncGenerator[ReadPermit]:
        """Admit a call; hold its share of the upload memory until it ends."""
        service, _, name = method.removeprefix("/").partition("/")
        if service != FLEET:
            operator = await self._operator_access.admit(method, context)
            read = self._reads.count_identified(f"operator {operator}", method)
        elif name in NEWCOMERS:
            connection, network = self._origins.connection(context), self._origins.of(context).network
            await _signal_gateway(context)
            yield ReadPermit(self._reads.count_newcomer(), queue=self._reads.wait_for_turn(connection, network))
            return
        else:
            read = self._reads.count_identified(await self._read_claim(method, context), method)
        if name not in LARGE:
            await _signal_gateway(context)
            yield ReadPermit(read)
            return
        async with self._memory.reports.share(interceptor.max_bytes(method)) as share:
            await _signal_gateway(context)
            yield ReadPermit(read, share, is_poll=name == "SecureStep")


class OpenAdmission:
    """Admits calls of the public services: health and reflection. Raises `RefusedError` beyond their limits."""

    def __init__(self, reads: Reads, origins: Origins) -> None:
        self._reads = reads
        self._origins = origins

    @contextlib.asynccontextmanager
    async def admit(self, method: str, context: Context) -> AsyncGenerator[ReadPermit]:
        """Admit a call, and count it while it is open."""
        network = self._origins.of(context).network
        with self._reads.open_call(network):
            yield ReadPermit(self._reads.count_newcomer(), queue=self._reads.wait_for_turn("", network))


async def _signal_gateway(context: Context) -> None:
    """Signal a gateway that the call is admitted: it cannot check sessions or tokens, and reads no message before."""
    if forwarding.is_marked(interceptor.INCOMING.get().metadata.items()):
        await context.send_initial_metadata(())
