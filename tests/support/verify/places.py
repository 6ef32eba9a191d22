"""Databases for `verify` to look at: a healthy one with its files, to be copied and broken."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import sqlalchemy
from sqlalchemy.exc import IntegrityError

from fedplat.wire.v1 import admin_pb2, model_pb2
from fedplat_server.database.engine import async_url, create_engine
from support import daemons, databases
from support.daemons import Site, initial_model, update_of
from support.jobs import job_file

DONE = job_file(
    "done",
    rounds=2,
    goal=2,
    over_selection=1.5,
    min_fraction=0.5,
    more='[aggregation]\nrule = "fedavgm"\n[compression]\ndownlink = {codec = "eden"}\n',
)
PRIVATE = job_file(
    "private",
    close="deadline",
    more='[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
    '[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = 4.0\n',
)


@dataclasses.dataclass(frozen=True)
class Place:
    """A database, its blobs, and the jobs in it."""

    database: str
    folder: Path
    jobs: dict[str, str]

    def execute(self, statement: str) -> None:
        """Breaks something; the names of jobs in braces become their ids."""
        assert self.try_to_break(statement), f"nothing was broken by {statement}"

    def try_to_break(self, statement: str) -> bool:
        """Does the same, and returns whether there was something to change, and no constraint against it."""
        found: list[int] = []

        async def execute() -> None:
            engine = create_engine(async_url(self.database), foreign_keys=False)
            try:
                async with engine.begin() as connection:
                    text = statement.format(**self.jobs).replace(":", r"\:")
                    found.append((await connection.execute(sqlalchemy.text(text))).rowcount)
            finally:
                await engine.dispose()

        try:
            databases.in_thread(execute())
        except IntegrityError:
            return False
        return found[0] != 0

    def blob(self, digest_of: str, job: str, version: int) -> Path:
        """The file of a version: of its `digest`, `state_digest` or `delta_digest`."""
        found: list[str] = []

        async def ask() -> None:
            engine = create_engine(async_url(self.database))
            query = f"SELECT {digest_of} FROM model_versions WHERE job_id = '{self.jobs[job]}' AND version = {version}"
            try:
                async with engine.connect() as connection:
                    found.append((await connection.execute(sqlalchemy.text(query))).scalar_one())
            finally:
                await engine.dispose()

        databases.in_thread(ask())
        return self.folder / "blobs" / found[0][:2] / found[0][2:4] / found[0]

    def copy(self, database: str, folder: Path) -> Place:
        shutil.copytree(self.folder, folder)
        return Place(database, folder, self.jobs)


MakePlace: TypeAlias = Callable[[], contextlib.AbstractContextManager[Place]]


async def live(site: Site) -> dict[str, str]:
    """A job with a failure, an abandoned attempt and two versions; a release of noise alone; one in the middle of an
    attempt; a draft.
    """
    clients = await site.fleet(3)
    done = await site.operator.start(DONE)
    tokens = [one.token for one in await site.assign(clients)]
    await clients[2].fail(tokens[2], model_pb2.REASON_TRAINER_ERROR, "out of memory\nreally")
    for number in (0, 1):
        await clients[number].deliver(tokens[number], update_of(initial_model(), number), number + 0.1)
    tokens = [one.token for one in await site.assign(clients)]
    await clients[0].deliver(tokens[0], update_of(initial_model(), 0))
    await site.operator.jobs.PauseJob(admin_pb2.JobRequest(job=done))
    await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=done))
    tokens = [one.token for one in await site.assign(clients)]
    for number in (0, 1):
        await clients[number].deliver(tokens[number], update_of(initial_model(), number), 0.1)
    await site.operator.until(done, "job", "COMPLETED")
    private = await site.operator.start(PRIVATE)
    for client, one in zip(clients[:2], await site.assign(clients[:2]), strict=True):
        await client.fail(one.token, model_pb2.REASON_TRAINER_ERROR, "out of memory")
    await site.operator.until(private, "job", "COMPLETED")
    under_way = await site.operator.start(job_file("open", goal=2))
    tokens = [one.token for one in await site.assign(clients[:2])]
    await clients[0].deliver(tokens[0], update_of(initial_model(), 0))
    draft = await site.operator.create(job_file("draft"))
    return {"done": done, "private": private, "open": under_way, "draft": draft.job_id}


async def healthy(database: str, folder: Path) -> Place:
    async with daemons.running(folder, database=database) as site:
        return Place(database, folder, await live(site))
