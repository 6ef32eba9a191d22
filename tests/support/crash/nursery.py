"""Daemons as processes of their own, forked by a zygote."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[2]


class Process:
    """One that the zygote has forked: `port` once it serves, `status` once it has ended (negative for a signal)."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pid: asyncio.Future[int] = loop.create_future()
        self.port: asyncio.Future[int] = loop.create_future()
        self.status: asyncio.Future[int] = loop.create_future()

    async def signal(self, number: signal.Signals) -> None:
        os.kill(await self.pid, number)


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be started: a daemon, or (`upgrade`) what brings the database to this version.

    With `files_only`, no update is a record of a segment. With `http`, its port is that of HTTP/1.1.
    """

    data_dir: Path
    database: str
    log: Path
    evaluators: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    webhook_networks: tuple[str, ...] = ()
    blobs: str = ""
    spool: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    upgrade: bool = False
    files_only: bool = False
    http: bool = False
    plugins: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    crash_at: str = ""

    def armed(self, crash_at: str) -> Order:
        """The same, to die at a point."""
        return dataclasses.replace(self, crash_at=crash_at)


class Nursery:
    """The zygote, and what it has started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._started: dict[int, Process] = {}

    def start(self, order: Order) -> Process:
        assert self._process.stdin is not None
        number, made = next(self._numbers), Process()
        self._started[number] = made
        line = json.dumps({"number": number, **dataclasses.asdict(order)}, default=str)
        self._process.stdin.write(line.encode() + b"\n")
        return made

    async def listen(self) -> None:
        """Takes the zygote's answers in."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            process = self._started[answer.pop("number")]
            for name, value in answer.items():
                future: asyncio.Future[int] = getattr(process, name)
                if not future.done():  # a test that has given up has cancelled what it waited for
                    future.set_result(value)


@contextlib.asynccontextmanager
async def running() -> AsyncGenerator[Nursery]:
    environment = {**os.environ, "PYTHONPATH": str(_TESTS), "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "support.crash.zygote",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    nursery = Nursery(process)
    listening = asyncio.create_task(nursery.listen(), name="zygote")
    try:
        yield nursery
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await listening
