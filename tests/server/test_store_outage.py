"""A daemon whose object store fails: no report is acknowledged that is not stored, and the rounds go on afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedplat import wire
from fedplat.wire.v1 import admin_pb2
from fedplat_server.cli import options
from fedplat_server.errors import BlobError, ConfigError
from fedplat_server.storage import spool_backend
from fedplat_server.storage.object_store import ObjectStore, RequestLimits
from fedplat_server.storage.spool_backend import list_names
from fedplat_server.verify.inspection import verify
from support import daemons, databases
from support.daemons import RawClient, Site, digest_of, initial_model, update_of
from support.jobs import job_file
from support.seaweedfs import SeaweedFS
from support.store_proxy import AWAY, INTERNAL, QUOTA, SLOW_DOWN, Fault, StoreProxy, store_proxy

pytestmark = [pytest.mark.calm, pytest.mark.fault("F52")]
UPDATES = [update_of(initial_model(), seed).to_bytes() for seed in range(2)]
REFUSED = Fault(403, "AccessDenied")


@pytest.fixture
def proxy(s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Generator[StoreProxy]:
    """What stands between the daemon and the store, which it asks once for each report."""
    monkeypatch.setattr(
        spool_backend, "REQUEST_LIMITS", RequestLimits(connect_s=5.0, request_s=60.0, retry_s=1.0, max_retries=0)
    )
    with store_proxy(s3.endpoint) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.fixture
def url(s3: SeaweedFS) -> str:
    return s3.url()


@contextlib.asynccontextmanager
async def running(folder: Path, url: str) -> AsyncGenerator[Site]:
    """A daemon with its spool in the store, in which nothing is left at the end, and nothing is broken."""
    async with daemons.running(folder, spool=url) as site:
        yield site
    assert list(list_names(ObjectStore(url))) == []
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, uploads=url)
    assert (report.findings, report.notes) == ([], [])


async def alert_names(site: Site) -> list[str]:
    return [alert.name for alert in (await site.status()).alerts if alert.name != "disk_low"]


async def is_refused(call: object, status: grpc.StatusCode, code: str) -> None:
    """The call fails with this code and a window for the next try."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    trailers = dict(caught.value.trailing_metadata() or ())
    assert (caught.value.code(), trailers["fedplat-code"]) == (status, code), caught.value.details()
    earliest, latest = map(float, str(trailers[wire.METADATA_RETRY]).split())
    assert 0.0 < earliest < latest


async def reported(site: Site, job: str) -> int:
    (round_,) = await site.operator.rounds(job)
    return round_.reported


async def working(site: Site, goal: int = 2) -> tuple[str, list[RawClient], list[str]]:
    """A job with clients at work."""
    job = await site.operator.start(job_file(goal=goal))
    clients = await site.fleet(goal)
    return job, clients, [each.token for each in await site.assign(clients)]


@pytest.mark.parametrize("fault", [AWAY, SLOW_DOWN, INTERNAL, REFUSED], ids=["away", "slow down", "internal", "key"])
async def test_no_report_is_acknowledged_before_its_update_is_stored(
    folder: Path, url: str, proxy: StoreProxy, fault: Fault
) -> None:
    async with running(folder, url) as site:
        job, (one, two), tokens = await working(site)
        await one.upload(tokens[0], UPDATES[0])  # bytes come in without the store
        proxy.fail(fault)
        unavailable = grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"
        await is_refused(one.report(tokens[0], digest_of(UPDATES[0])), *unavailable)
        for _ in range(6):  # more often than the quota allows a client without an excuse
            await is_refused(two.report_inline(tokens[1], UPDATES[1]), *unavailable)
        assert await reported(site, job) == 0
        (alert,) = [each for each in (await site.status()).alerts if each.name == "object_store_failing"]
        assert alert.severity == admin_pb2.ALERT_SEVERITY_CRITICAL
        assert url in alert.text
        assert "AWS_" in alert.remedy
        assert await one.query(tokens[0], digest_of(UPDATES[0])) == len(UPDATES[0])
        proxy.fail(None)
        assert (await one.report(tokens[0], digest_of(UPDATES[0]))).HasField("receipt")
        assert await alert_names(site) == []
        assert (await two.report_inline(tokens[1], UPDATES[1])).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F7")
async def test_a_full_store_is_an_alert_of_its_own(folder: Path, url: str, proxy: StoreProxy) -> None:
    async with running(folder, url) as site:
        job, (one, two), tokens = await working(site)
        proxy.fail(QUOTA)
        await is_refused(one.report_inline(tokens[0], UPDATES[0]), grpc.StatusCode.RESOURCE_EXHAUSTED, "STORAGE_FULL")
        (alert,) = [each for each in (await site.status()).alerts if each.name == "object_store_failing"]
        assert "no room" in alert.text
        assert "storage_full" in await alert_names(site)
        assert await reported(site, job) == 0
        proxy.fail(None)
        assert (await one.report_inline(tokens[0], UPDATES[0])).HasField("receipt")
        assert (await two.report_inline(tokens[1], UPDATES[1])).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.slow
async def test_a_slow_store_delays_nobody_else(folder: Path, url: str, proxy: StoreProxy) -> None:
    """All threads for the store wait for it; jobs in memory, uploads and operators do not."""
    async with running(folder, url) as site:
        slow = await site.operator.start(job_file("slow", goal=spool_backend.THREADS + 1))
        clients = await site.fleet(spool_backend.THREADS + 1)
        work = await site.assign(clients)
        proxy.hold()
        reports = [
            asyncio.ensure_future(client.report_inline(each.token, UPDATES[0]))
            for client, each in zip(clients, work, strict=True)
        ]
        await asyncio.to_thread(proxy.wait_for_held, spool_backend.THREADS)
        quick = await site.operator.start('durability = "memory"\n' + job_file("quick", goal=1))
        client = await site.enroll()
        await client.deliver((await client.assignment()).token, initial_model())
        await site.operator.until(quick, "job", "COMPLETED")
        assert not any(report.done() for report in reports)
        proxy.release()
        assert all(response.HasField("receipt") for response in await asyncio.gather(*reports))
        await site.operator.until(slow, "job", "COMPLETED")


@pytest.mark.fault("F2")
async def test_an_outage_while_updates_are_fetched_fails_no_attempt(folder: Path, url: str, proxy: StoreProxy) -> None:
    """The next leader has another disk, and the store goes away after its start."""
    async with daemons.running(folder, spool=url) as site:
        job, (one, two), tokens = await working(site)
        assert (await one.report_inline(tokens[0], UPDATES[0])).HasField("receipt")
    for path in (folder / "uploads").rglob("*"):
        assert path.is_dir() or not path.unlink()
    proxy.fail(Fault(503, "SlowDown", lambda method, path: method == "GET" and "/term-" in path))
    async with running(folder, url) as site:
        await asyncio.to_thread(proxy.wait_for_failures, 3)
        assert (await site.operator.show(job)).status == admin_pb2.JOB_STATUS_RUNNING
        proxy.fail(None)
        again = RawClient(site.channel, two.key)
        again.client_id = two.client_id
        await again.open_session()
        assert (await again.report_inline(tokens[1], UPDATES[1])).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        (attempt,) = await site.operator.rounds(job)
        assert attempt.attempt == 1


@pytest.mark.parametrize("place", ["store", "folder"])
async def test_a_place_of_another_database_is_refused_and_left_alone(
    folder: Path, url: str, s3: SeaweedFS, tmp_path: Path, place: str
) -> None:
    where = url if place == "store" else str(tmp_path / "spool")
    async with daemons.running(folder, spool=where) as site:
        job, (one, _), tokens = await working(site)
        assert (await one.report_inline(tokens[0], UPDATES[0])).HasField("receipt")
    other = tmp_path / "other"
    other.mkdir()
    databases.create_sqlite(other / "fedplat.sqlite")
    with pytest.raises(ConfigError, match=f"{where} belongs to another database"):
        async with daemons.running(other, spool=where):
            raise AssertionError("it started")
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, uploads=where)
    assert (report.findings, report.checked["updates"]) == ([], 1)
    async with daemons.running(folder, spool=where) as site:
        assert (await site.operator.show(job)).status == admin_pb2.JOB_STATUS_RUNNING


async def test_verify_finds_copies_that_are_lost_damaged_or_needless(folder: Path, url: str, s3: SeaweedFS) -> None:
    async with daemons.running(folder, spool=url) as site:
        _, clients, tokens = await working(site, goal=3)
        for client, token, update in zip(clients, tokens, UPDATES, strict=False):
            assert (await client.report_inline(token, update)).HasField("receipt")
    store = ObjectStore(url)
    lost, damaged = list_names(store)
    store.delete([str(lost)])
    store.put(str(damaged), b"not an update")
    store.put(str(damaged._replace(update="0" * 64)), b"of no assignment")
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, uploads=url)
    assert {(each.invariant, each.found.partition("has the")[0]) for each in report.findings} == {
        ("I3", "its update is not there"),
        ("I3", "its update "),
    }
    assert report.notes == [
        f"1 copies of updates in {url} belong to no open assignment; they are removed with the attempt, or by the next "
        "start of the daemon"
    ]


@pytest.mark.parametrize("url", ["s3:/bucket/x", "ftp://x/y", "s3://", "s3://key:secret@bucket/x", "s3://a/../b"])
def test_a_url_that_no_daemon_could_use_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--spool: .*expected a URL such as s3://bucket/prefix") as caught:
        options.parse_spool(url)
    assert "secret" not in str(caught.value)


def test_a_spool_may_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (options.parse_spool("spool"), options.parse_spool("")) == (str(tmp_path / "spool"), "")


async def test_a_daemon_does_not_start_with_a_wrong_key(
    folder: Path, url: str, s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(BlobError, match="the key does not allow this"):
        async with daemons.running(folder, spool=url):
            raise AssertionError("it started")
