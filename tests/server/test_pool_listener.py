"""Rank 0's side of the daemon's calls: tasks that the daemon gives up are cancelled, and every reason arrives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from fedplat_server.errors import PoolMemoryError, PoolUnavailableError, PoolWorkError
from fedplat_server.workers import protocol
from fedplat_server.workers.broadcast import Rank0Listener, TaskEvent
from fedplat_server.workers.client import RunningTask, WorkerPool
from fedplat_server.workers.tasks import Echo

DAEMON = """
import asyncio, sys
from pathlib import Path
from fedplat_server.workers.client import WorkerPool
from fedplat_server.workers.protocol import WorkerInfo

async def main():
    async with WorkerPool.at(Path(sys.argv[1])).start_task("train", WorkerInfo(1, "")) as task:
        await task.result(WorkerInfo)

asyncio.run(main())
"""
RANK = """
import os, sys
from pathlib import Path
from fedplat_server.workers import protocol
from fedplat_server.workers.broadcast import Rank0Listener

listener = Rank0Listener(protocol.socket_path(Path(sys.argv[1])), protocol.WorkerInfo(1, "cpu"))
listener.events.get(timeout=150.0)
for _ in range(100):
    if (child := os.fork()) == 0:
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        listener.refuse_all(protocol.TaskRefusal("a child crashed"))
listener.finish(0, protocol.TaskReply(bytes.fromhex("81a5746578747390")))
listener.refuse_all(protocol.TaskRefusal(""))
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Rank0Listener]:
    served = Rank0Listener(protocol.socket_path(tmp_path), protocol.WorkerInfo(1, "cpu"))
    yield served
    served.refuse_all(protocol.TaskRefusal("the test has ended"))


async def next_event(listener: Rank0Listener) -> TaskEvent:
    return await asyncio.to_thread(listener.events.get, timeout=60.0)


async def call_again_and_again(pool: WorkerPool) -> None:
    while True:
        with contextlib.suppress(PoolUnavailableError):  # the rank has ended
            await pool.describe()


async def send_until_refused(task: RunningTask) -> None:
    while True:
        await task.send(Echo(["more"]))


async def test_a_daemon_that_is_killed_cancels_its_tasks(listener: Rank0Listener, tmp_path: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, str(tmp_path)])
    events = [await next_event(listener) for _ in range(2)]
    assert [(event.task, event.kind) for event in events] == [(0, "start"), (0, "end")]
    daemon.kill()
    assert await next_event(listener) == TaskEvent(0, "cancel")
    daemon.wait()


async def test_a_task_that_is_left_is_cancelled_and_one_that_is_finished_is_not(
    listener: Rank0Listener, tmp_path: Path
) -> None:
    pool = WorkerPool.at(tmp_path)
    async with pool.start_task("echo", Echo(["left"])) as task:
        await task.send(Echo(["more"]))
        assert [(await next_event(listener)).kind for _ in range(2)] == ["start", "message"]
    # The end of its messages may arrive before the cancellation does.
    if (event := await next_event(listener)) == TaskEvent(0, "end"):
        event = await next_event(listener)
    assert event == TaskEvent(0, "cancel")
    async with pool.start_task("echo", Echo(["next"])) as task:
        assert (await next_event(listener)).kind == "start"
        listener.finish(1, protocol.TaskReply(b"\x81\xa5texts\x90"))
        assert await task.result(Echo) == Echo([])
    async with pool.start_task("echo", Echo(["last"])) as task:
        kinds: dict[int, str] = {}
        while 2 not in kinds:
            event = await next_event(listener)
            kinds[event.task] = event.kind
    assert kinds in ({2: "start"}, {1: "end", 2: "start"})


async def test_ranks_end_when_the_daemon_has_read_the_reason(listener: Rank0Listener, tmp_path: Path) -> None:
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    messages.put(msgspec.msgpack.encode(protocol.StartTask("aggregate", b"", "auto")))
    path = protocol.socket_path(tmp_path)
    with protocol.short_path(path) as name, grpc.insecure_channel(f"unix:{name}") as channel:
        call: Any = channel.stream_stream(f"/{protocol.SERVICE}/Run")(iter(messages.get, None))
        await next_event(listener)
        ending = asyncio.create_task(asyncio.to_thread(listener.refuse_all, protocol.TaskRefusal("too large")))
        responses = iter(call)
        await asyncio.to_thread(next, responses)
        done, _ = await asyncio.wait([ending], timeout=0.3)
        assert not done, "the ranks may end though nothing says that the reason was read"
        messages.put(None)  # as the daemon does after the reason
        assert await asyncio.to_thread(list, responses) == []
        await ending


async def test_the_reason_arrives_though_the_daemon_still_sends_messages(
    listener: Rank0Listener, tmp_path: Path
) -> None:
    pool, text = WorkerPool.at(tmp_path), "too large: " + "x" * 100_000
    async with pool.start_task("aggregate", Echo([])) as one:
        first = await next_event(listener)
        async with pool.start_task("aggregate", Echo([])) as other:
            await next_event(listener)
            listener.finish(first.task, protocol.TaskRefusal("no room", out_of_memory=True))
            await asyncio.to_thread(listener.refuse_all, protocol.TaskRefusal(text))
            with pytest.raises(PoolMemoryError, match="no room"):
                await send_until_refused(one)
            with pytest.raises(PoolWorkError, match=r"too large: x+$"):
                await other.result(Echo)


@pytest.mark.slow
async def test_tasks_may_fork(tmp_path: Path) -> None:
    pool, environment = WorkerPool.at(tmp_path), os.environ | protocol.RANK_ENVIRONMENT
    with subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], env=environment) as rank:
        assert await pool.is_ready(150.0)
        async with pool.start_task("echo", Echo([])) as task, asyncio.TaskGroup() as group:
            calls = group.create_task(call_again_and_again(pool))
            assert await task.result(Echo) == Echo([])
            calls.cancel()
    assert rank.returncode == 0
