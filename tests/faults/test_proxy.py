"""The proxy itself, between a client and an echo server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from faults import proxy
from support.ports import free_port

CONTENT = bytes(range(256)) * 4000  # about 1 MB


class Echo:
    """A server that sends back what it receives, and records it."""

    def __init__(self) -> None:
        self.address = ""
        self.heard: list[bytearray] = []
        self.lost = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        try:
            while data := await reader.read(1 << 16):
                heard += data
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            self.lost.set()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def echoing() -> AsyncGenerator[tuple[Echo, proxy.Proxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with server:
        echo.address = "{}:{}".format(*server.sockets[0].getsockname())
        async with proxy.running(echo.address) as network:
            yield echo, network


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*proxy.split(address))


async def exchange(address: str, content: bytes) -> bytes:
    reader, writer = await dial(address)

    async def send() -> None:
        writer.write(content)
        await writer.drain()
        with contextlib.suppress(OSError):  # the connection was cut meanwhile, which the reader sees
            writer.write_eof()

    try:
        _, answer = await asyncio.gather(send(), reader.read(-1))
        return answer
    finally:
        writer.close()


@pytest.mark.parametrize(
    "weather",
    [
        proxy.CLEAR,
        proxy.Weather(proxy.Way(delay_s=0.02), proxy.Way(delay_s=0.01)),
        proxy.Weather(proxy.Way(bytes_per_s=20e6)),
        proxy.Weather(to_client=proxy.Way(bytes_per_s=20e6)),
    ],
)
async def test_bytes_arrive_unchanged(weather: proxy.Weather) -> None:
    async with echoing() as (_, network):
        network.set(weather)
        assert await exchange(network.address, CONTENT) == CONTENT


async def test_delay_and_throttle_take_their_time() -> None:
    clock = asyncio.get_running_loop().time
    async with echoing() as (_, network):
        network.set(proxy.Weather(proxy.Way(delay_s=0.05), proxy.Way(delay_s=0.05)))
        start = clock()
        await exchange(network.address, b"ping")
        assert clock() - start >= 0.1
        network.set(proxy.Weather(proxy.Way(bytes_per_s=10_000)))
        start = clock()
        await exchange(network.address, bytes(1000))
        assert clock() - start >= 0.09


@pytest.mark.parametrize("count", [0, 1, 70_000])
async def test_a_connection_is_cut_after_exactly_so_many_bytes(count: int) -> None:
    async with echoing() as (echo, network):
        network.set(proxy.Weather(proxy.Way(cut_after=count)))
        with pytest.raises(ConnectionError):
            await exchange(network.address, CONTENT)
        await echo.lost.wait()
        assert bytes(echo.heard[0]) == CONTENT[:count]
        network.set(proxy.CLEAR)
        assert await exchange(network.address, CONTENT) == CONTENT


async def test_answers_are_cut_too() -> None:
    async with echoing() as (_, network):
        network.set(proxy.Weather(to_client=proxy.Way(cut_after=3)))
        reader, writer = await dial(network.address)
        writer.write(b"abcdef")
        assert await reader.readexactly(3) == b"abc"
        with pytest.raises(ConnectionError):
            await reader.read()
        writer.close()


async def test_a_blackhole_holds_bytes_back_and_loses_none() -> None:
    async with echoing() as (echo, network):
        reader, writer = await dial(network.address)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        network.set(proxy.BLACKHOLE)
        writer.write(b"two")
        reading = asyncio.create_task(reader.readexactly(3))
        other_reader, other = await dial(network.address)  # a new connection is held back, too
        other.write(b"new")
        done, _ = await asyncio.wait([reading], timeout=0.05)
        assert not done
        assert len(echo.heard) == 1
        assert echo.heard == [b"one"]
        network.set(proxy.CLEAR)
        assert await reading == b"two"
        assert await other_reader.readexactly(3) == b"new"
        writer.close()
        other.close()


async def test_a_one_way_partition_lets_the_server_receive() -> None:
    async with echoing() as (echo, network):
        reader, writer = await dial(network.address)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        network.links[0].set(proxy.ONLY_TO_SERVER)
        writer.write(b"two")
        reading = asyncio.create_task(reader.readexactly(3))
        while echo.heard != [b"onetwo"]:
            await asyncio.sleep(0)
        done, _ = await asyncio.wait([reading], timeout=0.05)
        assert not done
        network.links[0].set(proxy.CLEAR)
        assert await reading == b"two"
        writer.close()


async def test_one_connection_is_cut_and_another_lives() -> None:
    async with echoing() as (_, network):
        first, second = await dial(network.address), await dial(network.address)
        for reader, writer in (first, second):
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        network.links[0].cut()
        with pytest.raises(ConnectionError):
            await first[0].read()
        second[1].write(b"y")
        assert await second[0].readexactly(1) == b"y"
        network.cut()
        with pytest.raises(ConnectionError):
            await second[0].read()
        for _, writer in (first, second):
            writer.close()
    assert network.links == []


async def test_a_server_that_is_not_there_and_one_that_is_elsewhere() -> None:
    async with echoing() as (echo, network):
        network.retarget(f"127.0.0.1:{free_port()}")
        with pytest.raises(ConnectionError):
            await exchange(network.address, CONTENT)
        network.retarget(echo.address)
        assert await exchange(network.address, b"back") == b"back"


async def test_the_same_in_a_thread() -> None:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with server:
        with proxy.in_thread("{}:{}".format(*server.sockets[0].getsockname())) as network:
            assert await exchange(network.address, CONTENT) == CONTENT
            network.set(proxy.Weather(proxy.Way(cut_after=2)))
            with pytest.raises(ConnectionError):
                await exchange(network.address, CONTENT)
            assert network.num_accepted == 2
