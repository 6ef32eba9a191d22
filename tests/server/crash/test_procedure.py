"""Server and clients are killed in each step of a procedure: the same bytes, and a record of all that has left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from typing_extensions import override

from fedplat.config.loaded_plugins import load_plugins
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.procedures import SiteTable, run, versions
from fedplat.procedures.contract import FEATURE
from fedplat.wire.v1 import fleet_pb2
from fedplat_client._state import released
from fedplat_server.verify.inspection import verify
from support import daemons
from support.crash import chains, scenario
from support.crash.chains import Chain
from support.crash.nursery import Nursery, Order
from support.procedures import HALVING, PLUGINS, Halving, at_work, make_client, make_frames, procedure_job

pytestmark = [pytest.mark.calm, pytest.mark.slow, pytest.mark.timeout(600)]
FRAMES = make_frames(3)
POINTS = [
    *("save.after:2", "save.uncommitted:3", "save.after:4", "rows.uncommitted", "save.uncommitted:5"),
    *("commit.model.before", "commit.model.after", "commit.state.before", "commit.state.after", "save.after:5"),
]
"""A death before and after each thing that a step stores: the cohort, a reply, the message, the state, the version."""


def text_of(steps: int) -> str:
    return procedure_job(
        HALVING.replace("steps = 4", f"steps = {steps}"), rounds=steps, more="[retention]\nstates = 100\n"
    )


class Sites(Chain):
    """A world whose clients answer a procedure."""

    offers: ClassVar[Mapping[str, Any]] = {"trainers": ("patients",), "features": (FEATURE,)}
    procedure = Halving("age", 128.0, len(POINTS) + 1)

    @override
    def first_model(self) -> Parameters:
        return versions.begin(self.procedure).model

    @override
    def content(self, number: int, work: fleet_pb2.Assignment) -> bytes:
        message = Parameters.from_bytes(work.model_bytes)
        schema = self.procedure.schema(message)
        table = SiteTable(FRAMES[f"site-{number}"])
        return schema.write(schema.encode(self.procedure.answer(message, table)))

    @override
    def num_examples(self, number: int) -> float:
        return 1.0


@pytest.mark.parametrize("seed", [1])
async def test_the_server_is_killed_in_each_step(zygote: Nursery, folder: Path, database: str, seed: int) -> None:
    world = Sites(zygote, Order(folder, database, folder.parent / "server.log", plugins=PLUGINS))
    found: list[Parameters] = []

    async def keep_result(world: scenario.World) -> None:
        async def export(site: daemons.Site) -> Parameters:
            await site.operator.until(world.job, "job", "COMPLETED")
            return await site.operator.model(world.job)

        found.append(await world.ask(export))

    await chains.train(world, chains.draw(seed, *POINTS), text_of, disturb=keep_result)
    assert versions.read_result(found[0]) == run(world.procedure, FRAMES)
    report = await verify(world.order.database, world.order.data_dir)
    assert (report.findings, report.notes) == ([], [])


CLIENT = """
import os, signal, sys
from fedplat_client import Client
from fedplat_client._state.released import ReleaseRecord
from fedplat_client._work.work import AssignedWork
from fedplat_client.trainers.table import TableTrainer
from support.procedures import Halving, make_frames

ticket, address, folder, point = sys.argv[1:]
add, report = ReleaseRecord.add, AssignedWork.report

def die(name):
    if name == point:
        os.kill(os.getpid(), signal.SIGKILL)

def add_and_die(record, release):
    die("before the record")
    add(record, release)
    die("before the upload")

def report_and_die(work, request, content=None):
    outcome = report(work, request, content)
    die("after the report")
    return outcome

ReleaseRecord.add, AssignedWork.report = add_and_die, report_and_die
client = Client.from_ticket(ticket, data_dir=folder, plugins={"procedures.halving": Halving})
client.add_trainer("patients", TableTrainer(make_frames(3)["site-0"]))
client.run()
"""
DEATHS = ("before the record", "before the upload", "after the report")


async def test_a_client_is_killed_at_each_point_of_a_step(folder: Path, tmp_path: Path) -> None:
    """It gets its assignment again, has the same bytes, and its record has a line for each upload at least."""
    text, loaded = procedure_job(HALVING), load_plugins(PLUGINS)
    procedure = parse_job(text, loaded.table).procedure
    assert procedure is not None
    async with daemons.running(folder, plugins=loaded) as site:
        ticket = msgspec.structs.replace(await site.operator.ticket(), server=site.address).to_text()
        job = await site.operator.start(text, versions.begin(procedure).model)
        others = [await make_client(site, tmp_path / name, FRAMES[name]) for name in ("site-1", "site-2")]
        async with at_work(others):
            processes = list[asyncio.subprocess.Process]()
            for point in (*DEATHS, ""):
                arguments = ["-c", CLIENT, ticket, site.address, str(tmp_path / "site-0"), point]
                environment = {**os.environ, "PYTHONPATH": "tests", "FEDPLAT_INSECURE": "1"}
                processes.append(await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment))
                if point:
                    assert await processes[-1].wait() == -signal.SIGKILL
            await site.operator.until(job, "job", "COMPLETED")
            processes[-1].terminate()
            await processes[-1].wait()
        assert versions.read_result(await site.operator.model(job)) == run(procedure, FRAMES)
    (record,) = (tmp_path / "site-0").rglob("released.jsonl")
    assert [line.round for line in released.read(record)] == [1, 1, 2, 3, 4]
    first, again, *_ = released.read(record)
    assert first.digest == again.digest, "a reply is repeated with the same bytes"
    assert released.verify(record).wrong == 0
