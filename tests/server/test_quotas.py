"""What one caller may use up: the arithmetic, and the refusals for a client that wants more."""

from __future__ import annotations

import asyncio
import doctest
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from fedplat import wire
from fedplat.rounds import AttemptKey
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.auth import client_directory, rate_limits
from fedplat_server.auth.rate_limits import Bucket, Buckets, MinimumRate, Quotas
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import streams
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, reason_name, update_of
from support.jobs import job_file
from support.raw_client import private_key

UPDATE = update_of(initial_model(), 0).to_bytes()
KEY = AttemptKey("j", 1, 1)


async def refusal_of(call: object) -> tuple[grpc.StatusCode, str, tuple[float, ...]]:
    """Status, code and retry window of a call that is refused."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    trailers = dict(caught.value.trailing_metadata() or ())
    window = tuple(map(float, str(trailers.get(wire.METADATA_RETRY, "")).split()))
    return caught.value.code(), str(trailers.get("fedplat-code")), window


# --- the arithmetic ---


def test_the_examples_of_the_docstrings_are_true() -> None:
    assert doctest.testmod(rate_limits).failed == 0


@given(per_minute=st.floats(1, 1e6), gaps=st.lists(st.floats(0, 100), min_size=1, max_size=50), backwards=st.booleans())
def test_a_bucket_gives_no_more_than_its_rate(per_minute: float, gaps: list[float], backwards: bool) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        bucket, wait_s = rate_limits.take(bucket, now, per_minute)
        taken += wait_s == 0.0
        assert 0.0 <= bucket.tokens <= per_minute
        if wait_s:  # and after that time there is a token
            assert rate_limits.take(bucket, now + wait_s * 1.001 + 1e-6, per_minute)[1] == 0.0
        if backwards:
            bucket, _ = rate_limits.take(bucket, now - 5.0, per_minute)  # a clock that is set back gives no tokens
    assert taken <= per_minute + now * per_minute / 60.0 + 1e-6


def test_callers_do_not_meet_and_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "MAX_REMEMBERED", 2)
    buckets = Buckets(1.0)
    buckets.take("one", 0.0)
    with pytest.raises(RefusedError) as caught:
        buckets.take("one", 0.0)
    assert caught.value.code is Code.TOO_MANY_REQUESTS
    assert caught.value.retry is not None
    assert caught.value.retry.min_s == 60.0
    for name in ("two", "three"):
        buckets.take(name, 0.0)
    buckets.take("one", 0.0)  # was forgotten


def test_a_stream_has_to_bring_so_many_bytes_in_each_window() -> None:
    progress = MinimumRate(10.0, 100.0, now=0.0)
    progress.on_received(99, now=9.0)
    assert progress.left_s(9.0) == 1.0
    progress.on_received(1, now=9.0)
    assert progress.left_s(9.0) == 10.0
    for second in range(10, 20):
        progress.on_received(1, now=float(second))  # a byte a second
    assert progress.left_s(19.0) == 0.0


def test_bytes_are_counted_for_each_attempt() -> None:
    spent = Quotas(Limits(max_upload_factor=2.0), lambda: 0.0)
    most = 2 * 1000
    spent.upload("c", KEY, 1000, most)
    spent.upload("d", KEY, 1000, most)
    with pytest.raises(RefusedError) as caught:
        spent.upload("c", KEY, 1000, 1)
    assert caught.value.code is Code.TOO_MANY_BYTES
    spent.upload("c", KEY._replace(number=2), 1000, most)


# --- what a client is told ---


async def working(site: Site) -> tuple[str, RawClient, str]:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    return job, client, (await client.assignment()).token


async def test_too_many_requests_of_one_client_harm_no_other(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(requests_per_minute=6.0)) as site:
        greedy, other = await site.fleet(2)
        for _ in range(5):
            await greedy.refusal()
        status, code, window = await refusal_of(greedy.check_in(0.0))
        assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert 1.0 <= window[0] <= 12.0 < window[1]
        await other.refusal()


@pytest.mark.calm("counts requests, and what failed counts too")
async def test_strangers_are_limited_by_their_address(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(anonymous_per_minute=6.0, challenges_per_minute=1.0)) as site:
        # A caller that proves to be a client is not charged in the end: any number of them may share an address.
        client, *_ = await site.fleet(5)
        thief = RawClient(site.channel, private_key("a thief"))
        for _ in range(6):
            status, _, _ = await refusal_of(thief.check_in(0.0))
            assert status is grpc.StatusCode.UNAUTHENTICATED
        for call in (thief.check_in(0.0), site.enroll()):
            status, code, window = await refusal_of(call)
            assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
            assert window[1] > window[0] > 0.0
        await client.refusal()  # a client at the same address is still served


@pytest.mark.calm("counts requests, and what failed counts too")
async def test_sessions_that_one_client_opens_are_counted(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(writes_per_minute=5.0)) as site:
        greedy, other = await site.fleet(2)  # each has opened one
        answers = await asyncio.gather(*(greedy.open_session() for _ in range(20)), return_exceptions=True)
        assert sum(answer is None for answer in answers) in (4, 5)
        status, code, _ = await refusal_of(greedy.open_session())
        assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        await other.open_session()
        assert site.store.calls["begin_sessions"] <= 8


@pytest.mark.calm("counts the calls of the store")
async def test_labels_that_change_with_each_check_in_are_stored_once_a_minute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(client_directory, "time", SimpleNamespace(time=time.time, monotonic=lambda: now))
    async with daemons.running(folder) as site:
        restless, other = await site.fleet(2)

        async def stored() -> str:
            found = await site.store.inner.clients.find_clients([restless.client_id])
            return found[restless.client_id].labels.get("n", "")

        for number in range(50):
            await restless.refusal(labels={"n": str(number)})
        await other.refusal(labels={"n": "7"})
        assert site.store.calls["update_client"] == 2
        assert await stored() == "0"
        job = await site.operator.start(job_file(goal=1, where="n == '51'"))
        await site.operator.until(job, "attempt", "SELECTING")
        assert (await restless.assignment(labels={"n": "51"})).job_id == job  # selected by labels not yet stored
        assert await stored() == "0"
        now += 60.0
        await restless.check_in(0.0, labels={"n": "52"})
        assert (site.store.calls["update_client"], await stored()) == (3, "52")


@pytest.mark.calm("streams by hand, and does not ask again")
@pytest.mark.fault("F17")
@pytest.mark.slow
async def test_a_byte_a_second_is_too_slow_and_harms_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message comes in time, but all of them together carry almost nothing."""
    begun = asyncio.Event()

    def enforce(messages: Any, limits: Limits) -> Any:
        """Only the first stream has to be fast: the other one may be slow on a slow machine."""
        first, hurry = not begun.is_set(), Limits(idle_s=2.0, min_bytes_per_s=100.0)
        begun.set()
        return really_enforce(messages, hurry if first else limits)

    really_enforce = streams.enforce_min_rate
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file(goal=2))
        slow, quick = await site.fleet(2)
        tokens = [assignment.token for assignment in await site.assign([slow, quick])]
        over = asyncio.Event()
        header = fleet_pb2.UploadHeader(token=tokens[0], digest=digest_of(UPDATE), size_bytes=len(UPDATE))
        first = fleet_pb2.UploadRequest(header=header)

        async def drip() -> AsyncIterator[fleet_pb2.UploadRequest]:
            yield first
            for byte in UPDATE[:3]:
                yield fleet_pb2.UploadRequest(data=bytes([byte]))
            await over.wait()  # a write that fails while the call ends would hide the server's status

        monkeypatch.setattr(
            streams, "enforce_min_rate", enforce
        )  # after the upload of the model, which is a stream too
        dripping = asyncio.ensure_future(refusal_of(slow.stub.Upload(drip(), metadata=slow.signed("Upload", first))))
        await begun.wait()
        assert (await quick.deliver(tokens[1], UPDATE)).HasField("receipt")
        status, code, window = await dripping
        over.set()
        assert (status, code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "TOO_SLOW")
        assert window[1] > 0.0
        have = await slow.query(tokens[0], digest_of(UPDATE))
        assert 0 < have < len(UPDATE)
        await slow.upload(tokens[0], UPDATE, offset=have)  # fast enough now, from its offset
        assert (await slow.report(tokens[0], digest_of(UPDATE))).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F17")
async def test_streams_of_one_client_are_counted(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(max_streams=2)) as site:
        _, client, token = await working(site)
        over = asyncio.Event()
        header = fleet_pb2.UploadHeader(token=token, digest=digest_of(UPDATE), size_bytes=len(UPDATE))
        first = fleet_pb2.UploadRequest(header=header)

        async def idle() -> AsyncIterator[fleet_pb2.UploadRequest]:
            yield first
            await over.wait()

        held: list[aio.StreamUnaryCall[fleet_pb2.UploadRequest, fleet_pb2.UploadResponse]] = []

        async def full() -> bool:
            held.append(client.stub.Upload(idle(), metadata=client.signed("Upload", first)))
            try:
                await client.download(digest_of(initial_model().to_bytes()))
            except aio.AioRpcError as exc:
                return dict(exc.trailing_metadata() or ())["fedplat-code"] == "TOO_MANY_STREAMS"
            return False

        await daemons.until(full, "the limit of streams")
        assert (await client.heartbeat(token, 0.0)).HasField("proceed")  # other calls are still answered
        over.set()
        for call in held:
            call.cancel()

        async def free() -> bool:
            try:
                return bool(await client.download(digest_of(initial_model().to_bytes())))
            except aio.AioRpcError:
                return False

        await daemons.until(free, "streams to be free again")


@pytest.mark.calm("a call that is repeated would have to continue where it stopped")
@pytest.mark.fault("F14", "F17")
async def test_an_update_that_is_sent_again_and_again_ends_the_assignment(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(max_upload_factor=0.002)) as site:
        job, client, token = await working(site)
        for number in range(int(0.002 * (2 * len(UPDATE) + 2**20)) // len(UPDATE)):
            await client.upload(token, UPDATE[:-4] + number.to_bytes(4, "big"))  # other bytes: it starts again
        status, code, _ = await refusal_of(client.upload(token, UPDATE))
        assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES")
        assert await client.stop_reason(token) == "TRANSFER_FAILED"
        answer = await client.report_inline(token, UPDATE)
        assert reason_name(answer.refusal.reason) == "TRANSFER_FAILED"
        await site.operator.until(job, "attempt", "ABANDONED")
        assert (await client.deliver((await client.assignment()).token, UPDATE)).HasField("receipt")


async def test_inline_updates_count_too(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(max_upload_factor=0.0001)) as site:
        _, client, token = await working(site)
        status, code, _ = await refusal_of(client.report_inline(token, UPDATE))
        assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES")
        assert await client.stop_reason(token) == "TRANSFER_FAILED"


@pytest.mark.slow
async def test_an_honest_client_meets_no_limit(site: Site) -> None:
    """One client takes part in a hundred rounds of a few milliseconds each."""
    job = await site.operator.start(job_file(rounds=100, goal=1))
    client = await site.enroll()
    for _ in range(100):
        token = (await client.assignment()).token
        assert (await client.report_inline(token, UPDATE)).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
