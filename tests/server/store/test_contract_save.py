"""What `save` does in every store: whatever a real coordinator decides is read back, all of it or nothing."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from msgspec import structs

from fedplat.rounds import AttemptKey, Change, closing
from fedplat.rounds.events import AttemptAggregated, JobAction, OperatorCommand, UpdateReported
from fedplat.rounds.states import AttemptPhase, JobStatus
from fedplat_server.database.records import AttemptFilter
from fedplat_server.database.store import Store
from fedplat_server.errors import StaleRevisionError, StoreError
from support.store.driver import (
    JOB_FILE,
    NOW,
    Driver,
    check_invariants,
    digest_of,
    draft,
    eventful,
    run_to_the_end,
    without_moments,
)


async def test_whatever_happens_is_read_back_after_each_step(store: Store, database: str) -> None:
    driver = Driver(store)
    await eventful(driver)
    job = driver.coordinator.jobs["eventful"]
    assert (job.status, job.round, job.latest.version) == (JobStatus.CANCELLED, 2, 2)
    await check_invariants(database)


async def test_a_paused_commit_becomes_a_version(store: Store, database: str) -> None:
    driver = Driver(store)
    await driver.create("one")
    await driver.check_in(*"abcde")
    key, cohort = driver.cohort("one")
    for name in cohort[:3]:
        await driver.send(UpdateReported(key, name, digest_of(name), 1.0))
    await driver.operate("one", JobAction.PAUSE)
    await driver.send(AttemptAggregated(key, driver.next_version("one")))
    assert driver.coordinator.jobs["one"].status is JobStatus.PAUSED
    await driver.operate("one", JobAction.RESUME)
    await run_to_the_end(driver, "one", "x")
    assert driver.coordinator.jobs["one"].status is JobStatus.COMPLETED
    await check_invariants(database)


async def test_the_end_of_an_attempt_is_that_of_its_first_save(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", JOB_FILE.partition("[evaluation")[0])
    await driver.finish_attempt("one", "a")
    key = AttemptKey("one", 1, 1)
    before = await store.jobs.find_attempts([key])
    assert before[key].ended_unix_s is not None
    (change,) = driver.propose(OperatorCommand("one", JobAction.PAUSE)).changes
    ended = driver.coordinator.jobs["one"].attempt
    assert ended is not None
    closed = structs.replace(ended, key=key, phase=AttemptPhase.COMMITTED, ended_at=driver.now)
    await store.jobs.save([dataclasses.replace(change, attempt=closed)], driver.now)
    assert (await store.jobs.find_attempts([key]))[key].ended_unix_s == before[key].ended_unix_s


async def test_many_steps_are_saved_at_once(store: Store, database: str) -> None:
    """A batch in which an attempt opens, is joined, reported and closed gives the same as its steps."""
    driver = Driver(store)
    await driver.create("one")
    await driver.check_in(*"abcde")
    key, cohort = driver.cohort("one")
    events = [UpdateReported(key, name, digest_of(name), 2.0, {"loss": 0.1}) for name in cohort[:3]]
    proposal = driver.propose(*events)
    driver.coordinator.accept(proposal)
    after = driver.propose(AttemptAggregated(key, driver.next_version("one")))
    driver.coordinator.accept(after)
    await store.jobs.save([*proposal.changes, *after.changes], NOW)
    await driver.check()
    assert len(driver.coordinator.jobs["one"].durations) == 3
    await check_invariants(database)


async def test_only_the_newest_durations_are_read_in_order(store: Store) -> None:
    """Durations of evaluations are not among them."""
    job_file = JOB_FILE.replace("rounds = 3", "rounds = 2").replace("goal = 3", "goal = 400")
    driver = Driver(store, check=False)
    await driver.create("one", job_file)
    for names in ("first", "evaluation", "second"):
        attempt = driver.coordinator.jobs["one"].open_attempt
        assert attempt is not None
        await driver.check_in(*(f"{names} {number}" for number in range(attempt.target)))
        key, cohort = driver.cohort("one")
        changes: list[Change] = []
        for name in cohort[: attempt.goal]:
            driver.now += 0.001
            proposal = driver.propose(UpdateReported(key, name, digest_of(key, name), 1.0))
            driver.coordinator.accept(proposal)
            changes += proposal.changes
        await store.jobs.save(changes, NOW)
        await driver.aggregate("one")
    (record,) = await store.jobs.load_jobs()
    assert len(record.state.durations) == closing.MAX_DURATIONS
    await driver.check()


async def test_the_latest_claim_of_each_client_is_read_in_order(store: Store) -> None:
    """What a job in memory, or with a small buffer, judges its reports by; a restart changes nothing of it."""
    driver = Driver(store)
    await driver.create("one", 'durability = "memory"\n' + JOB_FILE)
    attempt = driver.coordinator.jobs["one"].open_attempt
    assert attempt is not None
    await driver.check_in(*(f"c{number}" for number in range(attempt.target)))
    key, cohort = driver.cohort("one")
    for number, name in enumerate(cohort[: attempt.goal]):
        await driver.send(UpdateReported(key, name, digest_of(key, name), 2.0, norm=1.0 + number))
    await driver.aggregate("one")
    (record,) = await store.jobs.load_jobs()
    assert record.state.claims == driver.coordinator.jobs["one"].claims
    assert len({claim.client_id for claim in record.state.claims}) == len(record.state.claims) >= 3
    rows = [one.row for one in await store.jobs.list_history("one") if one.row.to_state == "REPORTED"]
    assert {row.norm for row in rows} >= {claim.norm for claim in record.state.claims}


async def test_an_empty_save_does_nothing(store: Store) -> None:
    await store.jobs.save([], NOW)


@pytest.mark.fault("F20")
async def test_a_save_of_another_revision_is_refused(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    proposal = driver.propose(OperatorCommand("one", JobAction.PAUSE))
    await store.jobs.save(proposal.changes, NOW)
    with pytest.raises(StaleRevisionError):
        await store.jobs.save(proposal.changes, NOW)


@pytest.mark.fault("F20")
async def test_of_two_that_save_the_same_revision_one_wins(store: Store, database: str) -> None:
    driver = Driver(store)
    await driver.create("one")
    proposals = [driver.propose(OperatorCommand("one", action)) for action in (JobAction.PAUSE, JobAction.CANCEL) * 4]
    results = await asyncio.gather(*(store.jobs.save(p.changes, NOW) for p in proposals), return_exceptions=True)
    assert sum(result is None for result in results) == 1
    assert sum(isinstance(result, StaleRevisionError) for result in results) == 7
    (record,) = await store.jobs.load_jobs()
    assert record.state.status is proposals[results.index(None)].jobs["one"].status
    await check_invariants(database)


async def test_a_save_of_an_unknown_job_is_refused(store: Store) -> None:
    driver = Driver(store)
    driver.coordinator.add(draft("ghost"))
    with pytest.raises(StaleRevisionError):
        await driver.operate("ghost", JobAction.START)


async def _everything(store: Store, job_ids: tuple[str, ...]) -> list[object]:
    per_job = [
        [
            await store.jobs.list_attempts(AttemptFilter(job_id, all_attempts=True)),
            await store.jobs.list_versions(job_id),
            await store.jobs.list_history(job_id),
        ]
        for job_id in job_ids
    ]
    return [[without_moments(record.state) for record in await store.jobs.load_jobs()], per_job]


async def _refused(store: Store, *changes: Change, error: type[StoreError] = StoreError) -> None:
    """Saves changes, and asserts that it fails and leaves nothing behind."""
    before = await _everything(store, ("one", "two"))
    with pytest.raises(error):
        await store.jobs.save(changes, NOW)
    assert await _everything(store, ("one", "two")) == before
    for change in changes:
        for assignment in change.assignments:
            found = await store.jobs.find_assignment(assignment.token_hash)
            assert found is None or found != structs.replace(assignment, assigned_at=0.0, deadline_at=0.0)


async def test_a_save_is_all_or_nothing(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    await driver.create("two")
    await driver.check_in(*(f"c{number}" for number in range(10)))
    (key, cohort), (other_key, others) = driver.cohort("one"), driver.cohort("two")
    events = [
        UpdateReported(key, cohort[0], digest_of("u"), 1.0),
        UpdateReported(other_key, others[0], digest_of("u"), 1.0),
    ]
    first, second = driver.propose(*events).changes

    await _refused(store, first, dataclasses.replace(second, expected_revision=99), error=StaleRevisionError)
    await _refused(store, first, first, error=StaleRevisionError)

    assert driver.coordinator.jobs["two"].attempt is not None
    taken = driver.coordinator.jobs["one"].attempt
    assert taken is not None
    thief = structs.replace(second.assignments[0], token_hash=taken.assignments[cohort[1]].token_hash)
    await _refused(store, first, dataclasses.replace(second, assignments=(thief,)))

    double = dataclasses.replace(second, version=driver.coordinator.jobs["two"].latest)
    await _refused(store, first, double)

    await store.jobs.save([first, second], NOW)


async def test_a_round_has_one_version(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    await driver.create("two")
    await driver.finish_attempt("one", "a")
    change = driver.propose(OperatorCommand("one", JobAction.PAUSE)).changes[0]
    again = structs.replace(driver.coordinator.jobs["one"].latest, version=3)
    await _refused(store, dataclasses.replace(change, version=again))
