"""Updates that arrive at the same moment share a budget of memory: some wait, some come back, none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat import report_validation, wire
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.config import Limits
from fedplat_server.errors import RefusedError
from fedplat_server.messages.streams import MemoryBudget
from support import daemons
from support.daemons import Site, digest_of
from support.jobs import job_file

MODEL = Parameters.from_arrays({"weight": np.zeros(200_000, np.float32)})


@pytest.mark.calm("counts refusals")
@pytest.mark.fault("F39")
@pytest.mark.slow
async def test_uploads_beyond_the_memory_wait_in_order_and_none_is_lost(folder: Path) -> None:
    limits = Limits(upload_memory_bytes=4 * 2**20, upload_wait_s=60.0)
    async with daemons.running(folder, limits=limits) as site:
        job = await site.operator.start(job_file(goal=20), MODEL)
        clients = await site.fleet(20)
        tokens = [one.token for one in await site.assign(clients)]
        update = MODEL.to_bytes()
        answers = await asyncio.gather(
            *(client.deliver(token, update) for client, token in zip(clients, tokens, strict=True))
        )
        assert all(answer.HasField("receipt") for answer in answers)
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.calm("streams by hand, and does not ask again")
@pytest.mark.fault("F39")
async def test_an_upload_without_room_is_told_when_to_come_back_and_loses_nothing(folder: Path) -> None:
    limits = Limits(upload_memory_bytes=2**20, upload_wait_s=0.1)
    async with daemons.running(folder, limits=limits) as site:
        job = await site.operator.start(job_file(goal=2), MODEL)
        first, second = await site.fleet(2)
        tokens = [one.token for one in await site.assign([first, second])]
        update, over = MODEL.to_bytes(), asyncio.Event()
        header = fleet_pb2.UploadHeader(token=tokens[0], digest=digest_of(update), size_bytes=len(update))
        opening = fleet_pb2.UploadRequest(header=header)

        async def half() -> AsyncIterator[fleet_pb2.UploadRequest]:
            yield opening
            yield fleet_pb2.UploadRequest(data=update[:1000])
            await over.wait()

        holding = asyncio.ensure_future(first.stub.Upload(half(), metadata=first.signed("Upload", opening)))

        async def held() -> bool:
            return await first.query(tokens[0], digest_of(update)) == 1000

        await daemons.until(held, "the first upload to have its share")
        with pytest.raises(aio.AioRpcError) as caught:
            await second.upload(tokens[1], update)
        trailers = dict(caught.value.trailing_metadata() or ())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (trailers["fedplat-code"], trailers[wire.METADATA_RETRY]) == ("TOO_MANY_UPLOADS", "1 10")
        over.set()
        assert (await holding).received_bytes == 1000
        await first.upload(tokens[0], update, offset=1000)
        await second.upload(tokens[1], update)
        for client, token in zip((first, second), tokens, strict=True):
            assert (await client.report(token, digest_of(update))).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.calm("counts checks")
async def test_reports_of_one_upload_are_checked_one_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, under_way, most = threading.Lock(), 0, 0
    check_update = report_validation.validate_file

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        try:
            return check_update(*args, **options)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(report_validation, "validate_file", counted)
    await site.operator.start(job_file(goal=1), MODEL)
    client = await site.enroll()
    token, update = (await client.assignment()).token, MODEL.to_bytes()
    await client.upload(token, update)
    answers = await asyncio.gather(*(client.report(token, digest_of(update)) for _ in range(10)))
    assert all(answer.HasField("receipt") for answer in answers)
    assert most == 1


# --- the budget itself ---


async def hold(budget: MemoryBudget, size_bytes: int, name: str, order: list[str], over: asyncio.Event) -> None:
    async with budget.share(size_bytes):
        order.append(name)
        await over.wait()


async def test_a_budget_serves_in_order_and_is_whole_again_after_all() -> None:
    budget, order, over = MemoryBudget(10, 3600.0, 2), list[str](), asyncio.Event()
    first = asyncio.create_task(hold(budget, 100, "more than there is", order, over))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(hold(budget, size, str(size), order, over)) for size in (6, 5)]
    await asyncio.sleep(0)
    assert (budget.free_bytes, budget.num_waiting, budget.is_half_free) == (0, 2, False)
    with pytest.raises(RefusedError):  # so many wait, and no more
        async with budget.share(1):
            pass
    waiting[0].cancel()  # one that gives up keeps nothing
    over.set()
    await asyncio.gather(first, *waiting, return_exceptions=True)
    assert order == ["more than there is", "5"]
    assert (budget.free_bytes, budget.num_waiting) == (10, 0)


async def test_a_share_that_shrinks_makes_room() -> None:
    budget, order, over = MemoryBudget(10, 3600.0, 2), list[str](), asyncio.Event()
    async with budget.share(10) as share:
        waiting = asyncio.create_task(hold(budget, 6, "6", order, over))
        await asyncio.sleep(0)
        assert order == []
        share.shrink(4)
        over.set()
        await waiting
        assert order == ["6"]
    assert budget.free_bytes == 10


async def test_a_small_share_does_not_overtake_a_large_one_that_waits() -> None:
    budget, order, over = MemoryBudget(10, 3600.0, 5), list[str](), asyncio.Event()
    async with budget.share(6):
        waiting = [asyncio.create_task(hold(budget, 8, "large", order, over))]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(hold(budget, 2, "small", order, over)))
        await asyncio.sleep(0)
        assert (order, budget.free_bytes, budget.num_waiting) == ([], 4, 2)
    over.set()
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]


async def test_a_share_that_is_granted_to_a_call_that_just_ended_is_free_again() -> None:
    budget, order, over = MemoryBudget(10, 3600.0, 5), list[str](), asyncio.Event()
    async with budget.share(10):
        waiting = asyncio.create_task(hold(budget, 10, "late", order, over))
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (order, budget.free_bytes) == ([], 10)
