"""Other users of the host, and of the network, learn nothing of what rank 0 tells the other ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import psutil
import pytest

from fedplat.pytorch.distributed import Ranks
from fedplat_server.aggregation.backend import PoolAggregation
from fedplat_server.workers import broadcast
from fedplat_server.workers.broadcast import Broadcast, LostRankError, TaskEvent
from fedplat_server.workers.protocol import TaskRefusal
from support import strangers
from support.pool import PoolProcess, pool
from support.pool_jobs import BY_COLUMNS, JOBS, Spool

NUM_VERSIONS = 20


def _within_reach(running: PoolProcess) -> tuple[list[int], list[str]]:
    """Ports that the pool's processes listen at, and the files and sockets that they have open or lie in folders."""
    processes = [psutil.Process(running.process.pid), *running.ranks().values()]
    ports = {each.laddr.port for one in processes for each in one.net_connections("tcp") if each.status == "LISTEN"}
    sockets = {str(each.laddr) for one in processes for each in one.net_connections("unix")}
    paths = {path for path in sockets if path.startswith("/")}
    paths |= {each.path for one in processes for each in one.open_files()}
    folders = {running.folder, *(Path(path).parent for path in paths if "fedplat-pool-" in path)}
    paths |= {str(path) for folder in folders for path in folder.rglob("*") if not path.is_dir()}
    return sorted(ports), sorted(paths - {str(running.log)})  # which the test has made


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A data folder that is itself open to all, so that it is not what keeps a stranger away."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
async def test_another_user_of_the_host_gets_no_noise_and_changes_nothing(open_folder: Path, tmp_path: Path) -> None:
    spool = Spool(tmp_path, JOBS["private"] + BY_COLUMNS)
    keys: list[bytes] = []
    here, there = multiprocessing.Pipe()
    with pool(open_folder) as running:
        link = await running.ready()
        ranks = {number: process.pid for number, process in running.ranks().items()}
        ports, paths = _within_reach(running)
        assert any(path.endswith("pool.key") for path in paths)
        stranger = multiprocessing.get_context("spawn").Process(target=strangers.pry, args=(ports, paths, there))
        stranger.start()
        assert here.recv() == "ready"
        for _ in range(NUM_VERSIONS):
            inputs = spool.inputs()
            keys.append(inputs.noise_key)
            folding = PoolAggregation(inputs, spool.blobs, link)
            await folding.begin()
            spool.accept(await spool.done(folding))
        here.send("enough")
        num_stores, found, touched = here.recv()
        stranger.join()
        assert {number: process.pid for number, process in running.ranks().items()} == ranks, "they did not restart"
    assert sum(key in found for key in keys) == 0
    assert num_stores == 0
    assert touched == []


class _FakeRanks:
    """Two ranks in threads; the contents of rank 0 pass through `between`."""

    size = 2

    def __init__(self, rank: int, words: SimpleQueue[bytes], between: Callable[[bytes], bytes]) -> None:
        self.rank = rank
        self.is_first = rank == 0
        self._words = words
        self._between = between

    def broadcast(self, content: bytes = b"") -> bytes:
        if self.is_first:
            self._words.put(self._between(content))
        return self._words.get() if not self.is_first else content


class _Wire:
    """A network that keeps what it carries."""

    def __init__(self) -> None:
        self.carried = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]

    def tapped(self, meeting: bytes) -> bytes:
        """What rank 0 says of its port, with the port of this wire instead."""
        said = msgspec.msgpack.decode(meeting)
        threading.Thread(target=self._carry, args=(said["port"],), daemon=True).start()
        return msgspec.msgpack.encode({**said, "port": self._listener.getsockname()[1]})

    def _carry(self, port: int) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        self._sockets += [near, far]
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either side may close first
            while content := source.recv(65536):
                self.carried += content
                target.sendall(content)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def opened() -> Iterator[list[Broadcast]]:
    """Connections of a test; their connections end with it, where a rank's end with its process."""
    made: list[Broadcast] = []
    yield made
    for events in made:
        for connection in events._connections:  # pyright: ignore[reportPrivateUsage]
            connection.close()


def _both(
    opened: list[Broadcast], key: bytes, folder: Path | None, between: Callable[[bytes], bytes] = bytes
) -> tuple[Broadcast, Broadcast]:
    words: SimpleQueue[bytes] = SimpleQueue()

    def make(rank: int) -> Broadcast:
        return Broadcast(cast(Ranks, cast(Any, _FakeRanks(rank, words, between))), key, folder)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(make, 0), threads.submit(make, 1)
        opened += [first.result(), second.result()]
    return opened[0], opened[1]


@pytest.mark.parametrize("hosts", ["one", "several"])
def test_events_arrive_in_order_and_the_words_of_a_rank_that_fails(
    hosts: str, opened: list[Broadcast], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    key = secrets.token_bytes(32)
    first, second = _both(opened, key, tmp_path if hosts == "one" else None)
    sent = [TaskEvent(number, "message", bytes(number)) for number in range(100)]
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(lambda: [second.receive() for _ in sent])
        for event in sent:
            first.publish(event)
        assert received.result() == sent
    second.report_failure(TaskRefusal("no room", out_of_memory=True))
    assert first.wait_for_failure() == TaskRefusal("no room", out_of_memory=True)
    if hosts == "one":
        assert (tmp_path / "events.sock").stat().st_mode & 0o777 == 0o600


def test_what_travels_between_hosts_does_not_hold_the_noise(
    opened: list[Broadcast], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    key, noise, wire = secrets.token_bytes(32), secrets.token_bytes(32), _Wire()
    first, second = _both(opened, key, None, wire.tapped)
    event = TaskEvent(1, "start", b"a recipe with noise " + noise, "aggregate")
    first.publish(event)
    first.publish(event)
    assert [second.receive(), second.receive()] == [event, event]
    assert len(wire.carried) > 2 * len(event.content)
    for clear in (noise, key, b"recipe", b"aggregate"):
        assert clear not in wire.carried
    half = len(wire.carried) // 2
    assert wire.carried[-half:] != wire.carried[-2 * half : -half], "the same twice is not the same on the wire"
    wire.close()


def test_a_forged_event_is_refused_and_a_lost_rank_is_named(opened: list[Broadcast], tmp_path: Path) -> None:
    key = secrets.token_bytes(32)
    first, second = _both(opened, key, tmp_path)
    first._connections[0].send_bytes(bytes(16))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(PermissionError, match="message 0 of rank 0 does not belong to this pool"):
        second.receive()
    first._connections[0].close()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(LostRankError, match="rank 0 is gone"):
        second.receive()


def test_half_a_message_of_a_stranger_does_not_keep_ranks_waiting(
    opened: list[Broadcast], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_STALLED_S", 1)
    key = secrets.token_bytes(32)
    with socket.socket(socket.AF_UNIX) as stranger:

        def connect(content: bytes) -> bytes:
            stranger.connect(str(tmp_path / "events.sock"))
            stranger.sendall(b"\0\0")
            return content

        first, second = _both(opened, key, tmp_path, between=connect)
        first.publish(TaskEvent(1, "end"))
        assert second.receive() == TaskEvent(1, "end")
