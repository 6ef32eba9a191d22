"""Updates of middle size are records of segments: a daemon makes them durable together, and finds them again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.aggregate import Accumulator, Contribution
from fedplat.codecs.container import open_update, options_from_text
from fedplat.job import build_rule, parse_job
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.rpc import report_intake
from fedplat_server.storage import segments
from fedplat_server.storage.segments import list_segments, read_records
from fedplat_server.verify.inspection import verify
from support import daemons
from support.crash import scenario
from support.daemons import RawClient, Site, digest_of
from support.jobs import job_file

pytestmark = pytest.mark.calm("says itself what fails when")
SIDE = 128
MODEL = scenario.base_model(SIDE)
NUM = 3
CODEC = '[compression]\nuplink = {codec = "bf16"}\n'
ROBUST = '[robust]\nbyzantine = 0\nrule = {name = "krum"}\nbefore = [{name = "bucketing", size = 1}]\n'
PRIVATE = (
    '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
    '[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = 4.0\n'
)


def contents(codec: str = "") -> list[bytes]:
    options = options_from_text('{"codec":"bf16"}') if codec else None
    return [scenario.content_of(number, 1, options, SIDE) for number in range(NUM)]


def records(folder: Path) -> set[str]:
    """The digests of the records in all segments."""
    return {record.digest for path in list_segments(folder / "segments") for record in read_records(path)}


def uploads(folder: Path) -> list[Path]:
    return [path for path in (folder / "uploads").rglob("*") if path.is_file()]


async def begun(site: Site, text: str) -> tuple[str, list[RawClient], list[fleet_pb2.Assignment]]:
    job = await site.operator.start(text, MODEL)
    clients = await site.fleet(NUM)
    calls = [client.assignment(codecs=scenario.CODECS) for client in clients]
    return job, clients, list(await asyncio.gather(*calls))


async def is_accepted(call: object) -> None:
    assert (await call).HasField("receipt")  # pyright: ignore[reportGeneralTypeIssues]


@pytest.mark.fault("F2", "F14")
@pytest.mark.parametrize("more", ["", CODEC, ROBUST])
async def test_a_daemon_continues_the_round_with_the_records_of_the_last(folder: Path, more: str) -> None:
    """One came inside its report, one was uploaded; `verify` misses neither. The model is what the updates give."""
    text, sent = job_file(goal=NUM, more=more), contents(more if more == CODEC else "")
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, text)
        await is_accepted(clients[0].report_inline(work[0].token, sent[0]))
        await clients[1].upload(work[1].token, sent[1])
        await is_accepted(clients[1].report(work[1].token, digest_of(sent[1])))
        assert records(folder) == {digest_of(content) for content in sent[:2]}
        assert uploads(folder) == []
    shutil.rmtree(folder / "uploads")  # what the daemon that stopped has left for a release without segments
    database = f"sqlite:///{folder / 'fedplat.sqlite'}"
    assert (await verify(database, folder)).findings == []
    async with daemons.running(folder) as site:
        again = [client.over(site.channel) for client in clients]
        for client in again:
            await client.open_session()
        await is_accepted(again[1].report(work[1].token, digest_of(sent[1])))
        await is_accepted(again[2].report_inline((await again[2].assignment(codecs=scenario.CODECS)).token, sent[2]))
        await site.operator.until(job, "job", "COMPLETED")
        assert [(one.round, one.attempt) for one in await site.operator.rounds(job)] == [(1, 1)]
        exported = await site.operator.export(job)
    spec = parse_job(text)
    if not spec.robust:
        rule, accumulator = build_rule(spec), Accumulator(MODEL.schema, build_rule(spec))
        for number, content in enumerate(sent):
            path = folder / f"update {number}"
            path.write_bytes(b"before" + content + b"after")
            values = open_update(path, MODEL, spec.compression.uplink, len(b"before"), len(content))
            accumulator.fold(values, Contribution(1.0))
        assert accumulator.finish(MODEL, rule.init(MODEL.schema.num_floating))[0].to_bytes() == exported
    assert (records(folder), uploads(folder), list_segments(folder / "segments")) == (set(), [], [])
    report = await verify(database, folder)
    assert (report.findings, report.notes) == ([], [])


async def test_what_is_stopped_leaves_files_for_a_release_without_segments(folder: Path) -> None:
    sent = contents()
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, job_file(goal=NUM))
        await is_accepted(clients[0].report_inline(work[0].token, sent[0]))
    assert [path.read_bytes() for path in uploads(folder)] == sent[:1]
    shutil.rmtree(folder / "segments")
    async with daemons.running(folder) as site:
        for client, content in zip(clients[1:], sent[1:], strict=True):
            there = client.over(site.channel)
            await there.open_session()
            await is_accepted(there.report_inline((await there.assignment()).token, content))
        await site.operator.until(job, "job", "COMPLETED")
    assert uploads(folder) == []


async def test_reports_that_arrive_together_are_synced_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "GAP_S", 0.5)  # so that no other work of this machine comes between them
    monkeypatch.setattr(segments, "GATHER_S", 60.0)
    job, clients, work = await begun(site, job_file(goal=NUM))
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    calls = [client.report_inline(one.token, sent) for client, one, sent in zip(clients, work, contents(), strict=True)]
    for reply in await asyncio.gather(*calls):
        assert reply.HasField("receipt")
    assert len(synced) == 1
    await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F7", "F8")
@pytest.mark.parametrize(
    ("code", "status"),
    [(errno.EIO, grpc.StatusCode.ABORTED), (errno.ENOSPC, grpc.StatusCode.RESOURCE_EXHAUSTED)],
)
async def test_a_report_whose_record_is_not_durable_is_not_accepted(
    site: Site, monkeypatch: pytest.MonkeyPatch, code: int, status: grpc.StatusCode
) -> None:
    _, clients, work = await begun(site, job_file(goal=NUM))
    content = contents()[0]

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(aio.AioRpcError) as caught:
            await clients[0].report_inline(work[0].token, content)
    assert caught.value.code() is status
    await is_accepted(clients[0].report_inline(work[0].token, content))
    assert (await verify(f"sqlite:///{site.folder / 'fedplat.sqlite'}", site.folder, live=True)).findings == []


async def test_a_damaged_record_is_found_and_costs_the_attempt(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, job_file(goal=NUM))
        await is_accepted(clients[0].report_inline(work[0].token, contents()[0]))
    shutil.rmtree(folder / "uploads")
    (path,) = list_segments(folder / "segments")
    (record,) = read_records(path)
    with path.open("r+b") as file:
        file.seek(record.part.start + 1000)
        file.write(bytes(range(100)))
    database = f"sqlite:///{folder / 'fedplat.sqlite'}"
    (finding,) = (await verify(database, folder)).findings
    assert (finding.invariant, finding.found) == ("I3", f"its update is damaged in {path}")
    async with daemons.running(folder) as site:
        await site.operator.until(job, "attempt", "ABANDONED")
    assert (await verify(database, folder)).findings == []


@pytest.mark.parametrize("text", ['durability = "memory"\n' + job_file(goal=NUM), job_file(goal=NUM, more=PRIVATE)])
async def test_jobs_whose_updates_must_be_erased_one_by_one_have_no_records(site: Site, text: str) -> None:
    if "[privacy]" in text:
        text = text.replace("[selection]", '[selection]\nclose = "deadline"', 1)
    _, clients, work = await begun(site, text)
    await is_accepted(clients[0].report_inline(work[0].token, contents()[0]))
    assert records(site.folder) == set()
    assert bool(uploads(site.folder)) == ("memory" not in text)


async def test_two_reports_of_one_update_have_one_record(site: Site) -> None:
    _, clients, work = await begun(site, job_file(goal=NUM))
    content = contents()[0]
    calls = [clients[0].report_inline(work[0].token, content) for _ in range(2)]
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert any(not isinstance(reply, BaseException) and reply.HasField("receipt") for reply in replies)
    with contextlib.suppress(aio.AioRpcError):
        await clients[0].report_inline(work[0].token, content)
    await is_accepted(clients[0].report(work[0].token, digest_of(content)))
    assert records(site.folder) == {digest_of(content)}
    assert np.isfinite(MODEL.to_vector()).all()


async def test_a_quick_upload_needs_no_transaction(site: Site) -> None:
    _, clients, work = await begun(site, job_file(goal=NUM))
    before = site.store.calls["save"]
    await clients[0].upload(work[0].token, contents()[0])
    assert site.store.calls["save"] == before
    await is_accepted(clients[0].report(work[0].token, digest_of(contents()[0])))
    assert site.store.calls["save"] == before + 1


@pytest.mark.parametrize("name", ["QUICK_UPLOAD_S", "MUCH_TIME_S"])
async def test_a_client_that_uploads_for_long_or_late_has_more_time(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """That of the upload: its state tells."""
    monkeypatch.setattr(report_intake, name, {"QUICK_UPLOAD_S": 0.0, "MUCH_TIME_S": 1e9}[name])
    job, clients, work = await begun(site, job_file(goal=NUM))
    await clients[0].upload(work[0].token, contents()[0])
    await site.operator.until(job, "assignment", "UPLOADING")
