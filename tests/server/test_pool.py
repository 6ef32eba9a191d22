"""The pool's process: tasks, ranks that die, tasks that are cancelled, and how it is started and stopped."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import psutil
import pytest
import torch

from fedplat_server.cli import workers
from fedplat_server.errors import ConfigError, PoolBrokenError, PoolUnavailableError, PoolWorkError
from fedplat_server.workers import client, protocol
from fedplat_server.workers.broadcast import TaskEvent
from fedplat_server.workers.client import WorkerPool
from fedplat_server.workers.scheduler import Pause, ThreadCoroutine, TurnScheduler
from fedplat_server.workers.tasks import Echo
from support.pool import PoolProcess, pool


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[PoolProcess]:
    # A path longer than the 107 bytes that the kernel takes for a socket's.
    folder = tmp_path_factory.mktemp("pool") / ("long" * 30)
    folder.mkdir()
    with pool(folder) as started:
        yield started


@pytest.mark.slow
async def test_all_ranks_do_the_same_task_and_several_can_be_open_at_once(running: PoolProcess) -> None:
    link = await running.ready()
    assert await link.describe() == protocol.WorkerInfo(2, "cpu")
    notes: list[bytes] = []
    async with link.start_task("echo", Echo(["a"]), notes.append) as one, link.start_task("echo", Echo(["b"])) as two:
        for number in range(3):
            await one.send(Echo([f"a{number}"]))
            await two.send(Echo([f"b{number}"]))
        assert (await two.result(Echo)).texts == ["b", "b0", "b1", "b2"]
        assert (await one.result(Echo)).texts == ["a", "a0", "a1", "a2"]
    assert notes == [b"all ranks have answered"]


@pytest.mark.slow
async def test_a_cancelled_task_disturbs_no_other(running: PoolProcess) -> None:
    link = await running.ready()
    ranks = {number: process.pid for number, process in running.ranks().items()}
    async with link.start_task("echo", Echo(["left"])) as left:
        await left.send(Echo(["more"]))
    async with link.start_task("echo", Echo(["next"])) as after:
        assert (await after.result(Echo)).texts == ["next"]
    assert {number: process.pid for number, process in running.ranks().items()} == ranks


@pytest.mark.slow
async def test_an_unknown_task_is_refused_and_the_ranks_go_on(running: PoolProcess) -> None:
    link = await running.ready()
    async with link.start_task("dance", Echo([])) as session:
        with pytest.raises(PoolWorkError, match="has no task 'dance'"):
            await session.result(Echo)
    async with link.start_task("echo", Echo(["still"])) as session:
        assert (await session.result(Echo)).texts == ["still"]


@pytest.mark.fault("F35")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_breaks_the_task_off_and_the_group_is_formed_again(
    running: PoolProcess, victim: int
) -> None:
    link = await running.ready()
    async with link.start_task("echo", Echo(["a"])) as session:
        await session.send(Echo(["b"]))
        running.ranks()[victim].send_signal(signal.SIGKILL)
        with pytest.raises(PoolBrokenError):
            await session.result(Echo)
    assert await link.is_ready(150.0)
    async with link.start_task("echo", Echo(["again"])) as session:
        assert (await session.result(Echo)).texts == ["again"]


@pytest.mark.slow
async def test_other_hosts_and_users_cannot_reach_the_ranks_of_one_host(running: PoolProcess) -> None:
    await running.ready()
    processes = [psutil.Process(running.process.pid), *running.ranks().values()]
    listening = [each for one in processes for each in one.net_connections("tcp") if each.status == "LISTEN"]
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
    assert (running.folder / "pool.sock").stat().st_mode & 0o777 == 0o600
    assert (running.folder / "pool.key").stat().st_mode & 0o777 == 0o600


def test_only_who_has_the_key_can_speak_as_rank_0(tmp_path: Path) -> None:
    protocol.create_key(tmp_path)
    key = protocol.read_key(tmp_path)
    protocol.create_key(tmp_path)
    assert protocol.read_key(tmp_path) == key, "a second host finds it"
    assert len(key) == 32
    group = protocol.GroupCipher(key, b"group 7")
    message = group.encrypt(b"begin", 0, 7)
    assert b"begin" not in message
    assert protocol.GroupCipher(key, b"group 7").decrypt(message, 0, 7) == b"begin"
    for sender, number, forged in ((0, 8, message), (1, 7, message), (0, 7, message + b"!"), (0, 7, b"")):
        with pytest.raises(PermissionError, match="does not belong to this pool"):
            group.decrypt(forged, sender, number)
    for other in (protocol.GroupCipher(key, b"group 8"), protocol.GroupCipher(bytes(32), b"group 7")):
        with pytest.raises(PermissionError):
            other.decrypt(message, 0, 7)


@pytest.mark.slow
async def test_a_task_that_fails_reports_the_reason(running: PoolProcess) -> None:
    link = await running.ready()
    async with link.start_task("echo", _Wrong(5)) as session:
        with pytest.raises(PoolWorkError, match=r"rank [01]: ValidationError"):
            await session.result(Echo)
    assert await link.is_ready(150.0)


@pytest.mark.slow
def test_status_shows_the_pool(running: PoolProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(running.ready())
    workers.status(running.folder, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"ranks": 2, "device": "cpu"}
    workers.status(running.folder)
    assert capsys.readouterr().out == "the pool has 2 ranks; rank 0 computes on cpu\n"
    with pytest.raises(PoolUnavailableError, match=r"there is no pool at .*pool\.sock \(No such file or directory\)"):
        workers.status(tmp_path)


@pytest.mark.slow
def test_wrong_options_are_told(running: PoolProcess, tmp_path: Path) -> None:
    asyncio.run(running.ready())  # else its folder would be free
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ranks": -1}, "--ranks -1: expected a whole number of at least 1"),
        ({"threads": 0}, "--threads 0: expected a whole number of at least 1"),
        ({"log_level": "LOUD"}, "--log-level LOUD: expected DEBUG"),
        ({"hosts": "2"}, "--hosts 2 needs --rendezvous HOST:PORT"),
        ({"hosts": "3:1", "rendezvous": "a:1"}, "--hosts 3:1: expected at least 1, and MIN not above MAX"),
        ({"hosts": "2", "rendezvous": "a:1"}, "--hosts 2 needs --address HOST"),
        ({"hosts": "many"}, "--hosts many: expected a number, or MIN:MAX"),
        ({"rendezvous": "a:1"}, "--rendezvous and --address are for several hosts"),
        ({"data_dir": running.folder}, "another pool serves"),
        ({"data_dir": tmp_path / "none"}, "name the daemon's data folder with --data-dir"),
    ]
    for options, text in wrong:
        arguments: dict[str, Any] = {"data_dir": tmp_path, "ranks": 1, **options}
        with pytest.raises(ConfigError, match=re.escape(text)):
            workers.run(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_wants_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        workers.run(data_dir=tmp_path, backend="nccl", ranks=1)


@pytest.mark.slow
async def test_a_job_that_wants_gpus_does_not_get_others(running: PoolProcess) -> None:
    link = await running.ready()
    assert await link.with_backend("gloo").is_ready()
    if (await link.describe()).device == "cpu":
        with pytest.raises(PoolUnavailableError, match=r'the pool computes on cpu.*pool\.backend = "nccl"'):
            await link.with_backend("nccl").describe()


async def test_a_missing_pool_is_reported(tmp_path: Path) -> None:
    link = WorkerPool.at(tmp_path)
    assert not await link.is_ready()
    with pytest.raises(PoolUnavailableError, match="start one with: fedplat-server pool run"):
        async with link.start_task("echo", Echo([])):
            pass


@pytest.mark.slow
async def test_messages_may_be_larger_than_those_of_grpc_by_default(running: PoolProcess) -> None:
    link = await running.ready()
    large = "x" * (8 * 2**20)
    async with link.start_task("echo", Echo([large])) as task:
        await task.send(Echo([large]))
        assert (await task.result(Echo)).texts == [large, large]


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_a_listener_that_is_not_a_pool_is_a_clear_error(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_DESCRIBE_S", 1.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "pool.sock"):
        with pytest.raises(PoolUnavailableError, match=r"there is no pool at .*pool\.sock"):
            await WorkerPool.at(tmp_path).describe()


@pytest.mark.slow
def test_a_stopped_pool_leaves_nothing(tmp_path: Path) -> None:
    with pool(tmp_path, 1) as started:
        asyncio.run(started.ready())
        [rank] = started.ranks().values()
        assert started.stop() == 0
    assert not (tmp_path / "pool.sock").exists()
    assert not rank.is_running()


def test_coroutines_take_turns() -> None:
    said: list[str] = []

    def made(name: str) -> ThreadCoroutine:
        def run(inbox: Iterator[bytes]) -> bytes:
            for message in inbox:
                said.append(name + message.decode())
                task.pause()
            return b"".join([name.encode(), b" done"])

        task = ThreadCoroutine(name, run)
        return task

    one, two = made("a"), made("b")
    assert [one.start(), two.start()] == [Pause.WAITING, Pause.WAITING]
    assert [one.send(b"1"), two.send(b"2")] == [Pause.YIELDED, Pause.YIELDED]
    assert one.resume() is Pause.WAITING
    assert one.end() == b"a done"
    two.cancel()
    assert said == ["a1", "b2"]


def test_new_events_are_handled_between_the_steps_of_a_long_task() -> None:
    coming: SimpleQueue[TaskEvent] = SimpleQueue()
    scheduler = TurnScheduler(coming)
    for event in (TaskEvent(1, "start"), TaskEvent(2, "start"), TaskEvent(1, "end"), TaskEvent(3, "start")):
        coming.put(event)
    # Task 1 lets others have their turn three times and then waits for its end, which has come long ago.
    outcomes = {1: [Pause.YIELDED] * 3 + [Pause.WAITING, b"done"], 2: [Pause.WAITING], 3: [Pause.WAITING]}
    found: list[tuple[int, str]] = []
    while outcomes[1]:
        event = scheduler.next()
        scheduler.record(event.task, outcomes[event.task].pop(0))
        found.append((event.task, event.kind))
    resumed = (1, "resume")
    assert found == [(1, "start"), resumed, (2, "start"), resumed, (3, "start"), resumed, (1, "end")]


class _Wrong(msgspec.Struct):
    texts: int
