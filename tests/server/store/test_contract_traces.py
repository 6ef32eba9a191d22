"""The contract of every store for the attempts that have ended, of which traces are made."""

from __future__ import annotations

from collections import Counter

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.events import AssignmentFailed, UpdateReported
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, Reason
from fedplat_server.database.records import HistoryRecord
from fedplat_server.database.store import Store
from support.store.driver import JOB_FILE, Driver, digest_of, eventful

ENDED = ("COMMITTED", "ABANDONED")
BUSY = ("TRAINING", "UPLOADING")
FAILED = ("FAILED", "REJECTED", "LATE")


async def history_of(store: Store, job_id: str) -> list[HistoryRecord]:
    return await store.jobs.list_history(job_id, limit=100_000)


async def test_an_empty_database_has_no_attempts(store: Store) -> None:
    assert await store.traces.find_last_sequence() == 0
    assert await store.traces.list_ended_attempts(0) == []


async def test_ended_attempts_are_those_of_the_history(store: Store) -> None:
    """The expected values are read from the whole history, row by row."""
    driver = Driver(store)
    await eventful(driver)
    await driver.create("another")  # has an attempt that has not ended
    await driver.check_in("x", "y")
    rows = await history_of(store, "eventful")
    found = await store.traces.list_ended_attempts(0, limit=100)
    ends = [each for each in rows if each.row.entity == "attempt" and each.row.to_state in ENDED]
    assert len(ends) >= 5
    assert [(one.sequence, one.key.round, one.key.number) for one in found] == [
        (each.sequence, each.row.round, each.row.attempt) for each in ends
    ]
    assert {one.kind for one in found} == {AttemptKind.TRAIN, AttemptKind.EVALUATE}
    for one in found:
        mine = [each for each in rows if (each.row.round, each.row.attempt) == (one.key.round, one.key.number)]
        mine = [each for each in mine if each.sequence <= one.sequence]
        assert [(start.phase, start.unix_s) for start in one.phases] == [
            (each.row.to_state, each.unix_s) for each in mine if each.row.entity == "attempt"
        ]
        ended = {
            each.row.client_id: each.unix_s
            for each in mine
            if each.row.entity == "assignment" and each.row.from_state in BUSY and each.row.to_state not in BUSY
        }
        assert {each.id.client_id: each.ended_unix_s for each in one.assignments} == ended
        last = {each.row.client_id: each.row.to_state for each in mine if each.row.entity == "assignment"}
        assert {each.id.client_id: each.state for each in one.assignments} == last
        assert one.counts == Counter(last.values())
        assert all(each.assigned_unix_s <= each.ended_unix_s for each in one.assignments if each.state in FAILED)


async def test_assignments_that_failed_come_first(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    (first,) = await store.traces.list_ended_attempts(0, limit=1)
    assert [(one.id.client_id, one.state, one.reason) for one in first.assignments[:2]] == [
        ("b", AssignmentState.FAILED, Reason.TRAINER_ERROR),
        ("c", AssignmentState.REJECTED, Reason.REJECTED_NONFINITE),
    ]
    assert len(first.assignments) == 5
    (cut,) = await store.traces.list_ended_attempts(0, limit=1, max_assignments=3)
    assert cut.assignments == first.assignments[:3]
    assert cut.counts == first.counts


async def test_attempts_are_read_in_pages_and_from_a_time_on(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    whole = await store.traces.list_ended_attempts(0, limit=100)
    paged, after = [], 0
    while page := await store.traces.list_ended_attempts(after, limit=2):
        paged += page
        after = page[-1].sequence
    assert paged == whole
    third = whole[2].phases[-1].unix_s
    assert await store.traces.list_ended_attempts(0, since_unix_s=third, limit=100) == whole[2:]
    assert await store.traces.find_last_sequence() >= whole[-1].sequence
    assert await store.traces.list_ended_attempts(await store.traces.find_last_sequence()) == []


async def test_attempts_of_several_jobs_do_not_mix(store: Store) -> None:
    driver = Driver(store)
    for job_id in ("one", "two"):
        await driver.create(job_id)
    while all(driver.coordinator.jobs[job_id].round == 0 for job_id in ("one", "two")):
        await driver.check_in(*(f"c{number}" for number in range(10)))
        for job_id in ("one", "two"):
            attempt = driver.coordinator.jobs[job_id].open_attempt
            if attempt is not None and attempt.phase is AttemptPhase.COLLECTING:
                await driver.report(job_id, driver.cohort(job_id)[1][: attempt.goal])
    found = await store.traces.list_ended_attempts(0, limit=100)
    assert found
    for one in found:
        assert {each.id.attempt for each in one.assignments} == {one.key}
        assert len(one.assignments) == sum(one.counts.values()) == 5


async def test_an_attempt_without_history_is_left_out(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    first, second, *_ = await store.traces.list_ended_attempts(0, limit=100)
    await store.retention.remove_history([first.key], metrics=False)
    assert (await store.traces.list_ended_attempts(0, limit=1))[0].key == second.key


async def test_an_assignment_that_outlives_its_attempt_is_of_the_next_end(store: Store) -> None:
    text = JOB_FILE.replace('[evaluation.clients]\nevaluator = "digits"\ngoal = 2\n', "")
    text = text.replace("over_selection = 1.5, min_fraction = 0.6", "over_selection = 1.5")
    text += '[mode]\nkind = "buffered"\nconcurrency = 5\n'
    driver = Driver(store)
    await driver.create("one", text)
    await driver.check_in("a", "b", "c", "d", "e")
    key, cohort = driver.cohort("one")
    await driver.report("one", cohort[:3])  # the buffer is full: the two others are carried over
    job = driver.coordinator.jobs["one"]
    late, failing = cohort[3:]
    assert job.round == 1
    await driver.send(AssignmentFailed(key, failing, Reason.TRAINER_ERROR))
    await driver.send(UpdateReported(key, late, digest_of("late"), 17.0, {}, update_bytes=1))
    await driver.check_in("f", "g", "h", "i", "j")
    again, cohort = driver.cohort("one")
    assert again == AttemptKey("one", 2, 1)
    await driver.report("one", [each for each in cohort if each not in (late, failing)][:2])
    first, second = await store.traces.list_ended_attempts(0)
    assert len(first.assignments) == 3
    carried = [each for each in second.assignments if each.id.attempt == key]
    assert [(each.id, each.state) for each in carried] == [
        (AssignmentId(key, failing), AssignmentState.FAILED),
        (AssignmentId(key, late), AssignmentState.MERGED),
    ]
