"""What every store does with events, webhooks and deliveries."""

from __future__ import annotations

import asyncio

import pytest

from fedplat.rounds.events import JobAction
from fedplat_server.database.records import AttemptFilter, Budget
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import WebhookError
from fedplat_server.records.audit import AuditAction, AuditEntry, OperatorRecord, Role
from fedplat_server.records.events import (
    MAX_WEBHOOKS,
    Alert,
    DeliveryState,
    EventRow,
    EventType,
    SendResult,
    Severity,
    WebhookRecord,
    after_attempt,
    new_secret,
)
from support.store.driver import Driver, Ticks, eventful

FAILURE = SendResult(False, "503")
SUCCESS = SendResult(True, "200")


def alert(number: int) -> Alert:
    return Alert(f"alert_{number}", Severity.WARNING, f"number {number}", "")


def webhook(number: int = 0, *types: str) -> WebhookRecord:
    return WebhookRecord(f"w-{number:012x}", f"https://example.org/{number}", types, new_secret(), 5.0)


async def events_of(store: Store) -> list[EventRow]:
    """The events since the operator of the tests was added, if there is one."""
    return [one for one in await store.events.list_events() if one.type != EventType.OPERATOR_ADDED]


async def test_a_job_has_events_in_the_order_of_its_history(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    found = await events_of(store)
    of_job = [(one.type, one.round) for one in found if one.type.startswith("job.")]
    assert of_job == [
        *(("job.created", 0), ("job.started", 0), ("job.paused", 1), ("job.resumed", 1), ("job.cancelled", 2))
    ]
    attempts = await store.jobs.list_attempts(AttemptFilter("eventful", all_attempts=True))
    names = {"TRAIN COMMITTED": "round.committed", "TRAIN ABANDONED": "round.abandoned"}
    names |= {"EVALUATE COMMITTED": "evaluation.completed", "EVALUATE ABANDONED": "evaluation.abandoned"}
    expected = [
        (names[f"{one.attempt.kind} {one.attempt.phase}"], *one.key[1:], one.attempt.reason) for one in attempts
    ]
    of_attempts = [(one.type, one.round, one.attempt, one.text) for one in found if one.attempt]
    assert of_attempts == expected
    assert {name for name, *_ in expected} == set(names.values())
    assert {(one.job_id, one.population) for one in found} == {("eventful", "demo")}
    assert all(one.job_name for one in found)
    numbers = [one.sequence for one in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(found)))
    assert await store.events.find_last_sequence() == numbers[-1]


async def test_an_evaluation_by_the_server_is_an_event_once(store: Store) -> None:
    await Driver(store).create("job")
    for _ in range(2):  # the second call repeats one whose reply was lost
        await store.jobs.set_version_metrics("job", 0, {"accuracy": 0.5})
    last = (await events_of(store))[-1]
    assert (last.type, last.job_id, last.text) == (
        "evaluation.completed",
        "job",
        "version 0 was evaluated by the server",
    )
    assert [one.type for one in await events_of(store)].count("evaluation.completed") == 1


async def test_what_changes_beside_jobs_has_events_too(store: Store) -> None:
    await store.operators.add_operator(OperatorRecord("anna", Role.VIEWER, 1.5), b"a")
    await store.operators.remove_operator("anna")
    await store.ledger.set_budget("demo", Budget(8.0, 1e-6), 0)
    await store.ledger.set_budget("demo", None, 1)
    await store.events.record_alerts([Alert("disk_full", Severity.WARNING, "the disk is full", "", "j-1", "demo")], [])
    await store.events.record_alerts([], [Alert("disk_full", Severity.WARNING, "the disk is full", "", "j-1", "demo")])
    await store.events.record_alerts([], [])
    found = [(one.type, one.subject, one.population, one.text) for one in (await store.events.list_events())[-6:]]
    assert found == [
        ("operator.added", "anna", "", "operator anna was added with the role viewer"),
        ("operator.removed", "anna", "", "operator anna was removed"),
        ("privacy_budget.set", "", "demo", "population demo has a privacy budget of epsilon = 8 at delta = 1e-06"),
        ("privacy_budget.removed", "", "demo", "the privacy budget of population demo was removed"),
        ("alert.raised", "disk_full", "demo", "the disk is full"),
        ("alert.ended", "disk_full", "demo", "the disk is full"),
    ]


async def test_a_change_that_fails_has_no_event(store: Store) -> None:
    driver = Driver(store)
    await driver.create("job")
    before = await store.events.find_last_sequence()
    with pytest.raises(WebhookError, match="no webhook w-0"):
        await store.webhooks.remove_webhook("w-0")
    other = Driver(store, check=False)
    other.coordinator.add((await store.jobs.load_jobs())[0].state)
    await driver.operate("job", JobAction.PAUSE)
    with pytest.raises(Exception, match="not at revision"):
        await other.operate("job", JobAction.CANCEL)
    assert [one.type for one in await store.events.list_events(before)] == ["round.abandoned", "job.paused"]


async def test_events_are_listed_by_type_and_job_from_either_end(store: Store) -> None:
    driver = Driver(store)
    for name in ("one", "two"):
        await driver.create(name)
    start = await store.events.find_last_sequence() - 3
    newest = await store.events.list_events(newest_first=True, limit=2)
    assert [(one.job_id, one.type) for one in newest] == [("two", "job.started"), ("two", "job.created")]
    before = await store.events.list_events(newest[-1].sequence, newest_first=True, limit=1)
    assert [(one.job_id, one.type) for one in before] == [("one", "job.started")]
    started = await store.events.list_events(types={"job.started", "job.failed"})
    assert [one.job_id for one in started] == ["one", "two"]
    assert [one.type for one in await store.events.list_events(start, job_id="two")] == ["job.created", "job.started"]


async def test_numbers_have_no_gaps_and_appear_in_order(database: str) -> None:
    """Concurrent writers of two processes, and a reader that always continues after the last number it has seen."""
    stores = [await open_store(database, Ticks()) for _ in range(2)]
    first = await stores[0].events.find_last_sequence()
    seen: list[int] = []
    writing = asyncio.gather(*(stores[n % 2].events.record_alerts([alert(n), alert(n)], []) for n in range(30)))
    while len(seen) < 60:
        found = await stores[0].events.list_events(seen[-1] if seen else first, limit=7)
        seen += [one.sequence for one in found]
    await writing
    assert seen == list(range(first + 1, first + 61))
    for store in stores:
        await store.close()


async def test_a_commit_wakes_who_waits_for_events(store: Store) -> None:
    appended = store.events.next_append()
    await store.audit.append([AuditEntry("host", AuditAction.PRUNED)])
    assert not appended.is_set()
    await store.events.record_alerts([alert(1)], [])
    assert appended.is_set()
    assert not store.events.next_append().is_set()


async def test_the_raised_alerts_are_those_that_have_not_ended(store: Store) -> None:
    """Alerts of one name differ by their job and population."""
    everywhere, here = (
        Alert("failing", Severity.WARNING, "x", ""),
        Alert("failing", Severity.WARNING, "x", "", "j-1", "demo"),
    )
    there, elsewhere = (
        Alert("failing", Severity.WARNING, "x", "", "j-2", "demo"),
        Alert("failing", Severity.WARNING, "x", "", "", "other"),
    )
    await store.events.record_alerts([everywhere, here, there], [])
    await store.events.record_alerts([elsewhere], [everywhere, there])
    await store.events.record_alerts([everywhere], [])
    await Driver(store).create("j-1")  # has events of other types
    raised = [(one.subject, one.job_id, one.population) for one in await store.events.list_raised_alerts()]
    assert raised == [("failing", "j-1", "demo"), ("failing", "", "other"), ("failing", "", "")]


# --- webhooks ------------------------------------------------------------------------------------------------


async def test_webhooks_come_and_go(store: Store) -> None:
    for number in range(3):
        await store.webhooks.add_webhook(webhook(number, "job.failed"), [AuditEntry("anna", AuditAction.WEBHOOK_ADDED)])
    found = await store.webhooks.list_webhooks()
    assert [(one.webhook_id, one.types, one.num_pending) for one in found] == [
        (f"w-{number:012x}", ("job.failed",), 0) for number in range(3)
    ]
    assert await store.webhooks.list_webhooks(after=found[0].webhook_id, limit=1) == found[1:2]
    assert await store.webhooks.find_webhook(found[2].webhook_id) == found[2]
    assert found[0].secret not in repr(found[0])
    await store.webhooks.remove_webhook(found[1].webhook_id)
    assert await store.webhooks.list_ids() == [found[0].webhook_id, found[2].webhook_id]
    assert await store.webhooks.find_webhook(found[1].webhook_id) is None
    last = (await store.events.list_events(newest_first=True, limit=1))[0]
    assert (last.type, last.subject) == ("webhook.removed", found[1].webhook_id)
    assert "/1" not in last.text  # the path of a URL may be a secret


async def test_their_number_is_limited_even_if_they_come_at_once(store: Store) -> None:
    calls = (store.webhooks.add_webhook(webhook(number)) for number in range(MAX_WEBHOOKS + 5))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, WebhookError) for answer in answers) == 5
    assert len(await store.webhooks.list_webhooks()) == MAX_WEBHOOKS


async def schedule_all(store: Store) -> None:
    while await store.webhooks.schedule_deliveries(limit=3):
        pass


async def test_each_event_is_scheduled_once_for_each_webhook_that_receives_its_type(store: Store) -> None:
    await store.events.record_alerts([alert(0)], [])
    await store.webhooks.add_webhook(webhook(1))
    await store.webhooks.add_webhook(webhook(2, "alert.ended"))
    await store.events.record_alerts([alert(1), alert(2)], [alert(3), alert(4)])
    await asyncio.gather(schedule_all(store), schedule_all(store))
    deliveries = await store.webhooks.list_deliveries()
    by_webhook = {
        number: [
            one.event.subject or one.event.type for one in deliveries if one.webhook_id == webhook(number).webhook_id
        ]
        for number in (1, 2)
    }
    assert by_webhook == {
        1: ["alert_4", "alert_3", "alert_2", "alert_1", webhook(2).webhook_id],
        2: ["alert_4", "alert_3"],
    }
    found = await store.webhooks.list_webhooks()
    assert [one.num_pending for one in found] == [5, 2]
    oldest = deliveries[-1].event
    assert (found[0].oldest_unix_s, oldest.type) == (oldest.unix_s, "webhook.added")


async def test_a_webhook_receives_what_happens_after_it_was_added(store: Store) -> None:
    """Also if the deliveries to earlier webhooks are scheduled late, and only then."""
    await store.webhooks.add_webhook(webhook(1))
    await store.events.record_alerts([alert(1)], [])
    await store.webhooks.add_webhook(webhook(2))
    await store.events.record_alerts([alert(2)], [])
    await schedule_all(store)
    for number, expected in ((1, ["alert_2", webhook(2).webhook_id, "alert_1"]), (2, ["alert_2"])):
        found = await store.webhooks.list_deliveries(webhook_id=webhook(number).webhook_id)
        assert [one.event.subject for one in found] == expected


async def test_deliveries_are_listed_page_by_page(store: Store) -> None:
    for number in (1, 2):
        await store.webhooks.add_webhook(webhook(number, "alert.raised"))
    await store.events.record_alerts([alert(number) for number in range(4)], [])
    await schedule_all(store)
    whole, pages, before = await store.webhooks.list_deliveries(), [], None
    while page := await store.webhooks.list_deliveries(before=before, limit=3):
        pages += page
        before = (page[-1].event.sequence, page[-1].webhook_id)
    assert pages == whole
    assert len(whole) == 8
    mine = await store.webhooks.list_deliveries(webhook_id=webhook(1).webhook_id, state="pending", limit=2)
    assert [(one.webhook_id, one.event.subject) for one in mine] == [
        (webhook(1).webhook_id, "alert_3"),
        (webhook(1).webhook_id, "alert_2"),
    ]
    assert await store.webhooks.list_deliveries(state="failed") == []


async def test_attempts_are_recorded_and_the_next_one_waits(store: Store) -> None:
    await store.webhooks.add_webhook(webhook(1, "alert.raised"))
    await store.events.record_alerts([alert(1), alert(2)], [])
    await schedule_all(store)
    first = await store.webhooks.find_next_delivery(webhook(1).webhook_id)
    assert first is not None
    assert first.event.subject == "alert_1"
    assert first.next_unix_s is not None
    now = first.next_unix_s
    await store.webhooks.record_attempt(after_attempt(first, FAILURE, now, 0.5))
    second = await store.webhooks.find_next_delivery(webhook(1).webhook_id)
    assert second is not None
    assert second.event.subject == "alert_2"
    assert await store.webhooks.find_failing_webhooks(now - 1.0) == []
    (failing,) = await store.webhooks.find_failing_webhooks(now)
    assert (failing.last_result, failing.last_unix_s, failing.failing_since_unix_s) == ("503", now, now)
    await store.webhooks.record_attempt(after_attempt(second, FAILURE, now + 3600.0, 0.5))
    assert (await store.webhooks.find_failing_webhooks(now))[0].failing_since_unix_s == now
    again = await store.webhooks.find_next_delivery(webhook(1).webhook_id)
    assert again == after_attempt(first, FAILURE, now, 0.5)
    assert again is not None
    await store.webhooks.record_attempt(after_attempt(again, SUCCESS, now + 3601.0, 0.5))
    assert await store.webhooks.find_failing_webhooks(now + 4000.0) == []
    states = [(one.state, one.num_attempts, one.result) for one in await store.webhooks.list_deliveries()]
    assert states == [(DeliveryState.PENDING, 1, "503"), (DeliveryState.DELIVERED, 2, "200")]


async def test_what_happens_to_one_webhook_concerns_no_other(store: Store) -> None:
    one, two = webhook(1, "alert.raised"), webhook(2, "alert.raised")
    for each in (one, two):
        await store.webhooks.add_webhook(each)
    await store.events.record_alerts([alert(number) for number in range(4)], [])
    await schedule_all(store)
    other = await store.webhooks.find_webhook(two.webhook_id)

    async def states(webhook_id: str) -> list[tuple[str, str]]:
        return [
            (each.event.subject, each.state) for each in await store.webhooks.list_deliveries(webhook_id=webhook_id)
        ]

    untouched = [(f"alert_{number}", "pending") for number in (3, 2, 1, 0)]
    first = await store.webhooks.find_next_delivery(one.webhook_id)
    second = await store.webhooks.find_next_delivery(two.webhook_id)
    assert first is not None
    assert second is not None
    assert (first.webhook_id, second.webhook_id) == (one.webhook_id, two.webhook_id)
    delivered = after_attempt(first, SUCCESS, 9.0, 0.0)
    await store.webhooks.record_attempt(delivered)
    await store.webhooks.record_attempt(after_attempt(first, FAILURE, 10.0, 0.0))  # repeated after a lost reply
    assert (await states(one.webhook_id))[-1] == ("alert_0", "delivered")
    following = await store.webhooks.find_next_delivery(one.webhook_id)
    assert following is not None
    assert following.event.subject == "alert_1"
    assert await states(two.webhook_id) == untouched
    assert await store.webhooks.find_webhook(two.webhook_id) == other
    assert await store.webhooks.limit_pending(3) == 1  # the oldest one of the second webhook
    assert await states(one.webhook_id) == [*untouched[:3], ("alert_0", "delivered")]
    assert await states(two.webhook_id) == [*untouched[:3], ("alert_0", "failed")]
    await store.webhooks.remove_webhook(one.webhook_id)
    assert await states(two.webhook_id) == [*untouched[:3], ("alert_0", "failed")]


async def test_a_webhook_without_events_has_no_delivery(store: Store) -> None:
    await store.webhooks.add_webhook(webhook(1))
    assert await store.webhooks.find_next_delivery(webhook(1).webhook_id) is None


async def test_an_attempt_for_a_removed_webhook_leaves_nothing(store: Store) -> None:
    await store.webhooks.add_webhook(webhook(1))
    await store.events.record_alerts([alert(1)], [])
    await schedule_all(store)
    delivery = await store.webhooks.find_next_delivery(webhook(1).webhook_id)
    assert delivery is not None
    await store.webhooks.remove_webhook(webhook(1).webhook_id)
    await store.webhooks.record_attempt(after_attempt(delivery, SUCCESS, 9.0, 0.0))
    assert await store.webhooks.list_deliveries() == []


async def test_the_oldest_pending_deliveries_fail_if_there_are_too_many(store: Store) -> None:
    for number in (1, 2):
        await store.webhooks.add_webhook(webhook(number, "alert.raised" if number == 1 else "job.failed"))
    await store.events.record_alerts([alert(number) for number in range(5)], [])
    await schedule_all(store)
    assert await store.webhooks.limit_pending(3) == 2
    assert await store.webhooks.limit_pending(3) == 0
    failed = await store.webhooks.list_deliveries(state="failed")
    assert [one.event.subject for one in failed] == ["alert_1", "alert_0"]
    assert all("pending deliveries" in one.result and one.next_unix_s is None for one in failed)


async def test_the_deliveries_of_removed_events_go_and_others_stay(store: Store) -> None:
    await store.webhooks.add_webhook(webhook(1, "alert.raised"))
    await store.events.record_alerts([alert(number) for number in range(3)], [])
    await schedule_all(store)
    while (delivery := await store.webhooks.find_next_delivery(webhook(1).webhook_id)) is not None:
        await store.webhooks.record_attempt(after_attempt(delivery, SUCCESS, 9.0, 0.0))
    first = (await store.events.list_events(types={"alert.raised"}))[0]
    while first in await store.events.list_events():
        assert await store.events.remove_events(2e9, limit=1) == 1
    assert [one.event.subject for one in await store.webhooks.list_deliveries()] == ["alert_2", "alert_1"]


async def test_events_are_removed_by_age_unless_a_webhook_needs_them(store: Store) -> None:
    await store.events.record_alerts([alert(0)], [])
    await store.webhooks.add_webhook(webhook(1, "alert.raised"))
    await store.events.record_alerts([alert(1), alert(2)], [alert(3)])
    last = await store.events.find_last_sequence()
    now = 2e9
    while await store.events.remove_events(now, limit=1):
        pass
    kept = await store.events.list_events()
    assert [one.subject for one in kept] == ["alert_1", "alert_2", "alert_3"]  # the cursor has not reached them
    await schedule_all(store)
    first = await store.webhooks.find_next_delivery(webhook(1).webhook_id)
    assert first is not None
    await store.webhooks.record_attempt(after_attempt(first, SUCCESS, 9.0, 0.0))
    assert await store.events.remove_events(kept[0].unix_s) == 0
    assert await store.events.remove_events(now) == 1
    assert [one.event.subject for one in await store.webhooks.list_deliveries()] == ["alert_2"]
    await store.webhooks.remove_webhook(webhook(1).webhook_id)
    await store.events.remove_events(now)
    assert await store.events.list_events() == []
    await store.events.record_alerts([alert(9)], [])
    assert await store.events.find_last_sequence() == last + 2  # numbers are not used again
