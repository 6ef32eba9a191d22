"""The deliveries of events, by the leader to real receivers: in order, again after failures, at least once."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat.wire.v1 import admin_pb2, events_pb2
from fedplat_server import retries
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import StoreUnavailableError
from fedplat_server.instruments import Instruments
from fedplat_server.records.events import (
    MAX_JITTER,
    RETRY_DELAYS_S,
    Alert,
    DeliveryRecord,
    EventRow,
    SendResult,
    Severity,
    WebhookRecord,
    after_attempt,
    new_secret,
)
from fedplat_server.webhooks.delivery import DeliveryTask, WebhookSender
from support import daemons, databases
from support.faulty_store import FaultyStore
from support.jobs import job_file
from support.receiver import OK, Delivered, Receiver, answer, receiving

LOOPBACK = "127.0.0.0/8"
MINUTES_10 = 600.0
DAYS_2 = 2 * 86_400.0


class WallClock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def delivering(store: Store | FaultyStore, clock: WallClock) -> AsyncGenerator[DeliveryTask]:
    """The task, on a store that may fail."""
    sender = WebhookSender([ipaddress.ip_network(LOOPBACK)])
    task = DeliveryTask(store, sender, Instruments(), clock, poll_s=3600.0)  # pyright: ignore[reportArgumentType]
    task.begin()
    try:
        yield task
    finally:
        await task.close()


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


@pytest.fixture
async def store(tmp_path: Path, clock: WallClock) -> AsyncGenerator[Store]:
    made = await open_store(await asyncio.to_thread(databases.create_sqlite, tmp_path / "fedplat.db"), clock)
    yield made
    await made.close()


@pytest.fixture
async def receiver() -> AsyncGenerator[Receiver]:
    async with receiving() as made:
        yield made


async def raise_alerts(store: Store, *names: str) -> None:
    await store.events.record_alerts([Alert(name, Severity.WARNING, f"about {name}", "") for name in names], [])


async def add(store: Store, receiver: Receiver, number: int = 1) -> WebhookRecord:
    record = WebhookRecord(f"w-{number:012x}", receiver.url, ("alert.raised",), new_secret(), 1.0)
    await store.webhooks.add_webhook(record)
    return record


def subjects(delivered: list[Delivered]) -> list[str]:
    return [request.payload["data"]["subject"] for request in delivered]


async def settled(store: Store, number: int) -> list[DeliveryRecord]:
    """The deliveries, when so many attempts are recorded. An attempt is recorded after its request."""
    found: list[DeliveryRecord] = []

    async def recorded() -> bool:
        found[:] = await store.webhooks.list_deliveries()
        return sum(one.num_attempts for one in found) == number

    await daemons.until(recorded, f"{number} recorded attempts")
    return found


async def test_events_arrive_in_order_signed_and_once(store: Store, clock: WallClock, receiver: Receiver) -> None:
    record = await add(store, receiver)
    names = [f"alert_{number}" for number in range(20)]
    async with delivering(store, clock):
        for name in names:
            await raise_alerts(store, name)
        delivered = await receiver.until_number(20)
        await settled(store, 20)
    assert subjects(delivered) == names
    assert len({request.event_id for request in delivered}) == 20
    assert all(request.payload["data"]["text"].startswith("about ") for request in delivered)
    await raise_alerts(store, "later")
    async with delivering(store, clock):  # the next leader continues, and repeats nothing
        assert subjects((await receiver.until_number(21))[20:]) == ["later"]
    assert (await store.webhooks.find_failing_webhooks(clock.now)) == []
    assert record.webhook_id in {one.webhook_id for one in await store.webhooks.list_deliveries(state="delivered")}


async def test_a_receiver_that_was_away_for_ten_minutes_gets_every_event(store: Store, clock: WallClock) -> None:
    async with receiving() as gone:
        record = await add(store, gone)
    async with delivering(store, clock) as task:
        await raise_alerts(store, "one", "two", "three")
        failed = await settled(store, 3)
        assert {(one.state, one.result) for one in failed} == {("pending", "connection refused")}
        first_s = RETRY_DELAYS_S[0]
        assert all(first_s <= (one.next_unix_s or 0.0) - clock.now <= first_s * (1 + MAX_JITTER) for one in failed)
        clock.now += 2.0 * first_s
        task.wake()
        await settled(store, 6)
        assert [one.webhook_id for one in await store.webhooks.find_failing_webhooks(clock.now)] == [record.webhook_id]
        async with receiving(gone.port) as back:
            clock.now += MINUTES_10  # not earlier: deliveries that are due would find the port closed once more
            task.wake()
            delivered = await back.until_number(3)
            await settled(store, 9)
    assert sorted(subjects(delivered)) == ["one", "three", "two"]
    assert {int(request.headers["webhook-timestamp"]) for request in delivered} == {int(clock.now)}
    assert await store.webhooks.find_failing_webhooks(clock.now) == []


async def test_repeated_attempts_have_the_same_id_and_end_after_a_day(
    store: Store, clock: WallClock, receiver: Receiver
) -> None:
    receiver.respond = lambda _: answer(503)
    await add(store, receiver)
    begun = clock.now
    async with delivering(store, clock) as task:
        await raise_alerts(store, "one")
        (tried,) = await settled(store, 1)
        for number in range(2, len(RETRY_DELAYS_S) + 2):
            assert tried.next_unix_s is not None
            clock.now = tried.next_unix_s
            task.wake()
            (tried,) = await settled(store, number)
    assert (tried.state, tried.result, tried.num_attempts) == ("failed", "503", 8)
    assert len({request.event_id for request in receiver.delivered}) == 1
    assert len({request.headers["webhook-timestamp"] for request in receiver.delivered}) == 8
    assert 86_400.0 < clock.now - begun < DAYS_2


def test_the_delays_follow_the_standard() -> None:
    tried = DeliveryRecord("w-1", EventRow(1, 0.0, "job.failed"), next_unix_s=0.0)
    delays: list[float] = []
    while tried.next_unix_s is not None:
        tried = after_attempt(tried, SendResult(False, "503"), 100.0, 0.0)
        delays += [tried.next_unix_s - 100.0] if tried.next_unix_s is not None else []
    hour = 3600.0
    assert delays == [5.0, 300.0, 1800.0, 2 * hour, 5 * hour, 10 * hour, 14 * hour]
    assert after_attempt(DeliveryRecord("w-1", tried.event), SendResult(False, "503"), 100.0, 1.0).next_unix_s == 106.0


async def test_a_silent_receiver_delays_no_other(store: Store, clock: WallClock, receiver: Receiver) -> None:
    receiver.respond = lambda _: None
    await add(store, receiver, 1)
    async with receiving() as other, delivering(store, clock):
        await add(store, other, 2)
        await raise_alerts(store, "one", "two", "three")
        assert subjects(await other.until_number(3)) == ["one", "two", "three"]
        assert subjects(await receiver.until_number(1)) == ["one"]


async def test_a_webhook_that_is_removed_gets_nothing_more(store: Store, clock: WallClock, receiver: Receiver) -> None:
    receiver.respond = lambda _: answer(500)
    record = await add(store, receiver)
    async with receiving() as other, delivering(store, clock) as task:
        await raise_alerts(store, "one")
        await settled(store, 1)
        await store.webhooks.remove_webhook(record.webhook_id)
        task.wake()
        await add(store, other, 2)
        task.wake()
        await raise_alerts(store, "two")
        clock.now += MINUTES_10
        task.wake()
        assert subjects(await other.until_number(1)) == ["two"]
    assert subjects(receiver.delivered) == ["one"]


async def test_a_lost_reply_of_the_database_repeats_an_event_with_the_same_id(
    store: Store, clock: WallClock, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "BACKGROUND_RETRY_S", 0.0)
    faulty = FaultyStore(store)

    async def fail_once() -> None:
        del faulty.before["record_attempt"]
        raise StoreUnavailableError("the database does not answer, says the test")

    faulty.before["record_attempt"] = fail_once
    await add(store, receiver)
    async with delivering(faulty, clock):
        await raise_alerts(store, "one", "two")
        delivered = await receiver.until_number(3)
    assert subjects(delivered) == ["one", "one", "two"]
    assert delivered[0].event_id == delivered[1].event_id != delivered[2].event_id


# --- by a daemon ---------------------------------------------------------------------------------------------


async def test_a_daemon_delivers_what_happens_to_a_job(folder: Path, receiver: Receiver) -> None:
    """Also on a store that fails: every event arrives, perhaps twice, and nothing about clients' metrics."""
    async with daemons.running(folder, webhook_networks=(LOOPBACK,)) as site:
        request = events_pb2.AddWebhookRequest(url=receiver.url, types=[])
        added = await site.operator.webhooks.AddWebhook(request)
        job = await site.operator.start(job_file("told", rounds=1, goal=1))
        client = await site.enroll()
        work = await client.assignment()
        await client.report_inline(work.token, daemons.update_of(daemons.initial_model(), 1).to_bytes())
        await receiver.until(lambda delivered: any(request.type == "job.completed" for request in delivered))
        listed = await site.operator.event_log.ListEvents(events_pb2.ListEventsRequest())
        numbers = {event.sequence for event in listed.events}
    mine = [one for one in receiver.delivered if one.event_id.startswith(f"msg_{added.webhook.webhook_id[2:]}_")]
    for one in mine:
        one.verify(added.secret)
    by_id = {one.event_id: one.payload for one in mine}
    sequences = {payload["data"]["sequence"] for payload in by_id.values()}
    assert len(sequences) == len(by_id)
    first, last = min(sequences), max(sequences)
    assert sequences == set(range(first, last + 1))
    assert sequences <= numbers
    types = [by_id[key]["type"] for key in by_id if by_id[key]["data"].get("job_id") == job]
    assert {"job.created", "job.started", "round.committed", "job.completed"} <= set(types)
    assert all("metrics" not in payload["data"] and "text" not in payload["data"] for payload in by_id.values())


@pytest.mark.calm
async def test_the_service_of_webhooks(folder: Path, receiver: Receiver) -> None:
    async with daemons.running(folder, webhook_networks=(LOOPBACK,)) as site:
        hooks = site.operator.webhooks
        added = await hooks.AddWebhook(events_pb2.AddWebhookRequest(url=receiver.url, types=["job.failed"]))
        mine = added.webhook.webhook_id
        assert added.secret.startswith("whsec_")
        tested = await hooks.TestWebhook(events_pb2.TestWebhookRequest(webhook_id=mine))
        assert (tested.state, tested.result, tested.event.type) == ("delivered", "204", "webhook.test")
        receiver.delivered[0].verify(added.secret)
        receiver.respond = lambda _: answer(500)
        tested = await hooks.TestWebhook(events_pb2.TestWebhookRequest(webhook_id=mine))
        assert (tested.state, tested.result) == ("failed", "500")
        assert receiver.delivered[0].event_id != receiver.delivered[1].event_id
        receiver.respond = lambda _: OK
        (listed,) = (await hooks.ListWebhooks(events_pb2.ListWebhooksRequest())).webhooks
        assert (listed.webhook_id, listed.url, listed.types) == (mine, receiver.url, ["job.failed"])
        assert (await hooks.ListDeliveries(events_pb2.ListDeliveriesRequest(webhook_id=mine))).deliveries == []
        await hooks.RemoveWebhook(events_pb2.RemoveWebhookRequest(webhook_id=mine))
        assert (await hooks.ListWebhooks(events_pb2.ListWebhooksRequest())).webhooks == []
        audit = (await site.operator.operators.ListAudit(admin_pb2.ListAuditRequest())).events
        noted = [(one.action, one.details) for one in audit if one.subject == mine]
        assert [action for action, _ in noted] == [
            "webhook added",
            "webhook tested",
            "webhook tested",
            "webhook removed",
        ]
        assert all("path-secret" not in details and added.secret not in details for _, details in noted)


@pytest.mark.calm
@pytest.mark.parametrize(
    ("method", "request_", "said"),
    [
        ("AddWebhook", events_pb2.AddWebhookRequest(url="http://example.org/"), "without TLS"),
        ("AddWebhook", events_pb2.AddWebhookRequest(url="https://10.0.0.1/"), "not a public address"),
        (
            "AddWebhook",
            events_pb2.AddWebhookRequest(url="https://a.org", types=["job.lost"]),
            "'job.lost': expected one",
        ),
        ("RemoveWebhook", events_pb2.RemoveWebhookRequest(webhook_id="w-000000000000"), "there is no such webhook"),
        ("RemoveWebhook", events_pb2.RemoveWebhookRequest(webhook_id="\0"), "there is no such webhook"),
        ("TestWebhook", events_pb2.TestWebhookRequest(webhook_id="w-1"), "there is no such webhook"),
        ("ListDeliveries", events_pb2.ListDeliveriesRequest(state="lost"), "expected pending, delivered, failed"),
        ("ListDeliveries", events_pb2.ListDeliveriesRequest(page_token="1.x"), "page_token"),
    ],
)
async def test_requests_that_are_refused(site: daemons.Site, method: str, request_: object, said: str) -> None:
    with pytest.raises(Exception, match=said):
        await getattr(site.operator.webhooks, method)(request_)
