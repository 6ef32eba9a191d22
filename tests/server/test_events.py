"""The service of events: lists, and watches that share one feed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2, events_pb2
from fedplat_server.coordination import long_polls
from fedplat_server.coordination.long_polls import EventFeed
from fedplat_server.database.store import Store, open_store
from fedplat_server.records.events import Alert, EventRow, Severity
from support import daemons, databases
from support.daemons import Site
from support.faulty_store import FaultyStore
from support.jobs import job_file

pytestmark = pytest.mark.calm


async def raise_alert(store: Store | FaultyStore, number: int) -> None:
    await store.events.record_alerts([Alert(f"alert_{number}", Severity.WARNING, "", "")], [])


def watch(
    site: Site, after: int | None = 0, types: list[str] | None = None, job: str = ""
) -> aio.UnaryStreamCall[events_pb2.WatchEventsRequest, events_pb2.Event]:
    request = events_pb2.WatchEventsRequest(after_sequence=after, types=types or [], job=job)
    return site.operator.event_log.WatchEvents(request)


async def take(call: object, number: int) -> list[events_pb2.Event]:
    events = aiter(call)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]
    async with asyncio.timeout(daemons.PATIENCE_S):
        return [await anext(events) for _ in range(number)]  # pyright: ignore[reportUnknownArgumentType]


async def test_events_are_listed_page_by_page_and_filtered(site: Site) -> None:
    log = site.operator.event_log
    one = await site.operator.start(job_file("one"))
    await site.operator.start(job_file("two"))
    whole = list((await log.ListEvents(events_pb2.ListEventsRequest())).events)
    for newest_first in (False, True):
        pages, token = list[events_pb2.Event](), ""
        while True:
            request = events_pb2.ListEventsRequest(page_size=2, page_token=token, newest_first=newest_first)
            page = await log.ListEvents(request)
            pages += page.events
            token = page.next_page_token
            if not token:
                break
        assert pages == (whole[::-1] if newest_first else whole)
    started = await log.ListEvents(events_pb2.ListEventsRequest(types=["job.started"]))
    assert [event.job_name for event in started.events] == ["one", "two"]
    for name in ("one", one):
        of_one = await log.ListEvents(events_pb2.ListEventsRequest(job=name))
        assert [event.type for event in of_one.events] == ["job.created", "job.started"]
        assert {(event.job_id, event.population) for event in of_one.events} == {(one, "demo")}


async def test_a_watch_gives_past_events_and_then_new_ones_in_order(site: Site) -> None:
    for number in range(3):
        await raise_alert(site.store, number)
    call = watch(site, 0, ["alert.raised"])
    assert [event.subject for event in await take(call, 3)] == ["alert_0", "alert_1", "alert_2"]
    for number in range(3, 6):
        await raise_alert(site.store, number)
    assert [event.subject for event in await take(call, 3)] == ["alert_3", "alert_4", "alert_5"]
    call.cancel()


async def test_without_a_number_only_new_events_come(site: Site) -> None:
    await raise_alert(site.store, 0)
    call = watch(site, None)
    first = asyncio.create_task(take(call, 1))
    number = 0
    while not first.done():  # what was raised before the watch began does not come
        number += 1
        await raise_alert(site.store, number)
        await asyncio.wait([first], timeout=0.05)
    (event,) = await first
    assert event.subject in {f"alert_{each}" for each in range(1, number + 1)}
    call.cancel()


async def test_a_watch_of_one_job_has_no_events_of_others(site: Site) -> None:
    one = await site.operator.start(job_file("one"))
    call = watch(site, 0, job="one")
    assert [event.type for event in await take(call, 2)] == ["job.created", "job.started"]
    await site.operator.start(job_file("two"))
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=one))
    found = await take(call, 2)
    assert {event.job_id for event in found} == {one}
    assert found[-1].type == "job.cancelled"
    call.cancel()


async def test_many_watches_share_the_reads_of_new_events(site: Site) -> None:
    await raise_alert(site.store, 0)
    calls: list[aio.UnaryStreamCall[events_pb2.WatchEventsRequest, events_pb2.Event]] = []
    for _ in range(30):  # one after the other: the requests of one operator that are being received are limited
        calls.append(watch(site, 0, ["alert.raised"]))
        assert [event.subject for event in await take(calls[-1], 1)] == ["alert_0"]
    before = site.store.calls["list_events"]
    for number in range(1, 21):
        await raise_alert(site.store, number)
        for call in calls:
            assert [event.subject for event in await take(call, 1)] == [f"alert_{number}"]
    reads = site.store.calls["list_events"] - before
    # One for each event, and a few that find nothing more; with one for each watch there were 600.
    assert reads <= 6 * 20
    for call in calls:
        call.cancel()


async def test_a_watch_ends_with_a_retry_when_the_server_stops(folder: Path) -> None:
    async with daemons.running(folder) as site:
        call = watch(site, 0)
        await take(call, 1)
        rest = asyncio.create_task(take(call, 1000))
        site.daemon.stop()
        with pytest.raises(aio.AioRpcError) as caught:
            await rest
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (events_pb2.ListEventsRequest(types=["job.lost"]), grpc.StatusCode.INVALID_ARGUMENT),
        (events_pb2.ListEventsRequest(page_token="x"), grpc.StatusCode.INVALID_ARGUMENT),
        (events_pb2.ListEventsRequest(job="nothing"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_lists_that_are_refused(site: Site, request_: events_pb2.ListEventsRequest, code: object) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.event_log.ListEvents(request_)
    assert caught.value.code() is code


# --- the feed ------------------------------------------------------------------------------------------------


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    made = await open_store(await asyncio.to_thread(databases.create_sqlite, tmp_path / "fedplat.db"))
    yield made
    await made.close()


async def read_first(feed: EventFeed, after: int) -> Sequence[EventRow]:
    """The first events after a number, as soon as there are any."""
    async with asyncio.timeout(daemons.PATIENCE_S):
        while True:
            changed = feed.next_change()
            if found := await feed.read_after(after):
                return found
            await changed.wait()


async def test_the_feed_finds_events_of_another_process(store: Store, tmp_path: Path) -> None:
    other = await open_store(str(tmp_path / "fedplat.db"))
    feed = EventFeed(store.events, poll_s=0.01)
    with feed.watch():
        last = await store.events.find_last_sequence()
        await raise_alert(other, 1)
        found = await read_first(feed, last)
    assert [row.subject for row in found] == ["alert_1"]
    await feed.close()
    await other.close()


async def test_the_feed_survives_an_outage_of_the_database(store: Store) -> None:
    faulty = FaultyStore(store)
    feed = EventFeed(faulty.events, poll_s=0.01)
    with feed.watch():
        last = await store.events.find_last_sequence()
        faulty.outage = True
        await raise_alert(store, 1)

        async def tried() -> bool:
            return faulty.calls["list_events"] + faulty.calls["find_last_sequence"] >= 2

        await daemons.until(tried, "reads during the outage")
        faulty.outage = False
        found = await read_first(feed, last)
    assert [row.subject for row in found] == ["alert_1"]
    await feed.close()


async def test_a_watcher_that_is_far_behind_reads_everything_in_bounded_pages(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_polls, "PAGE", 7)
    feed = EventFeed(store.events)
    with feed.watch():
        first = await store.events.find_last_sequence()
        for number in range(40):
            await raise_alert(store, number)
        seen: list[int] = []
        async with asyncio.timeout(daemons.PATIENCE_S):
            while len(seen) < 40:
                changed = feed.next_change()
                page = await feed.read_after(seen[-1] if seen else first)
                assert len(page) <= 7
                seen += [row.sequence for row in page]
                if not page:  # the feed has not read the last ones yet
                    await changed.wait()
    assert seen == list(range(first + 1, first + 41))
    await feed.close()
