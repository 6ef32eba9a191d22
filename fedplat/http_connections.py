"""The connections of an HTTP port that anyone may reach: how many, for how long, and which one is closed for another.

uvicorn has no deadline for a request, and answers 503 to all once too many connections are open, idle ones included.
Here each state of a connection has a deadline, from the handshake of TLS on. When there are too many connections, one
that waits for its peer is closed: the oldest one of the greediest network (see `fair_places`), if possible one of a
newcomer, on which the application has not recognised a caller yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from collections.abc import Set as AbstractSet
from typing import Any, cast

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from fedplat import fair_places

_NUMBERS = itertools.count()
KEPT_BYTES = 2**18
"""The bytes of a body that are received before the application takes them."""
TLS_BUFFER_BYTES = 2**17
"""The bytes that are read from a connection with TLS at a time, into a buffer that all connections of a port share."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]*)?", re.IGNORECASE)


def host_name(host: str) -> str:
    """Return the name or address in a header `Host`, in lower case; empty if it has anything else.

    >>> host_name("FED.example.org:8443"), host_name("[::1]:80"), host_name("localhost#@evil.example")
    ('fed.example.org', '::1', '')
    """
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").lower() if match is not None else ""


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a port.

    `total`: open connections. `head_s`: for the handshake of TLS, and for the head of a request. `body_s`: for the rest
    of the request; None if the application limits that. `response_s`: for the response; None for responses that stream,
    where only a peer that does not read for `stall_s` is cut off. `stall_s` is also the time for the rest of a request
    that has been answered.

    `newcomers`: connections of newcomers that wait for their peers for longer than `share_s`, of which
    `newcomers_per_network` may be of one network. `is_known`: whether an address is that of a proxy, whose callers
    share connections, and not of a newcomer.
    """

    total: int
    newcomers: int | None = None
    newcomers_per_network: int | None = None
    share_s: float = 2.0
    is_known: Callable[[str], bool] = lambda address: False
    head_s: float = 10.0
    body_s: float | None = 30.0
    response_s: float | None = None
    stall_s: float = 30.0


class BoundedProtocol(H11Protocol):
    """A connection within `limits`, which accepts TLS itself if there is a context for that: see `make_protocol`."""

    limits: ConnectionLimits
    get_tls: Callable[[], ssl.SSLContext | None]
    newcomers: dict[BoundedProtocol, None]
    tls_buffer: bytearray

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._number = next(_NUMBERS)
        self._since = self.loop.time()
        self._state: object = None
        self._deadline: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = bytearray()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._received: RequestResponseCycle | None = None
        self.app = functools.partial(_with_extensions, self.app, self)  # type: ignore[assignment]

    @property
    def groups(self) -> fair_places.Groups:
        """The networks of the peer."""
        return fair_places.groups_of(self.client[0] if self.client is not None else "")

    @property
    def is_served(self) -> bool:
        """Return whether the peer has sent its request and waits for the response."""
        cycle = self._request
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    @property
    def _request(self) -> RequestResponseCycle | None:
        """The latest request, whose head is complete."""
        return cast("RequestResponseCycle | None", self.cycle)

    @property
    def _is_in_handshake(self) -> bool:
        return cast(object, self.flow) is None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if (tls := self.get_tls()) is None:
            super().connection_made(transport)
        else:
            transport.pause_reading()
            self.transport, self.client = transport, get_remote_addr(transport)
            self.connections.add(self)
            self._handshake = asyncio.ensure_future(self._accept(transport, tls))
        self._follow()
        if self.limits.newcomers is not None and not self.limits.is_known(self.client[0] if self.client else ""):
            self.newcomers[self] = None
        self._make_room()

    def _make_room(self) -> None:
        """Close a connection if there are too many."""
        limits, connections = self.limits, cast("AbstractSet[BoundedProtocol]", self.connections)
        if len(connections) > limits.total:
            waiting = [one for one in self.newcomers if not one.is_served]
            waiting = waiting or sorted((one for one in connections if not one.is_served), key=lambda one: one._number)
            fair_places.find_greediest(waiting).abort()
            return
        latest = self._since - limits.share_s
        waiting = [one for one in self.newcomers if one is not self and one._since <= latest and not one.is_served]
        if limits.newcomers is not None and len(waiting) >= limits.newcomers:
            fair_places.find_greediest(waiting).abort()
        elif limits.newcomers_per_network is not None and len(waiting) >= limits.newcomers_per_network:
            same = [one for one in waiting if one.groups[-1] == self.groups[-1]]
            if len(same) >= limits.newcomers_per_network:
                same[0].abort()

    def recognise(self) -> None:
        """Note that the peer is no newcomer."""
        self.newcomers.pop(self, None)

    async def _accept(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=self.limits.head_s
            )
        except OSError:  # of TLS as well
            secured = None
        if secured is None:
            self.abort()
        else:
            self._share_buffer(secured)
            super().connection_made(secured)
            self._follow(is_new=True)
            if self._early:
                self.data_received(bytes(self._early))

    def _share_buffer(self, secured: asyncio.Transport) -> None:
        """Read into a buffer of all connections: each read is processed before the next one."""
        protocol: Any = getattr(secured, "_ssl_protocol", None)
        if hasattr(protocol, "_ssl_buffer") and hasattr(protocol, "_ssl_buffer_view"):  # attributes without a promise
            protocol._ssl_buffer, protocol._ssl_buffer_view = self.tls_buffer, memoryview(self.tls_buffer)

    def abort(self) -> None:
        """Close the connection without an answer."""
        self.connections.discard(self)  # at once: the next one must find room
        self.newcomers.pop(self, None)
        self.transport.abort()

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_in_handshake:  # the handshake is complete, and its task has not run yet
            self._early += data
            return
        if not self._keep_body(data):
            super().data_received(data)
        self._follow(has_begun=True)

    def _keep_body(self, data: bytes) -> bool:
        """Keep a part of a body for `take_body`, without the copies that h11 and uvicorn make; return False otherwise.

        A part is kept if the body has a length, more of it follows, and the application has all that came before. Until
        it has begun to receive, as before a call is admitted, uvicorn's limit of 64 KiB applies.
        """
        cycle, reader = self._request, cast(Any, self.conn)._reader
        left = getattr(reader, "_remaining", 0)  # an attribute without a promise; only readers of a length have it
        if cycle is None or cycle is not self._received or cycle.response_complete or cycle.body or len(data) >= left:
            return False
        reader._remaining = left - len(data)
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > KEPT_BYTES:
            self.flow.pause_reading()
        cycle.message_event.set()
        return True

    def take_body(self) -> list[bytes]:
        """Return the parts of the body that were kept; they precede what the application receives next."""
        parts, self._body, self._body_bytes, self._received = self._body, [], 0, self._request
        return parts

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow(has_begun=bool(self.conn.trailing_data[0]))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self.newcomers.pop(self, None)
        super().connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        if not self._is_in_handshake:
            super().pause_writing()
        if self.limits.response_s is None:
            self._set_deadline(self.limits.stall_s)

    @override
    def resume_writing(self) -> None:
        if not self._is_in_handshake:
            super().resume_writing()
        if self.limits.response_s is None and self.is_served:
            self._set_deadline(None)

    def _follow(self, *, has_begun: bool = False, is_new: bool = False) -> None:
        """Set the deadline of the state that the connection is in, if it has just come to it."""
        cycle, limits = self._request, self.limits
        if cycle is not None and cycle.more_body and cycle.response_complete:
            name, seconds = "rest", limits.stall_s
        elif cycle is not None and cycle.more_body:
            name, seconds = "body", limits.body_s
        elif cycle is not None and not cycle.response_complete:
            name, seconds = "response", limits.response_s
        elif cycle is None or has_begun:
            name, seconds = "head", limits.head_s
        else:
            name, seconds = "idle", None  # uvicorn has a timer for this
        if is_new or self._state != (name, cycle):
            self._state = (name, cycle)
            self._set_deadline(seconds)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if seconds is not None and not self.transport.is_closing():
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)


async def _with_extensions(app: Callable[..., Awaitable[None]], peer: BoundedProtocol, scope: Any, *more: Any) -> None:
    """Call an application with what it can do with the connection, besides ASGI.

    It can close it, since the peer of a response that fails must see that it is cut; recognise its peer; and take parts
    of a body as they came, before what it receives.
    """
    extensions = {"fedplat.cut": peer.abort, "fedplat.recognise": peer.recognise, "fedplat.take_body": peer.take_body}
    await app({**scope, "extensions": extensions}, *more)


def make_protocol(
    limits: ConnectionLimits, tls: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None
) -> type[BoundedProtocol]:
    """Return the class of the connections of a port, for the option `http` of uvicorn.

    `tls` is the context of all handshakes, or returns that of the next one.
    """
    get_tls = tls if callable(tls) else lambda: tls
    attributes = {
        "limits": limits,
        "get_tls": staticmethod(get_tls),
        "newcomers": {},
        "tls_buffer": bytearray(TLS_BUFFER_BYTES),
    }
    return cast("type[BoundedProtocol]", type("_Connection", (BoundedProtocol,), attributes))


def bind(listen: str, *, shared: bool = False) -> socket.socket:
    """Bind `host:port` without listening on it yet. Raises `OSError`; with `shared` others may bind it, too."""
    host, _, port = listen.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    family, kind, protocol, _, address = found[0]
    # Not `create_server`, whose sockets do not name their protocol: asyncio then delays small packets.
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class BackgroundServer(uvicorn.Server):
    """A server within another program: without signal handlers. It wakes up once a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make the server end."""
        self.should_exit = True
        self._stopping.set()

    @override
    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # 0: update the header with the date
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Generator[None]:
        yield

    async def finish(self, task: asyncio.Task[None], grace_s: float) -> BaseException | None:
        """Stop; cut the responses that are still open after `grace_s`. Return the error of `task`, which serves."""
        self.stop()
        await asyncio.wait([task], timeout=grace_s)
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        return error
