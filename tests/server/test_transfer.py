"""Bytes on the wire: models to clients, updates from them, cut and resumed anywhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from msgspec.structs import force_setattr

from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_server.config import Limits
from fedplat_server.errors import RefusedError
from fedplat_server.messages import streams
from fedplat_server.storage.blobs import Blob, BlobStore
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, update_of
from support.jobs import job_file
from support.raw_client import PATIENCE_S

UPDATE = update_of(initial_model(), 0).to_bytes()
DIGEST = digest_of(UPDATE)


async def refused(call: aio.Call | object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    return caught.value.code(), caught.value.details() or ""


async def working(site: Site) -> tuple[RawClient, str]:
    """A client with an open assignment."""
    await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    return client, (await client.assignment()).token


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_model_is_not_closed_while_a_thread_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancellations: int
) -> None:
    """The caller leaves: the number of a closed file's descriptor would belong to the next file, say the database."""
    is_writing, may_write, written = asyncio.Event(), threading.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def write_all(descriptor: int, data: bytes) -> None:
        loop.call_soon_threadsafe(is_writing.set)
        may_write.wait(PATIENCE_S)
        written.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    async def parts() -> AsyncIterator[bytes]:
        yield b"part"

    monkeypatch.setattr(streams.durable, "write_all", write_all)
    storing = asyncio.ensure_future(streams.store_model(BlobStore(tmp_path), parts(), 100))
    await is_writing.wait()
    for _ in range(cancellations):
        storing.cancel()
        await asyncio.sleep(0)
    loop.call_later(0.01, may_write.set)
    with pytest.raises(asyncio.CancelledError):
        await storing
    assert [name.partition("-")[0] for name in written] == ["incoming"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F14")
async def test_an_upload_resumes_where_it_stopped(site: Site) -> None:
    client, token = await working(site)
    assert await client.query(token, DIGEST) == 0
    assert (await client.upload(token, UPDATE, end=100)).received_bytes == 100
    assert await client.query(token, DIGEST) == 100
    code, text = await refused(client.upload(token, UPDATE))
    assert (code, "resume at 100" in text) == (grpc.StatusCode.OUT_OF_RANGE, True)
    assert (await client.upload(token, UPDATE, offset=100)).received_bytes == len(UPDATE)
    assert (await client.report(token, DIGEST)).HasField("receipt")


@pytest.mark.calm
@pytest.mark.fault("F14")
async def test_a_stream_that_is_cut_keeps_what_had_arrived(site: Site) -> None:
    client, token = await working(site)
    sent, cut = asyncio.Event(), asyncio.Event()

    header = fleet_pb2.UploadHeader(token=token, digest=DIGEST, size_bytes=len(UPDATE))
    first = fleet_pb2.UploadRequest(header=header)

    async def half() -> AsyncIterator[fleet_pb2.UploadRequest]:
        yield first
        yield fleet_pb2.UploadRequest(data=UPDATE[:64])
        sent.set()
        await cut.wait()

    call = client.stub.Upload(half(), metadata=client.signed("Upload", first))
    await sent.wait()

    async def arrived() -> bool:
        return await client.query(token, DIGEST) == 64

    await daemons.until(arrived, "64 bytes")
    call.cancel()
    cut.set()
    assert (await client.upload(token, UPDATE, offset=64)).received_bytes == len(UPDATE)
    assert (await client.report(token, DIGEST)).HasField("receipt")


@pytest.mark.fault("F14")
async def test_a_report_before_the_upload_is_complete(site: Site) -> None:
    client, token = await working(site)
    await client.upload(token, UPDATE, end=10)
    code, text = await refused(client.report(token, DIGEST))
    assert (code, "QueryUpload" in text) == (grpc.StatusCode.ABORTED, True)
    await client.upload(token, UPDATE, offset=10)
    assert (await client.report(token, DIGEST)).HasField("receipt")


@pytest.mark.fault("F14")
async def test_bytes_that_were_damaged_on_the_way_start_again(site: Site) -> None:
    client, token = await working(site)
    damaged = UPDATE[:-1] + bytes([UPDATE[-1] ^ 1])
    code, text = await refused(client.upload(token, damaged, digest=DIGEST))
    assert (code, "resume at 0" in text) == (grpc.StatusCode.OUT_OF_RANGE, True)
    assert await client.query(token, DIGEST) == 0
    assert (await client.deliver(token, UPDATE)).HasField("receipt")


@pytest.mark.fault("F23")
async def test_streams_that_do_not_begin_with_a_header(site: Site) -> None:
    client, _ = await working(site)
    for messages in ([], [fleet_pb2.UploadRequest(data=b"x")], [fleet_pb2.UploadRequest()]):
        call = client.stream(lambda sent=messages: iter(sent), next(iter(messages), None))
        assert (await refused(call))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.calm  # a retry after a lost reply is told that the assignment is over
@pytest.mark.fault("F22")
async def test_more_bytes_than_announced_or_allowed(site: Site) -> None:
    client, token = await working(site)
    code, _ = await refused(client.upload(token, UPDATE, size_bytes=100))
    assert code is grpc.StatusCode.OUT_OF_RANGE
    code, text = await refused(client.upload(token, UPDATE, size_bytes=2**62))
    assert (code, "at most" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    # It will never fit, so the assignment is over.
    stop = (await client.heartbeat(token, 0.0)).stop
    assert daemons.reason_name(stop.reason) == "REJECTED_SCHEMA"


@pytest.mark.fault("F23")
async def test_invalid_digests(site: Site) -> None:
    client, token = await working(site)
    for digest in ("", "../" * 20, "A" * 64, "0" * 63, "../../etc/passwd".ljust(64, "x")):
        for call in (
            client.upload(token, UPDATE, digest=digest),
            client.query(token, digest),
            client.download(digest),
            client.report(token, digest),
        ):
            assert (await refused(call))[0] is grpc.StatusCode.INVALID_ARGUMENT, digest


@pytest.mark.fault("F21")
async def test_another_clients_token_opens_nothing(site: Site) -> None:
    client, token = await working(site)
    thief = await site.enroll()
    assert (await refused(thief.upload(token, UPDATE)))[0] is grpc.StatusCode.NOT_FOUND
    assert (await refused(thief.query(token, DIGEST)))[0] is grpc.StatusCode.NOT_FOUND
    assert daemons.reason_name((await thief.report(token, DIGEST)).refusal.reason) == "STALE"
    assert await thief.stop_reason(token, 0.0) == "STALE"
    await thief.fail(token, model_pb2.REASON_TRAINER_ERROR)
    assert (await client.heartbeat(token, 0.0)).HasField("proceed")
    assert (await client.deliver(token, UPDATE)).HasField("receipt")


async def test_downloads_from_any_offset(site: Site) -> None:
    client, _ = await working(site)
    content = initial_model().to_bytes()
    digest = digest_of(content)
    for offset in (0, 1, len(content) - 1, len(content)):
        assert await client.download(digest, offset) == content[offset:]
    for offset, length in ((0, 1), (1, 7), (len(content) - 1, 5), (5, 2**64 - 1)):
        assert await client.download(digest, offset, length) == content[offset : offset + length]
    for offset in (len(content) + 1, 2**63, 2**64 - 1):
        assert (await refused(client.download(digest, offset)))[0] is grpc.StatusCode.OUT_OF_RANGE


async def test_models_of_another_population_cannot_be_downloaded(site: Site) -> None:
    await working(site)
    digest = digest_of(initial_model().to_bytes())
    stranger = await site.enroll("other")
    assert (await refused(stranger.download(digest)))[0] is grpc.StatusCode.NOT_FOUND
    assert (await refused(stranger.download("0" * 64)))[0] is grpc.StatusCode.NOT_FOUND


async def test_an_uploaded_update_cannot_be_downloaded(site: Site) -> None:
    client, token = await working(site)
    await client.upload(token, UPDATE)
    assert (await refused(client.download(DIGEST)))[0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.fault("F17")
async def test_idle_streams_and_too_many_of_them_are_ended(folder: Path) -> None:
    limits = Limits(refusal_delay_s=0.0, max_calls=3)
    async with daemons.running(folder, limits=limits) as site:
        client, token = await working(site)

        header = fleet_pb2.UploadHeader(token=token, digest=DIGEST, size_bytes=len(UPDATE))
        first = fleet_pb2.UploadRequest(header=header)

        async def silent() -> AsyncIterator[fleet_pb2.UploadRequest]:
            yield first
            await over.wait()

        over = asyncio.Event()
        force_setattr(limits, "idle_s", 0.2)  # for this call only: the others may be slow
        code, _ = await refused(client.stub.Upload(silent(), metadata=client.signed("Upload", first)))
        force_setattr(limits, "idle_s", 60.0)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        over.set()
        beats = [client.heartbeat(token) for _ in range(3)]

        async def more_until_full() -> bool:
            beats.append(client.heartbeat(token))  # an earlier one may have come before the stream was gone
            return await full()

        async def full() -> bool:
            try:
                await client.query(token, DIGEST)
            except aio.AioRpcError as exc:
                return exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False

        await daemons.until(more_until_full, "the limit of calls")
        other = await site.enroll()
        await other.refusal()
        for beat in beats:
            beat.cancel()

        async def free() -> bool:
            return not await full()

        await daemons.until(free, "calls to be free again")


@pytest.mark.fault("F14")
async def test_uploads_of_an_ended_attempt_leave_nothing_behind(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, over_selection=2.0))
    one, two = await site.fleet(2)
    first, second = await site.assign([one, two])
    await two.upload(second.token, UPDATE, end=100)
    await one.deliver(first.token, UPDATE)
    await site.operator.until(job, "job", "COMPLETED")
    assert (await refused(two.upload(second.token, UPDATE, offset=100)))[0] is grpc.StatusCode.NOT_FOUND
    await daemons.until_spool_is_empty(site.folder)


async def test_the_parts_of_a_model_are_limited_together(tmp_path: Path) -> None:
    blobs, content = BlobStore(tmp_path / "blobs"), initial_model().to_bytes()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 10):
            yield content[start : start + 10]

    with pytest.raises(RefusedError, match=f"a model may have at most {len(content) - 1} bytes"):
        await streams.store_model(blobs, parts(), len(content) - 1)
    assert [path for path in blobs.folder.rglob("*") if path.is_file()] == []
    assert await streams.store_model(blobs, parts(), len(content)) == Blob(digest_of(content), len(content))
