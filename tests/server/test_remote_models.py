"""Daemons whose models are in an object store: SeaweedFS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedplat_server.config import LeaseTimes
from fedplat_server.errors import ConfigError
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.storage.object_store import ObjectStore
from fedplat_server.verify.inspection import verify
from support import daemons
from support.commands import here
from support.daemons import Site, digest_of, initial_model, update_of
from support.jobs import job_file
from support.polling import BIN
from support.seaweedfs import SeaweedFS
from support.store_proxy import NO_SPACE, store_proxy

pytestmark = pytest.mark.calm
TIMES = LeaseTimes(valid_s=60.0, renew_s=0.2, margin_s=1.0, poll_s=0.05)


async def train(site: Site, rounds: int = 1) -> str:
    """A job of one client to its end."""
    job = await site.operator.start(job_file(goal=1, rounds=rounds))
    client = await site.enroll()
    for number in range(rounds):
        (assignment,) = await site.assign([client])
        answer = await client.deliver(assignment.token, update_of(initial_model(), number))
        assert answer.HasField("receipt")
        await site.operator.until(job, "version", str(number + 1))
    assert (await site.operator.events(job))[-1].to_state == "COMPLETED"
    return job


async def test_a_leader_on_another_host_has_all_models(s3: SeaweedFS, tmp_path: Path, postgres: str) -> None:
    url = s3.url()
    async with daemons.running(tmp_path / "one", database=postgres, lease=TIMES, blobs=url) as site:
        job = await train(site)
        model = await site.operator.export(job)
    shutil.rmtree(tmp_path / "one")
    place = BlobPlace(tmp_path / "two", url)
    async with daemons.running(tmp_path / "two", database=postgres, lease=TIMES, blobs=url) as site:
        assert await site.operator.export(job) == model
        assert place.open().path(digest_of(model)).is_file()
    report = await verify(postgres, tmp_path / "two", blobs=place)
    assert (report.findings, report.notes) == ([], [])
    name = next(stored.name for stored in ObjectStore(url).list() if stored.name.endswith(digest_of(model)))
    ObjectStore(url).delete([name])
    (finding,) = (await verify(postgres, tmp_path / "two", blobs=place)).findings
    assert (finding.invariant, name in finding.expected) == ("I2", True)


async def test_the_models_of_a_data_folder_move(s3: SeaweedFS, folder: Path) -> None:
    async with daemons.running(folder) as site:
        model = await site.operator.export(await train(site))
    place = BlobPlace(folder, s3.url())
    async with daemons.running(folder, blobs=place.url) as site:
        pass
    assert place.open().fetch(digest_of(model)).read_bytes() == model
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, blobs=place)
    assert (report.findings, report.notes) == ([], [])


async def test_the_store_of_another_database_is_refused(s3: SeaweedFS, folder: Path, postgres: str) -> None:
    url = s3.url()
    async with daemons.running(folder, blobs=url) as site:
        await train(site)
    before = {stored.name: stored.modified_unix_s for stored in ObjectStore(url).list()}
    with pytest.raises(ConfigError, match="belongs to another database"):
        async with daemons.running(folder.parent / "other", database=postgres, lease=TIMES, blobs=url):
            pass
    assert {stored.name: stored.modified_unix_s for stored in ObjectStore(url).list()} == before


@pytest.mark.fault("F7")
async def test_a_full_store_refuses_models_until_it_has_room(
    s3: SeaweedFS, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        async with daemons.running(folder, blobs=s3.url()) as site:
            proxy.fail(NO_SPACE)
            with pytest.raises(aio.AioRpcError, match="full") as caught:
                await site.operator.upload(initial_model())
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            proxy.fail(None)
            await train(site)


@pytest.mark.slow
def test_wrong_settings_are_refused_at_the_start(
    s3: SeaweedFS, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--data-dir", str(folder), "--blobs")
    serve = ("run", "--insecure", "--listen", "127.0.0.1:0", *where)
    status, _, text = here(monkeypatch, capsys, *serve, "ftp://x/y")
    assert (status, "expected a folder, or a URL such as s3://bucket/prefix" in text) == (2, True), text
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    started = subprocess.run(
        [str(BIN / "fedplat-server"), *serve, s3.url()], capture_output=True, text=True, check=False
    )
    checked, _, said = here(monkeypatch, capsys, "verify", *where, s3.url())
    for status, text in ((started.returncode, started.stderr), (checked, said)):
        assert (status, "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in text) == (1, True), text
        assert "Traceback" not in text
        assert "wrong-and-secret" not in text
