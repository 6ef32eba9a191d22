"""A TCP proxy that behaves like a bad network: it delays, throttles, holds back and cuts, and changes while it runs.

```python
async with proxy.running("127.0.0.1:7443") as network:
    ...  # connect to network.address
    network.set(proxy.Weather(to_server=proxy.Way(cut_after=10_000)))  # this and every later connection
    network.links[0].set(proxy.BLACKHOLE)  # this connection only
    network.cut()  # all connections, now
```

A TCP connection that outlives an outage of the network loses nothing: what was lost is sent again. So a
blackhole here holds bytes (and new connections) back until the weather clears; it does not drop them from the middle
of a stream. `in_thread` is the same proxy for tests without an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeAlias, TypeVar

CHUNK_BYTES = 1 << 16
_QUEUE_CHUNKS = 64
Held = TypeVar("Held")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset

_Chunk: TypeAlias = tuple[float, bytes]
"""The time at which the bytes may leave, and the bytes; no bytes at the end of the stream."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One direction of a connection. `cut_after` counts the bytes of this direction since the connection began."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    cut_after: int | None = None
    held: bool = False


@dataclasses.dataclass(frozen=True)
class Weather:
    """Both directions of a connection."""

    to_server: Way = Way()
    to_client: Way = Way()


CLEAR = Weather()
BLACKHOLE = Weather(Way(held=True), Way(held=True))
ONLY_TO_SERVER = Weather(to_client=Way(held=True))
"""A one-way partition: the server receives from the client, the client receives nothing."""
ONLY_TO_CLIENT = Weather(to_server=Way(held=True))


class Link:
    """One connection through the proxy."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.passed = {"to_server": 0, "to_client": 0}
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    def set(self, weather: Weather) -> None:
        """Changes the weather of this connection, also for bytes that are already held back."""
        self.weather = weather
        self._changed.set()

    def cut(self) -> None:
        """Resets the connection on both sides."""
        self._cut.set()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str) -> None:
        """Carries bytes until both sides have ended, or the connection is cut."""
        carrying = asyncio.create_task(self._carry(reader, writer, target))
        cutting = asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait([carrying, cutting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(carrying, cutting)

    def adopt(self, writer: asyncio.StreamWriter) -> None:
        """Takes over one end of the connection, to be closed with it."""
        writer.transport.set_write_buffer_limits(0)  # drained bytes have left
        self._writers.append(writer)

    def close(self) -> None:
        """Closes both ends."""
        for one in self._writers:
            if self._cut.is_set() and not one.transport.is_closing():
                one.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.transport.abort()
            one.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str) -> None:
        await self._until_open("to_server")
        try:
            server_reader, server_writer = await _connect(target)
        except OSError:
            self.cut()
            return
        self.adopt(server_writer)
        ways = [
            asyncio.create_task(self._one_way("to_server", reader, server_writer)),
            asyncio.create_task(self._one_way("to_client", server_reader, writer)),
        ]
        try:
            await asyncio.gather(*ways)
        except (OSError, EOFError):  # one side is gone, so the other is cut
            self.cut()
        finally:
            await _end(*ways)

    async def _one_way(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[_Chunk] = asyncio.Queue(_QUEUE_CHUNKS)
        reading = asyncio.create_task(self._read(name, reader, queue))
        try:
            while True:
                due, data = await queue.get()
                await _sleep_until(due)
                if not data:
                    break
                await self._send(name, data, writer)
            await self._until_open(name)
            if writer.can_write_eof():
                writer.write_eof()
        finally:
            await _end(reading)

    async def _read(self, name: str, reader: asyncio.StreamReader, queue: asyncio.Queue[_Chunk]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await reader.read(CHUNK_BYTES)
            except OSError:
                self.cut()
                return
            await queue.put((loop.time() + self._way(name).delay_s, data))
            if not data:
                return

    async def _send(self, name: str, data: bytes, writer: asyncio.StreamWriter) -> None:
        rest = memoryview(data)
        while rest:
            await self._until_open(name)
            way, count = self._way(name), len(rest)
            if way.cut_after is not None:
                count = min(count, way.cut_after - self.passed[name])
                if count <= 0:
                    self.cut()
                    await asyncio.Event().wait()  # until the cut cancels this task
            if way.bytes_per_s is not None:
                count = min(count, max(int(way.bytes_per_s / 20), 1))
            writer.write(rest[:count])
            await writer.drain()
            self.passed[name] += count
            rest = rest[count:]
            if way.bytes_per_s is not None:
                await asyncio.sleep(count / way.bytes_per_s)

    def _way(self, name: str) -> Way:
        return self.weather.to_server if name == "to_server" else self.weather.to_client

    async def _until_open(self, name: str) -> None:
        while self._way(name).held:
            self._changed.clear()
            await self._changed.wait()


class Proxy:
    """A listener on loopback, and the connections that came through it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.links: list[Link] = []
        self.num_accepted = 0
        self._weather = CLEAR
        self._tasks: set[asyncio.Task[None]] = set()

    def set(self, weather: Weather) -> None:
        """Changes the weather of all present and future connections."""
        self._weather = weather
        for link in self.links:
            link.set(weather)

    def cut(self) -> None:
        """Resets every open connection."""
        for link in self.links:
            link.cut()

    def retarget(self, target: str) -> None:
        """Sends later connections to another address, such as that of a server that was restarted on another port."""
        self.target = target

    async def open(self) -> asyncio.Server:
        """Starts to listen."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        return server

    async def close(self) -> None:
        """Ends every connection."""
        await _end(*self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(self._weather)
        link.adopt(writer)
        self.links.append(link)
        self.num_accepted += 1
        task = asyncio.create_task(link.run(reader, writer, self.target))
        self._tasks.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            link.close()
            self.links.remove(link)
            self._tasks.discard(task)

        task.add_done_callback(ended)


@contextlib.asynccontextmanager
async def running(target: str) -> AsyncGenerator[Proxy]:
    """A proxy to `host:port`, in this event loop."""
    proxy = Proxy(target)
    server = await proxy.open()
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


class Remote:
    """A proxy in a thread of its own, for callers that have no event loop."""

    def __init__(self, proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        self._proxy = proxy
        self._loop = loop
        self.address = proxy.address

    @property
    def num_accepted(self) -> int:
        """The number of connections so far."""
        return self._proxy.num_accepted

    def set(self, weather: Weather) -> None:
        """Changes the weather of all present and future connections."""
        self._loop.call_soon_threadsafe(self._proxy.set, weather)

    def cut(self) -> None:
        """Resets every open connection."""
        self._loop.call_soon_threadsafe(self._proxy.cut)

    def retarget(self, target: str) -> None:
        """Sends later connections to another address."""
        self._loop.call_soon_threadsafe(self._proxy.retarget, target)


@contextlib.contextmanager
def in_thread(target: str) -> Generator[Remote]:
    """A proxy to `host:port`, in an event loop and a thread of its own."""

    @contextlib.asynccontextmanager
    async def remote() -> AsyncGenerator[Remote]:
        async with running(target) as proxy:
            yield Remote(proxy, asyncio.get_running_loop())

    with held_in_thread(remote()) as made:
        yield made


@contextlib.contextmanager
def held_in_thread(context: contextlib.AbstractAsyncContextManager[Held]) -> Generator[Held]:
    """An asynchronous context, held open in an event loop and a thread of its own."""
    ready: list[Held] = []
    started, ending = threading.Event(), asyncio.Event()

    async def hold() -> None:
        async with context as held:
            ready.append(held)
            started.set()
            await ending.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(hold(),), name="fault proxy")
    thread.start()
    started.wait()
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()


async def _connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if target.startswith("/"):  # a socket in the file system
        return await asyncio.open_unix_connection(target)
    return await asyncio.open_connection(*split(target))


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host, int(port)


async def _sleep_until(moment: float) -> None:
    if (left := moment - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(left)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
