"""The services for operators have the same outcomes over gRPC and over HTTP/1.1, also those with streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from fedplat.wire.auth import METADATA_CODE
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, events_pb2, events_pb2_grpc
from fedplat_server.config import Limits
from support import daemons
from support.access import ADMIN_TOKEN, authorized
from support.daemons import Site, digest_of, initial_model, update_of
from support.http_channel import STREAM, Answer, HttpPeer, HttpStubChannel, envelope, headers_of
from support.jobs import job_file

pytestmark = [pytest.mark.slow, pytest.mark.calm("what the store does has nothing to do with the transport")]
JOBS = "/fedplat.wire.v1.Jobs/"


@pytest.fixture
async def site(folder: Path) -> AsyncGenerator[Site]:
    limits = Limits(refusal_delay_s=0.0, idle_s=2.0)
    async with daemons.running(folder, limits=limits, http_listen="127.0.0.1:0", http_operators=True) as site:
        yield site


def http(site: Site) -> aio.Channel:
    return cast(aio.Channel, HttpStubChannel(HttpPeer(site.daemon.http_port)))


def both(site: Site, stub: Any) -> list[Any]:
    """An operator's stubs over gRPC and over HTTP/1.1."""
    return [authorized(stub(channel), ADMIN_TOKEN) for channel in (site.channel, http(site))]


def model_parts(size: int) -> list[admin_pb2.UploadModelRequest]:
    content = initial_model().to_bytes()
    starts = range(0, len(content), size)
    return [admin_pb2.UploadModelRequest(data=content[start : start + size]) for start in starts]


async def test_a_model_a_job_and_its_events_are_the_same(site: Site) -> None:
    """Each of the four methods with a stream, and unary ones between them."""
    grpc_jobs, http_jobs = both(site, admin_pb2_grpc.JobsStub)
    uploaded = [await jobs.UploadModel(iter(model_parts(7))) for jobs in (grpc_jobs, http_jobs)]
    assert uploaded[0] == uploaded[1]
    request = admin_pb2.CreateJobRequest(
        job_file=job_file("one", goal=1), initial_digest=uploaded[1].digest, idempotency_key="only one job"
    )
    job = (await http_jobs.CreateJob(request)).job_id
    assert (await http_jobs.StartJob(admin_pb2.JobRequest(job=job))).status == admin_pb2.JOB_STATUS_RUNNING
    client, content = await site.enroll(), update_of(initial_model(), seed=1).to_bytes()
    token = (await client.assignment()).token
    await client.upload(token, content)
    await client.report(token, digest_of(content))
    await site.operator.until(job, "job", "COMPLETED")
    found = list[list[Any]]()
    for jobs, stub in zip((grpc_jobs, http_jobs), both(site, events_pb2_grpc.EventsStub), strict=True):
        # The job has ended: this watch ends by itself. The one of all events continues, and is left.
        events = [each async for each in jobs.WatchJob(admin_pb2.WatchJobRequest(job=job))]
        assert events[-1].to_state == "COMPLETED"
        exported = [each async for each in jobs.ExportModel(admin_pb2.ExportModelRequest(job=job))]
        stream = stub.WatchEvents(events_pb2.WatchEventsRequest(after_sequence=0, job=job))
        told = await first(stream)
        listed = await jobs.ListJobs(admin_pb2.ListJobsRequest())
        found.append([events, exported[0].model, b"".join(each.data for each in exported), told, listed])
    assert found[0] == found[1]


async def test_refusals_of_streams_are_the_same(site: Site) -> None:
    found = list[dict[str, tuple[str, str, str]]]()
    for index, jobs in enumerate(both(site, admin_pb2_grpc.JobsStub)):
        anyone = admin_pb2_grpc.JobsStub((site.channel, http(site))[index])
        watch, export = admin_pb2.WatchJobRequest(job="no"), admin_pb2.ExportModelRequest(job="no")
        found.append(
            {
                "watch": await outcome(first(jobs.WatchJob(watch))),
                "export": await outcome(first(jobs.ExportModel(export))),
                "anyone": await outcome(first(anyone.WatchJob(watch))),
                "upload": await outcome(jobs.UploadModel(iter([admin_pb2.UploadModelRequest(data=b"junk")]))),
                "nothing": await outcome(jobs.UploadModel(iter([]))),
                "stranger": await outcome(anyone.UploadModel(iter(model_parts(100)))),
            }
        )
    assert found[0] == found[1]
    assert "None" not in {code for _, code, _ in found[0].values()}


async def first(stream: Any) -> Any:
    return await anext(aiter(stream))


async def outcome(call: Any) -> tuple[str, str, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    return caught.value.code().name, str(trailing.get(METADATA_CODE)), caught.value.details() or ""


async def test_bodies_that_are_no_envelopes_are_refused(site: Site) -> None:
    peer = HttpPeer(site.daemon.http_port)
    metadata = [("authorization", f"Bearer {ADMIN_TOKEN}")]
    watch = admin_pb2.WatchJobRequest(job="no").SerializeToString()

    async def refusal(method: str, body: bytes, **headers: str) -> tuple[str, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await peer.post(JOBS + method, body, {**headers_of(metadata, STREAM), **named})
        assert answer.status == 200
        return refused(answer)

    assert await refusal("WatchJob", watch) == ("invalid_argument", "INVALID_REQUEST")
    assert await refusal("WatchJob", b"") == ("invalid_argument", "INVALID_REQUEST")
    assert await refusal("WatchJob", envelope(watch) * 2) == ("invalid_argument", "INVALID_REQUEST")
    assert await refusal("WatchJob", envelope(watch)[:-1]) == ("invalid_argument", "INVALID_REQUEST")
    assert await refusal("WatchJob", envelope(watch, 1)) == ("invalid_argument", "INVALID_REQUEST")
    assert await refusal("WatchJob", envelope(b"\xff\xff")) == ("invalid_argument", "INVALID_REQUEST")
    assert (await refusal("WatchJob", envelope(bytes(2**20))))[1] == "TOO_LARGE"
    assert await refusal("UploadModel", b"\0\0\0") == ("invalid_argument", "INVALID_REQUEST")
    assert await refusal("UploadModel", envelope(bytes(10))[:-1]) == ("invalid_argument", "INVALID_REQUEST")
    assert (await refusal("UploadModel", b"\0\xff\xff\xff\xff"))[1] == "TOO_LARGE"
    for name, value in (("content-type", "application/proto"), ("connect-content-encoding", "gzip")):
        answer = await peer.post(JOBS + "WatchJob", envelope(watch), {**headers_of(metadata, STREAM), name: value})
        assert (answer.status, json.loads(answer.body)["code"]) == (415, "invalid_argument")


def refused(answer: Answer) -> tuple[str, str]:
    """The status and the code in the only envelope of a response."""
    assert (answer.body[0], int.from_bytes(answer.body[1:5], "big")) == (2, len(answer.body) - 5)
    said = json.loads(answer.body[5:])
    return said["error"]["code"], said["metadata"]["fedplat-code"][0]


async def test_a_watch_ends_with_its_caller_and_with_the_server(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    _, jobs = both(site, admin_pb2_grpc.JobsStub)
    stream = aiter(jobs.WatchJob(admin_pb2.WatchJobRequest(job=job)))
    assert (await anext(stream)).entity == "job"
    left = watches()
    assert left
    await stream.aclose()
    await asyncio.wait(left, timeout=daemons.PATIENCE_S)
    assert not watches()
    again = aiter(jobs.WatchJob(admin_pb2.WatchJobRequest(job=job)))
    assert (await anext(again)).entity == "job"
    site.daemon.stop()
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in again:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def watches() -> list[asyncio.Task[Any]]:
    """The tasks that serve requests over HTTP whose callers have sent everything."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "HTTP caller"]
