"""A runner on a store that fails on command, with an actor that answers those who wait."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from fedplat.job import parse_job
from fedplat.rounds import Change, Coordinator, JobState, ModelVersion
from fedplat.rounds.commands import Abort, Assign, Command, Refuse
from fedplat.rounds.events import ClientCheckedIn, JobAction, OperatorCommand
from fedplat_server.coordination.long_polls import LongPolls, wait_for_work
from fedplat_server.coordination.runner import Runner, Timer
from fedplat_server.database.store import Store, open_store
from support import databases
from support.faulty_store import FaultyStore
from support.jobs import job_file

PATIENCE_S = 60.0
STORE_RETRY_S = 0.002


class FastClock:
    """The event loop's clock; the test sets it forward by `ahead_s`."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_at(when - self.ahead_s, callback)


class Actor:
    """Answers those who wait, as the daemon does."""

    def __init__(self) -> None:
        self.long_polls = LongPolls()
        self.changes: list[Change] = []

    def act(self, command: Command) -> None:
        if isinstance(command, Assign | Refuse):
            self.long_polls.deliver(command)
        elif isinstance(command, Abort):
            self.long_polls.stop(command)

    def on_stored(self, changes: Sequence[Change]) -> None:
        self.changes.extend(changes)


class Bench:
    """A runner with two jobs, "toy" and one of another population that makes changes when a test needs some."""

    def __init__(self, store: Store) -> None:
        self.store = FaultyStore(store)
        self.clock = FastClock()
        self.runner = Runner(Coordinator(), cast(Store, self.store), self.clock, store_retry_s=STORE_RETRY_S)
        self.actor = Actor()
        self.task: asyncio.Task[None] | None = None

    async def add(self, job_id: str, population: str, goal: int = 1) -> None:
        text = job_file(job_id, goal=goal).replace('"demo"', f'"{population}"')
        version = ModelVersion(version=0, round=0, attempt=0, digest="0" * 64, size_bytes=1)
        state = JobState(job_id, parse_job(text), version)
        record = await self.store.inner.jobs.create_job(state, text, f"key of {job_id}")
        self.runner.coordinator.add(record.state)

    async def act(self, action: JobAction, job_id: str = "other") -> None:
        assert (await self.runner.submit(OperatorCommand(job_id, action))).accepted

    async def back(self) -> None:
        self.store.outage = False
        while self.runner.in_doubt:
            await asyncio.sleep(0.001)

    def wait_for_work(self, wait_s: float) -> asyncio.Task[Assign | Refuse]:
        event = ClientCheckedIn("c", "demo", trainers=frozenset({"toy"}))
        return asyncio.create_task(wait_for_work(self.runner, self.actor.long_polls, event, wait_s))


@asynccontextmanager
async def bench() -> AsyncGenerator[Bench]:
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
        store = await open_store(databases.create_sqlite(Path(folder) / "fedplat.sqlite"))
        made = Bench(store)
        await made.add("toy", "demo")
        await made.add("other", "elsewhere")
        made.task = asyncio.create_task(made.runner.run(made.actor))
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield made
        finally:
            made.runner.stop_timers()
            made.task.cancel()
            await asyncio.gather(made.task, return_exceptions=True)
            await store.close()


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)
