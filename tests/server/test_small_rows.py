"""Small updates and models are rows of the database: no file is needed, and none is synced for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.database import sql_contents
from fedplat_server.errors import StoreError, StoreFullError, StoreUnavailableError
from fedplat_server.storage import segments, spool
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, update_of
from support.jobs import job_file

pytestmark = pytest.mark.calm("says itself what fails when")
MOMENTUM = '[aggregation]\nrule = "fedavgm"\nmomentum = 0.5\n'
PRIVATE = (
    '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
    '[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = 4.0\n'
)
UPDATES = [update_of(initial_model(), seed) for seed in range(2)]


def rows(folder: Path, table: str) -> dict[str, bytes]:
    """The contents in a table by digest."""
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite")) as connection:
        return dict(connection.execute(f"SELECT digest, content FROM {table}").fetchall())


def uploads(folder: Path) -> list[Path]:
    return [path for path in (folder / "uploads").rglob("*") if path.is_file()]


async def begun(site: Site, text: str, num_clients: int = 2) -> tuple[str, list[RawClient], list[fleet_pb2.Assignment]]:
    job = await site.operator.start(text)
    clients = await site.fleet(num_clients)
    return job, clients, await site.assign(clients)


async def is_refused(call: object, code: grpc.StatusCode) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    assert caught.value.code() is code, caught.value.details()


async def test_a_small_update_needs_no_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise AssertionError("a thread costs more than the work")

    monkeypatch.setattr(spool.Spool, "run_in_thread", fail)
    job, (client,), (work,) = await begun(site, job_file(goal=1), 1)
    assert (await client.report_inline(work.token, UPDATES[0].to_bytes())).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F2", "F53")
async def test_a_daemon_with_none_of_the_files_continues_the_round(folder: Path) -> None:
    """As on another host: it has the database, and the initial model, which is no row."""
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, job_file(goal=2, rounds=2, more=MOMENTUM))
        for client, one, update in zip(clients, work, UPDATES, strict=True):
            assert (await client.report_inline(one.token, update.to_bytes())).HasField("receipt")
        await site.operator.until(job, "version", "1")
        assert (rows(folder, "update_contents"), uploads(folder)) == ({}, [])
        first = await site.operator.export(job, 1)
        work = await site.assign(clients)
        assert (await clients[0].report_inline(work[0].token, UPDATES[0].to_bytes())).HasField("receipt")
        assert uploads(folder) == []
    assert rows(folder, "update_contents") == {digest_of(UPDATES[0].to_bytes()): UPDATES[0].to_bytes()}
    blobs = rows(folder, "blob_contents")
    assert (len(blobs), blobs[digest_of(first)]) == (2, first)  # and the state of the rule
    for digest in blobs:
        (folder / "blobs" / digest[:2] / digest[2:4] / digest).write_bytes(b"torn")
    shutil.rmtree(folder / "uploads")
    async with daemons.running(folder) as site:
        assert await site.operator.export(job, 1) == first
        client = clients[1].over(site.channel)
        await client.open_session()
        assert (await client.report_inline((await client.assignment()).token, UPDATES[1].to_bytes())).HasField(
            "receipt"
        )
        await site.operator.until(job, "job", "COMPLETED")
        assert [(one.round, one.attempt) for one in await site.operator.rounds(job)] == [(1, 1), (2, 1)]
        mean = np.mean([update.to_vector() for update in UPDATES], axis=0, dtype=np.float64)
        expected = initial_model().to_vector() + 2.5 * mean
        np.testing.assert_allclose((await site.operator.model(job)).to_vector(), expected, rtol=1e-6)
    assert rows(folder, "update_contents") == {}
    assert blobs.items() < rows(folder, "blob_contents").items()


async def test_what_is_stopped_leaves_files_for_a_release_without_the_rows(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, job_file(goal=2))
        await clients[0].report_inline(work[0].token, UPDATES[0].to_bytes())
        assert uploads(folder) == []
    assert [path.read_bytes() for path in uploads(folder)] == [UPDATES[0].to_bytes()]
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite")) as connection, connection:
        connection.execute("DELETE FROM update_contents")
        connection.execute("INSERT INTO blob_contents VALUES (?, ?)", ("0" * 64, b"given up by a release without rows"))
    async with daemons.running(folder) as site:
        client = clients[1].over(site.channel)
        await client.open_session()
        await client.report_inline((await client.assignment()).token, UPDATES[1].to_bytes())
        await site.operator.until(job, "job", "COMPLETED")
        assert "0" * 64 not in rows(folder, "blob_contents")
    assert uploads(folder) == []


@pytest.mark.fault("F7", "F9")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreFullError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (StoreUnavailableError("away"), grpc.StatusCode.UNAVAILABLE),
        (StoreError("refused"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_report_that_is_not_stored_may_be_repeated_by_its_digest(
    site: Site, error: StoreError, code: grpc.StatusCode
) -> None:
    """The bytes are dropped with the event; the second report brings them along again, from memory."""
    job, (client, _), (work, _) = await begun(site, job_file(goal=2))
    content = UPDATES[0].to_bytes()

    async def fail() -> None:
        raise error

    site.store.before["save"] = fail
    await is_refused(client.report_inline(work.token, content), code)
    assert rows(site.folder, "update_contents") == {}
    del site.store.before["save"]

    async def accepted() -> bool:
        """The runner asks first whether the failed save was stored."""
        with contextlib.suppress(aio.AioRpcError):
            return (await client.report(work.token, digest_of(content))).HasField("receipt")
        return False

    await daemons.until(accepted, "a receipt")
    assert rows(site.folder, "update_contents") == {digest_of(content): content}
    assert (await client.report(work.token, digest_of(content))).HasField("receipt")
    assert job


@pytest.mark.parametrize("text", ['durability = "memory"\n' + job_file(goal=2), job_file(goal=2, more=PRIVATE)])
async def test_jobs_that_must_not_be_in_a_database_have_no_rows(site: Site, text: str) -> None:
    if "[privacy]" in text:
        text = text.replace("[selection]", '[selection]\nclose = "deadline"', 1)
    job, clients, work = await begun(site, text)
    await clients[0].report_inline(work[0].token, UPDATES[0].to_bytes())
    assert rows(site.folder, "update_contents") == {}
    assert bool(uploads(site.folder)) == ("memory" not in text)
    await clients[1].report_inline(work[1].token, UPDATES[1].to_bytes())
    await site.operator.until(job, "job", "COMPLETED")
    assert rows(site.folder, "blob_contents") == {}


async def test_larger_updates_and_models_and_those_beyond_the_number_are_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MAX_ROWS", 1)
    monkeypatch.setattr(segments, "MAX_BYTES", 0)
    model = Parameters.from_arrays({"weight": np.zeros(sql_contents.MAX_BYTES // 4, np.float32)})
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file(goal=2), model)
        clients = await site.fleet(2)
        work = await site.assign(clients)
        await clients[0].report_inline(work[0].token, model.to_bytes())
        assert len(uploads(folder)) == 1
        await clients[1].report_inline(work[1].token, model.to_bytes())
        await site.operator.until(job, "job", "COMPLETED")
        assert rows(folder, "blob_contents") == {}
        await daemons.until_spool_is_empty(folder)
        _, clients, work = await begun(site, job_file(goal=3), 3)
        for client, one in zip(clients[:2], work, strict=False):
            await client.report_inline(one.token, UPDATES[0].to_bytes())
        assert (len(rows(folder, "update_contents")), len(uploads(folder))) == (1, 1)


async def test_nothing_is_synced_for_a_small_update_and_a_small_model(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    job, clients, work = await begun(site, job_file(goal=2, more=MOMENTUM))
    monkeypatch.setattr(os, "fsync", synced.append)
    await asyncio.gather(
        *(
            client.report_inline(one.token, update.to_bytes())
            for client, one, update in zip(clients, work, UPDATES, strict=True)
        )
    )
    await site.operator.until(job, "job", "COMPLETED")
    assert synced == []
    assert site.store.calls["find_unreferenced"] == 0
