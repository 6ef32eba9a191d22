"""A daemon that finds a job of a newer release: it pauses that job with the reason, and runs the others."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import Site, initial_model, update_of
from support.jobs import FAR_S, job_file, write_job
from support.private_jobs import private
from support.raw_silos import GOSSIP, RawSilo, play

pytestmark = [
    pytest.mark.calm("it changes the database from outside"),
    pytest.mark.fault("F29"),
    pytest.mark.slow,
]
FUTURE = "[from_the_future]\nkey = 1\n"
PROBLEM = "this server cannot read the job file: from_the_future = {…}: there is no such key"


def change_job_file(folder: Path, job: str, text: str) -> None:
    """What a daemon of another release would have stored."""
    with sqlite3.connect(folder / "fedplat.sqlite") as connection:
        assert connection.execute("UPDATE jobs SET job_file = ? WHERE job_id = ?", (text, job)).rowcount == 1


def decentralised(rounds: int = 1) -> str:
    selection = {"goal": 3, "over_selection": 1.3, "min_fraction": 0.6}
    times = {"training_s": FAR_S, "upload_s": FAR_S}
    return write_job("gossip", rounds=rounds, selection=selection, deadlines=times, more=GOSSIP)


def read_column(folder: Path, job: str, column: str) -> Any:
    """What is stored, as it is written."""
    with closing(sqlite3.connect(folder / "fedplat.sqlite")) as connection:
        ((text,),) = connection.execute(f"SELECT {column} FROM jobs WHERE job_id = ?", (job,)).fetchall()
    return text


def write_column(folder: Path, job: str, column: str, text: str) -> None:
    """What a daemon of another release would have stored."""
    with closing(sqlite3.connect(folder / "fedplat.sqlite")) as connection, connection:
        connection.execute(f"UPDATE jobs SET {column} = ? WHERE job_id = ?", (text, job))


async def work(site: Site, count: int) -> None:
    clients = await site.fleet(count)
    for number, (client, one) in enumerate(zip(clients, await site.assign(clients), strict=True)):
        await client.deliver(one.token, update_of(initial_model(), number))


async def command(call: Any) -> str:
    """The words with which a command is refused."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.details() or ""


async def test_the_job_is_paused_and_other_jobs_run(folder: Path) -> None:
    text, other = job_file("newer", rounds=2), job_file("other")
    async with daemons.running(folder) as site:
        job = await site.operator.start(text)
        await site.assign(await site.fleet(2))  # an open attempt
        draft = (await site.operator.create(text)).job_id
    for each in (job, draft):
        change_job_file(folder, each, text + FUTURE)
    async with daemons.running(folder) as site:
        shown = await site.operator.show(job)
        assert shown.status == admin_pb2.JOB_STATUS_PAUSED
        assert shown.reason.startswith(PROBLEM)
        assert "update the server" in shown.reason
        assert (shown.name, shown.job_file) == ("newer", text + FUTURE)
        assert PROBLEM in await command(site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job)))
        assert PROBLEM in await command(site.operator.jobs.StartJob(admin_pb2.JobRequest(job=draft)))
        second = await site.operator.start(other)
        await work(site, 2)
        await site.operator.until(second, "job", "COMPLETED")
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert [finding.found for finding in report.findings if "job file cannot be read" not in finding.found] == []
    change_job_file(folder, job, text)  # the server of the newer release again
    async with daemons.running(folder) as site:
        await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
        for _ in range(2):
            await work(site, 2)
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE attempts SET phase = 'SHUFFLING'", "attempt 1 at round 1 of the kind TRAIN is SHUFFLING"),
        ("UPDATE attempts SET kind = 'DISTILL'", "attempt 1 at round 1 of the kind DISTILL is COLLECTING"),
        ("UPDATE assignments SET state = 'WAITING', reason = 'WHO_KNOWS'", "in attempt 1 at round 1 is WAITING"),
    ],
)
async def test_a_state_that_only_a_newer_release_knows(folder: Path, change: str, problem: str) -> None:
    """The daemon does not stop: it pauses the job, and abandons its attempt."""
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file("newer", rounds=1))
        await site.assign(await site.fleet(2))
    with sqlite3.connect(folder / "fedplat.sqlite") as connection:
        connection.execute(change)
    async with daemons.running(folder) as site:
        shown = await site.operator.show(job)
        assert shown.status == admin_pb2.JOB_STATUS_PAUSED
        assert problem in shown.reason
        assert "update the server" in shown.reason
        assert shown.current.phase == admin_pb2.ATTEMPT_PHASE_ABANDONED
        assert shown.current.dropped == 2
        other = await site.operator.start(job_file("other"))
        await work(site, 2)
        await site.operator.until(other, "job", "COMPLETED")


async def test_a_decentralised_job_continues_where_it_was(folder: Path) -> None:
    """The state of its exchange outlives a daemon that cannot read its `[mode]`, and so knows of no exchange."""
    text = decentralised(rounds=2)
    async with daemons.running(folder) as site:
        job = await site.operator.start(text)
        files: dict[str, bytes] = {}
        silos = [RawSilo(client, initial_model().to_vector(), files) for client in await site.fleet(3)]
        await play(silos)
        for silo in silos:
            await silo.begin()
        await silos[0].announce(wait_s=0.0)
    before = json.loads(read_column(folder, job, "protocol"))
    assert before["round"] == 2
    change_job_file(folder, job, text.replace('kind = "gossip"', 'kind = "gossip"\ntopology = "star"'))
    async with daemons.running(folder) as site:
        shown = await site.operator.show(job)
        assert shown.status == admin_pb2.JOB_STATUS_PAUSED
        assert "mode.topology = 'star'" in shown.reason
    assert json.loads(read_column(folder, job, "protocol")) == before
    change_job_file(folder, job, text)
    async with daemons.running(folder) as site:
        silos = [dataclasses.replace(each, client=each.client.over(site.channel)) for each in silos]
        await asyncio.gather(*(silo.client.open_session() for silo in silos))
        await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
        await play(silos)
        await site.operator.until(job, "job", "COMPLETED")
        rounds = await site.operator.rounds(job)
        assert [(each.round, each.attempt, each.merged) for each in rounds] == [(1, 1, 3), (2, 1, 0), (2, 2, 3)]
        report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, live=True)
        assert report.findings == []


CLOCKS = '[mode]\nkind = "ssp"\nconcurrency = 2\nslack = 1\n'
STORED = {
    "a form that it cannot read": {
        "sync": ("plugins", '[{"kind": 1}]'),
        "ssp": ("protocol", '{"clocks": "later"}'),
        "gossip": ("protocol", '{"phase": "ELECTING"}'),
    },
    "more than it knows": {
        "sync": ("protocol", '{"turns": 3}'),
        "ssp": ("protocol", '{"clocks": {"c1": 3}, "ahead": {}, "minimum": 3, "lapses": {}, "pace": 2}'),
        "gossip": ("protocol", '{"round": 2, "leader": "c1"}'),
    },
    "what it can read, beside a job file that it cannot": {
        "ssp": ("protocol", '{"clocks": {"c1": 3}, "ahead": {}, "minimum": 3, "lapses": {}}'),
        "gossip": ("protocol", '{"round": 2}'),
    },
}


@pytest.mark.parametrize("found", STORED)
async def test_what_it_has_not_read_it_does_not_write(folder: Path, found: str) -> None:
    """A newer release may keep more of a kind of job than this one knows."""
    files = {"sync": job_file(), "ssp": job_file("clocks", goal=1, more=CLOCKS), "gossip": decentralised()}
    columns = STORED[found]
    async with daemons.running(folder) as site:
        jobs = {name: await site.operator.start(files[name]) for name in columns}
    for name, (column, stored) in columns.items():
        write_column(folder, jobs[name], column, stored)
        if "beside" in found:
            change_job_file(folder, jobs[name], files[name] + FUTURE)
    async with daemons.running(folder) as site:
        for job in jobs.values():
            shown = await site.operator.show(job)
            assert shown.status == admin_pb2.JOB_STATUS_PAUSED
            assert "update the server" in shown.reason
        other = await site.operator.start(job_file("other"))
        await work(site, 2)
        await site.operator.until(other, "job", "COMPLETED")
    assert {name: (column, read_column(folder, jobs[name], column)) for name, (column, _) in columns.items()} == columns


async def test_the_job_can_be_cancelled(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file())
    change_job_file(folder, job, job_file() + FUTURE)
    async with daemons.running(folder) as site:
        await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
        assert (await site.operator.show(job)).status == admin_pb2.JOB_STATUS_CANCELLED
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert report.findings == []
    (note,) = report.notes
    assert note.startswith(f"job {job} has ended, and its job file cannot be read")


async def test_the_reason_blames_no_version_that_did_not_make_the_job(folder: Path) -> None:
    """0.1.0 had a rule of this name that needed nothing else."""
    former = job_file() + '[aggregation]\nrule = "easgd"\n'
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file())
    change_job_file(folder, job, former)
    async with daemons.running(folder) as site:
        reason = (await site.operator.show(job)).reason
        assert 'needs [updates] weighting = "uniform"; another version of fedplat made the job' in reason
        assert "if it is older, cancel the job" in reason
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    (finding,) = report.findings
    assert "cancel the job" in finding.advice


async def test_the_budget_of_its_population_is_not_spent_while_its_plan_is_unknown(folder: Path) -> None:
    text = private()
    async with daemons.running(folder) as site:
        job = (await site.operator.create(text)).job_id
        budget = admin_pb2.SetPrivacyBudgetRequest(population="demo", epsilon=50.0, delta=1e-5)
        await site.operator.privacy.SetPrivacyBudget(budget)
    change_job_file(folder, job, text + FUTURE)
    async with daemons.running(folder) as site:
        assert "private" in [
            each.name for each in (await site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest())).jobs
        ]
        refusal = await command(site.operator.create(text))
        assert f"this server cannot read the job file of {job} (from_the_future" in refusal
        assert refusal.endswith("If it is newer, update the server; if it is older, cancel the job")
        jobs = (await site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest())).jobs
        assert len(jobs) == 1
        free = job_file("elsewhere").replace('population = "demo"', 'population = "other"')
        assert (await site.operator.create(free)).name == "elsewhere"
