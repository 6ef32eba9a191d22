"""An upload that several calls bring: its parts are written in order, and each call holds two at most."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from grpc import aio

from faults import proxy
from faults.proxy import Way, Weather
from fedplat.model import Parameters
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import Client
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import streams
from fedplat_server.messages.ordered_writer import OrderedWriter
from fedplat_server.messages.streams import UploadMessage
from fedplat_server.rpc.report_intake import ReportIntake
from fedplat_server.storage.spool import Spool
from support import daemons
from support.daemons import Site, digest_of, initial_model, update_of
from support.jobs import job_file
from support.raw_client import RawClient
from support.transfers import add_one

PART = 1000
DATA = np.random.default_rng(0).bytes(20 * PART + 7)
SIZE = len(DATA)
DIGEST = hashlib.sha256(DATA).hexdigest()
KEY = AssignmentId(AttemptKey("job", 1, 2), "client")
POSITIONS = range(0, SIZE, PART)
Parts = Sequence[tuple[int, bytes]]


def parts_of(positions: Sequence[int], data: bytes = DATA) -> Parts:
    return [(position, data[position : position + PART]) for position in positions]


class Call:
    """A call with these parts, which stays open until `over`."""

    def __init__(self, writer: OrderedWriter, parts: Parts, over: asyncio.Event) -> None:
        self.num_drawn = 0
        self._parts = parts
        self._over = over
        self.task = asyncio.create_task(streams.receive(writer, SIZE, self._draw(), lambda: True))

    async def _draw(self) -> AsyncIterator[UploadMessage]:
        for position, data in self._parts:
            self.num_drawn += 1
            yield UploadMessage(data, position=position)
        await self._over.wait()


async def open_writer(folder: Path, offset: int = 0, wait_s: float = 3600.0) -> tuple[Spool, OrderedWriter]:
    """The writer of an upload to a spool, as its first call opens it."""
    spool = Spool(folder)
    spool.expect([KEY])
    header = fleet_pb2.UploadHeader(digest=DIGEST, size_bytes=SIZE, offset=offset)
    writer = await streams.open_writer(functools.partial(spool.open, KEY), header, lambda: True, wait_s)
    return spool, writer


async def settle() -> None:
    """Lets all tasks run until each waits, and the thread's writes end."""
    for _ in range(20):
        await asyncio.sleep(0)
        await asyncio.to_thread(bool)


@pytest.mark.parametrize("seed", range(5))
async def test_parts_in_any_order_make_up_the_file(tmp_path: Path, seed: int) -> None:
    rng, over = random.Random(seed), asyncio.Event()
    spool, writer = await open_writer(tmp_path)
    shares: list[list[int]] = [[] for _ in range(4)]
    for position in POSITIONS:
        rng.choice(shares).append(position)
    calls = [Call(writer, parts_of(share), over) for share in rng.sample(shares, 4)]
    over.set()
    received = [await call.task for call in calls]
    assert max(received) == SIZE
    path = spool.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA


async def test_each_call_holds_two_parts_at_most_while_an_earlier_one_is_missing(tmp_path: Path) -> None:
    """As many as a call that is alone; so what one client may hold depends on the number of its streams only."""
    over = asyncio.Event()
    spool, writer = await open_writer(tmp_path)
    calls = [Call(writer, parts_of(POSITIONS[1 + number :: 4]), over) for number in range(4)]
    await settle()
    assert [call.num_drawn for call in calls] == [2, 2, 2, 2]
    assert spool.count_received(KEY, DIGEST) == 0
    first = Call(writer, parts_of([0]), over)
    over.set()
    assert max([await call.task for call in (first, *calls)]) == SIZE


async def test_if_one_call_breaks_all_end_and_the_upload_resumes_behind_what_was_written(tmp_path: Path) -> None:
    over = asyncio.Event()
    spool, writer = await open_writer(tmp_path)
    first, second = Call(writer, parts_of([0, PART]), over), Call(writer, parts_of([3 * PART]), over)
    await settle()
    third = Call(writer, parts_of([5 * PART, 7 * PART]), over)
    await settle()
    third.task.cancel()
    for call in (second, third):
        over.set()
        with pytest.raises((RefusedError, asyncio.CancelledError)) as caught:
            await call.task
        if isinstance(caught.value, RefusedError):
            assert caught.value.code is Code.WRONG_OFFSET
    assert await first.task == 2 * PART  # it had brought all of its parts
    assert spool.count_received(KEY, DIGEST) == 2 * PART
    spool = Spool(tmp_path)  # what a server finds that starts after it was killed: no byte behind the missing part
    spool.expect([KEY])
    spool.keep([KEY])
    assert spool.count_received(KEY, DIGEST) == 2 * PART
    upload = spool.open(KEY, DIGEST, SIZE, 2 * PART)
    upload.write(DATA[2 * PART :])
    assert upload.finish().read_bytes() == DATA


async def test_a_part_that_does_not_come_is_waited_for_only_so_long(tmp_path: Path) -> None:
    over = asyncio.Event()
    _, writer = await open_writer(tmp_path, wait_s=0.01)
    calls = [Call(writer, parts_of(POSITIONS[1 + number :: 4]), over) for number in range(4)]
    for call in calls:
        with pytest.raises(RefusedError) as caught:
            await call.task
        assert caught.value.code is Code.TOO_SLOW


@pytest.mark.parametrize("position", [0, 2 * PART])
async def test_a_part_that_came_already_is_refused(tmp_path: Path, position: int) -> None:
    over = asyncio.Event()
    _, writer = await open_writer(tmp_path)
    first = Call(writer, parts_of([0, 2 * PART]), over)
    await settle()
    again = Call(writer, parts_of([position]), over)
    with pytest.raises(RefusedError) as caught:
        await again.task
    assert caught.value.code is Code.WRONG_OFFSET
    over.set()
    with pytest.raises(RefusedError):
        await first.task


async def test_a_call_that_resumes_fences_those_before_it(tmp_path: Path) -> None:
    over = asyncio.Event()
    spool, writer = await open_writer(tmp_path)
    old = [Call(writer, parts_of([0, 2 * PART]), over), Call(writer, parts_of([3 * PART]), over)]
    await settle()
    header = fleet_pb2.UploadHeader(digest=DIGEST, size_bytes=SIZE, offset=PART)
    newer = await streams.open_writer(functools.partial(spool.open, KEY), header, lambda: True, 3600.0)
    late = Call(writer, parts_of([PART], data=bytes(SIZE)), over)
    over.set()
    for call in (*old, late):
        with pytest.raises(RefusedError):
            await call.task
    assert await Call(newer, parts_of(POSITIONS[1:]), over).task == SIZE
    path = spool.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA


# --- by a daemon ---


def bring(client: RawClient, header: fleet_pb2.UploadHeader, parts: Parts, over: asyncio.Event | None = None) -> Any:
    """A call with these parts, which stays open until `over`."""
    first = fleet_pb2.UploadRequest(header=header)

    async def requests() -> AsyncIterator[fleet_pb2.UploadRequest]:
        yield first
        for position, data in parts:
            yield fleet_pb2.UploadRequest(data=data, position=position)
        if over is not None:
            await over.wait()

    return client.stream(requests, first)


async def ask(client: RawClient, token: str, digest: str) -> fleet_pb2.QueryUploadResponse:
    request = fleet_pb2.QueryUploadRequest(token=token, digest=digest)
    return await client.stub.QueryUpload(request, metadata=client.signed("QueryUpload", request))


@pytest.mark.calm("streams by hand, and does not ask again")
async def test_several_calls_bring_an_update(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1), initial_model())
    client = await site.enroll()
    token, update = (await client.assignment()).token, update_of(initial_model(), 1).to_bytes()
    size, step, over = len(update), len(update) // 5, asyncio.Event()
    header = fleet_pb2.UploadHeader(token=token, digest=digest_of(update), size_bytes=size)
    more = fleet_pb2.UploadHeader(token=token, digest=digest_of(update), size_bytes=size, additional=True)
    cut = [(position, update[position : position + step]) for position in range(0, size, step)]

    with pytest.raises(aio.AioRpcError) as caught:
        await bring(client, more, cut)  # no call has begun it
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert (await ask(client, token, digest_of(update))).max_calls == Limits().max_streams - 1

    first = bring(client, header, cut[:1], over)
    await daemons.until(lambda: _has(client, token, update, step), "the first part")
    calls = [bring(client, more, cut[2::2]), bring(client, more, cut[1::2])]
    await daemons.until(lambda: _has(client, token, update, size), "all parts")
    over.set()
    assert {(await call).received_bytes for call in (first, *calls)} >= {size}
    assert (await client.report(token, digest_of(update))).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


async def _has(client: RawClient, token: str, update: bytes, size: int) -> bool:
    return await client.query(token, digest_of(update)) == size


@pytest.mark.slow
@pytest.mark.calm("streams by hand, and does not ask again")
async def test_more_calls_are_refused_when_uploads_hold_half_of_the_memory(folder: Path) -> None:
    model = Parameters.from_arrays({"weight": np.zeros(2**20, np.float32)})
    limits = Limits(upload_memory_bytes=16 * 2**20)  # of which uploads have 12
    async with daemons.running(folder, limits=limits) as site:
        await site.operator.start(job_file(goal=1), model)
        client, over = await site.enroll(), asyncio.Event()
        token, update = (await client.assignment()).token, model.to_bytes()
        more = fleet_pb2.UploadHeader(token=token, digest=digest_of(update), size_bytes=len(update), additional=True)
        header = fleet_pb2.UploadHeader(token=token, digest=digest_of(update), size_bytes=len(update))
        held = list[Any]()
        for number, one in enumerate((header, more, more)):  # the first one has 2.5 MiB, the others 2
            assert (await ask(client, token, digest_of(update))).max_calls == Limits().max_streams - 1
            start = number * PART
            held.append(bring(client, one, [(start, update[start : start + PART])], over))
            await daemons.until(functools.partial(_has, client, token, update, start + PART), f"part {number}")
        assert (await ask(client, token, digest_of(update))).max_calls == 1
        with pytest.raises(aio.AioRpcError) as caught:
            await bring(client, more, [])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        over.set()
        assert [(await call).received_bytes for call in held] == [3 * PART] * 3  # the refusal has ended none


# --- with the client that people run ---


@pytest.mark.slow
@pytest.mark.calm("cuts the line, where that is wanted")
@pytest.mark.parametrize("cuts", [False, True])
async def test_a_client_brings_its_update_by_several_calls_over_a_line_with_latency(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: bool
) -> None:
    """With `cuts`, the line breaks when several calls have begun, and the upload resumes."""
    monkeypatch.setenv("FEDPLAT_INSECURE", "1")
    model = Parameters.from_arrays({"weight": np.zeros(6 * 2**20, np.float32)})
    job = await site.operator.start(job_file(goal=1), model)
    way = Way(delay_s=0.02)
    num_joined, join = [0], ReportIntake.find_writer

    async with proxy.running(site.address) as line:
        line.set(Weather(way, way))
        ticket = msgspec.structs.replace(await site.operator.ticket(), server=line.address).to_text()
        client = Client.from_ticket(ticket, data_dir=tmp_path / "client")

        def joined(*arguments: Any) -> OrderedWriter:
            num_joined[0] += 1
            if cuts and num_joined[0] == 2:
                asyncio.get_running_loop().call_later(0.05, line.cut)
            return join(*arguments)

        monkeypatch.setattr(ReportIntake, "find_writer", joined)
        client.add_trainer("toy", add_one)
        await asyncio.to_thread(client.run, 1)
    await site.operator.until(job, "job", "COMPLETED")
    np.testing.assert_array_equal((await site.operator.model(job))["weight"], np.float32(1))
    assert num_joined[0] >= 2
