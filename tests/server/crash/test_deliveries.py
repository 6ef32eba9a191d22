"""The server dies around the delivery of events: none is lost, and one that is sent again has the same id."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat.wire.v1 import events_pb2
from fedplat_server.database.store import open_store
from support.crash import chains, scenario
from support.crash.chains import Chain
from support.crash.nursery import Nursery, Order
from support.crash.scenario import World
from support.receiver import Receiver, receiving

pytestmark = pytest.mark.slow
POINTS = chains.of("delivery")


@pytest.fixture
async def receiver() -> AsyncGenerator[Receiver]:
    async with receiving() as made:
        yield made


@pytest.fixture
async def world(zygote: Nursery, folder: Path, database: str) -> Chain:
    order = Order(folder, database, folder.parent / "server.log")
    return Chain(zygote, dataclasses.replace(order, webhook_networks=("127.0.0.0/8",)))


@pytest.mark.parametrize("seed", [7])
async def test_killed_while_events_are_delivered(world: Chain, receiver: Receiver, seed: int) -> None:
    points = chains.draw(seed, *POINTS, *(f"{point}:3" for point in POINTS), "save.before:7", "save.after:7")

    async def add_webhook_and_wait(world: World) -> None:
        request = events_pb2.AddWebhookRequest(url=receiver.url)
        await world.ask(lambda site: site.operator.webhooks.AddWebhook(request))
        await receiver.until(lambda delivered: any(one.type == "job.completed" for one in delivered))

    # Deliveries come behind the rounds, so the last rounds must not be over before the last point is reached.
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=4 * rounds), disturb=add_webhook_and_wait)
    store = await open_store(world.order.database)
    try:
        stored = {row.sequence: row for row in await store.events.list_events(limit=1000)}
        first = min(row.sequence for row in stored.values() if row.type == "webhook.added")
        last = max(row.sequence for row in stored.values() if row.type == "job.completed")
    finally:
        await store.close()
    by_id = {one.event_id: one.payload for one in receiver.delivered}
    numbers = [payload["data"]["sequence"] for payload in by_id.values()]
    # If the reply to its creation was lost, there are two webhooks: the first one receives every event.
    assert {*range(first + 1, last + 1)} <= {*numbers}
    for one in receiver.delivered:
        assert one.payload == by_id[one.event_id]
        row = stored[one.payload["data"]["sequence"]]
        assert (row.type, row.round) == (one.type, one.payload["data"].get("round", 0))
