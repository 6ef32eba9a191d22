"""The contract of every store for giving up old files and history: rows stay, and so does what is needed."""

from __future__ import annotations

import pytest
from msgspec import structs

from fedplat.rounds import AttemptKey
from fedplat.rounds.events import AssignmentFailed, AttemptAggregated, JobAction, RollbackOrdered, UpdateReported
from fedplat.rounds.states import Reason
from fedplat_server.database.records import AttemptFilter, Removable, RetainedVersions
from fedplat_server.database.sql_assignments import AssignmentFilter
from fedplat_server.database.store import Store
from fedplat_server.errors import StoreError
from support.store.driver import JOB_FILE, Driver, digest_of, draft, eventful, run_to_the_end

ROUNDS = 4
WITHOUT_EVALUATION = JOB_FILE.partition("[evaluation")[0].replace("rounds = 3", "rounds = 9")
BUFFERED = WITHOUT_EVALUATION + '[mode]\nkind = "buffered"\nconcurrency = 6\n'
TEXT = JOB_FILE.replace("rounds = 3", f"rounds = {ROUNDS}")


def shown(found: list[Removable]) -> list[tuple[int, bool, bool]]:
    return [(one.version.version, one.model, one.state) for one in found]


async def ended(store: Store, job_id: str = "one") -> Driver:
    """A job that has ended with version 4; it has states from version 1 on."""
    driver = Driver(store)
    await driver.create(job_id, TEXT)
    await run_to_the_end(driver, job_id, f"{job_id}-")
    assert driver.coordinator.jobs[job_id].latest.version == ROUNDS
    return driver


async def report(driver: Driver, *client_ids: str) -> None:
    for client_id in client_ids:
        key = driver.coordinator.assignment_of(client_id)
        assert key is not None
        await driver.send(UpdateReported(key, client_id, digest_of(client_id), 4.0, {}, 100))


async def test_old_files_are_given_up_and_rows_stay(store: Store) -> None:
    await ended(store)
    keep = RetainedVersions(models_from=4, every=2, states_from=3)
    found = await store.retention.list_removable("one", keep)
    assert shown(found) == [(1, True, True), (2, False, True), (3, True, False)]
    assert shown(await store.retention.list_removable("one", keep, limit=1)) == [(1, True, True)]
    gone = await store.retention.mark_removed("one", found)
    models = {digest_of("one", number) for number in (1, 3)} | {digest_of("one", "delta", number) for number in (1, 3)}
    assert gone == models | {digest_of("one", "state", number) for number in (1, 2)}
    assert not gone & await store.retention.list_referenced()
    assert await store.retention.list_removable("one", keep) == []
    records = await store.jobs.list_versions("one")
    assert [record.model_removed_unix_s is None for record in records] == [True, False, True, False, True]
    assert [record.state_removed_unix_s is None for record in records] == [True, False, False, True, True]
    assert [record.version.version for record in records] == list(range(ROUNDS + 1))
    assert await store.jobs.find_populations(digest_of("one", 1)) == frozenset()
    assert await store.jobs.find_populations(digest_of("one", 2)) == {"demo"}
    some = {digest_of("one", 1), digest_of("one", 2), digest_of("one", "state", 4), "f" * 64}
    assert await store.retention.find_unreferenced(some) == {digest_of("one", 1), "f" * 64}


async def test_the_first_the_latest_and_what_clients_work_with_are_kept(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", TEXT)
    await driver.finish_attempt("one", "a")
    await driver.finish_attempt("one", "evaluator-")
    await driver.finish_attempt("one", "b")
    await driver.check_in(*(f"c{number}" for number in range(9)))  # clients work with version 2, the latest
    everything = RetainedVersions(models_from=100, states_from=0)
    assert shown(await store.retention.list_removable("one", everything)) == [(1, True, False)]


async def test_a_model_is_kept_while_an_assignment_that_outlives_its_attempt_needs_it(store: Store) -> None:
    """In a job with a buffer, a slow client of version 1 still works when no attempt is based on that version."""
    driver = Driver(store)
    await driver.create("one", BUFFERED)
    await driver.check_in(*"abcdef")
    for reporting, arriving in (
        ("abc", "ghi"),
        ("def", "jkl"),
        ("ghj", "mno"),
        ("klm", "pqr"),
    ):  # i works with 1, n with 3
        await report(driver, *reporting)
        await driver.aggregate("one")
        await driver.check_in(*arriving)
    everything = RetainedVersions(models_from=100)
    assert shown(await store.retention.list_removable("one", everything)) == [(2, True, False)]
    versions = [one.version for one in await store.jobs.list_versions("one")]
    gone = await store.retention.mark_removed("one", [Removable(versions[1], model=True, state=False)])
    assert (gone, digest_of("one", 1) in await store.retention.list_referenced()) == (frozenset(), True)
    key = driver.coordinator.assignment_of("i")
    assert key is not None
    await driver.send(AssignmentFailed(key, "i", Reason.CLIENT_STOPPED))
    assert shown(await store.retention.list_removable("one", everything)) == [(1, True, False), (2, True, False)]


async def test_what_has_become_the_latest_meanwhile_is_kept(store: Store) -> None:
    """A rollback comes between the listing and the removal: the bytes belong to the new version, too."""
    driver = Driver(store)
    await driver.create("one", TEXT)
    for name in ("a", "evaluator-", "b", "evaluator2-"):
        await driver.finish_attempt("one", name)
    found = await store.retention.list_removable("one", RetainedVersions(models_from=2, states_from=2))
    assert shown(found) == [(1, True, True)]
    (record,) = [one for one in await store.jobs.list_versions("one") if one.version.version == 1]
    await driver.send(RollbackOrdered("one", record.version))
    assert await store.retention.mark_removed("one", found) == {digest_of("one", "delta", 1)}
    job = driver.coordinator.jobs["one"]
    assert (job.latest.version, job.latest.digest, job.latest.restored_from) == (3, digest_of("one", 1), 1)
    assert {digest_of("one", 1), digest_of("one", "state", 1)} <= await store.retention.list_referenced()


async def test_a_rollback_to_files_that_were_given_up_is_refused(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", TEXT)
    for name in ("a", "evaluator-", "b", "evaluator2-"):
        await driver.finish_attempt("one", name)
    (record,) = [one for one in await store.jobs.list_versions("one") if one.version.version == 1]
    await store.retention.mark_removed(
        "one", await store.retention.list_removable("one", RetainedVersions(states_from=2))
    )
    proposal = driver.propose(RollbackOrdered("one", record.version))
    with pytest.raises(StoreError, match="the files of version 1 are not kept any more"):
        await store.jobs.save(proposal.changes, driver.now)
    driver.coordinator.reject(proposal)
    await driver.check()
    await driver.send(RollbackOrdered("one", structs.replace(record.version, state_digest="")))
    await driver.restart()
    assert driver.coordinator.jobs["one"].latest.restored_from == 1


async def test_the_removal_of_one_job_concerns_no_other(store: Store) -> None:
    """The other job has the same numbers of versions, an attempt that is open, and another latest version."""
    await ended(store)
    driver = Driver(store, "two-")
    await driver.create("two", TEXT)
    await driver.finish_attempt("two", "a")
    await driver.finish_attempt("two", "evaluator-")
    everything = RetainedVersions(models_from=100, states_from=100)
    await driver.check_in(*(f"b{number}" for number in range(9)))  # clients work with version 1 of job two
    found = await store.retention.list_removable("one", everything)
    assert shown(found) == [(1, True, True), (2, True, True), (3, True, True), (4, False, True)]
    assert shown(await store.retention.list_removable("two", everything)) == [(1, False, True)]
    await driver.operate("two", JobAction.PAUSE)  # without an attempt, its latest version is still needed
    before = await store.jobs.list_versions("two")
    assert shown(await store.retention.list_removable("two", everything)) == [(1, False, True)]
    await store.retention.mark_removed("one", found)
    assert await store.jobs.list_versions("two") == before
    once = await store.jobs.list_versions("one")
    assert len({record.model_removed_unix_s for record in once}) == 2
    await store.retention.mark_removed("one", found)  # the time of the first removal is kept
    assert await store.jobs.list_versions("one") == once


async def test_versions_without_files_have_none_to_remove(store: Store) -> None:
    """The server has neither the mean of a decentralised job, nor a state or a delta that was not made."""
    driver = Driver(store)
    await driver.create("one", TEXT)
    for number, is_held in ((1, True), (2, False)):
        await driver.check_in(*(f"{number}-{each}" for each in range(5)))
        key, cohort = driver.cohort("one")
        for client_id in cohort[:3]:
            digest = digest_of("update", number, client_id)
            await driver.send(UpdateReported(key, client_id, digest, 1.0, {}, update_bytes=1))
        made = structs.replace(driver.next_version("one"), state_digest="", delta_digest="", is_held_by_clients=is_held)
        await driver.send(AttemptAggregated(key, made))
        await driver.finish_attempt("one", f"evaluator-{number}-")
    everything = RetainedVersions(models_from=100, states_from=100)
    assert await store.retention.list_removable("one", everything) == []
    assert await store.retention.list_referenced() == {digest_of("one", 0), digest_of("one", 2)}
    versions = [record.version for record in await store.jobs.list_versions("one")]
    gone = await store.retention.mark_removed("one", [Removable(each, model=True, state=True) for each in versions])
    assert gone == {digest_of("one", 1)}


async def test_shared_bytes_stay_as_long_as_a_version_names_them(store: Store) -> None:
    """Another job begins with a version of the first one."""
    await ended(store)
    state = draft("two", JOB_FILE)
    same = structs.replace(state.latest, digest=digest_of("one", 1))
    await store.jobs.create_job(structs.replace(state, latest=same), JOB_FILE, "the second job")
    found = await store.retention.list_removable("one", RetainedVersions(models_from=2))
    gone = await store.retention.mark_removed("one", [*found, *found])  # a repetition changes nothing
    assert gone == {digest_of("one", "delta", 1)}
    assert await store.jobs.find_populations(digest_of("one", 1)) == {"demo"}


async def test_the_history_of_an_attempt_is_kept_while_a_client_works_for_it(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", BUFFERED)
    await driver.check_in(*"abcdef")
    other = Driver(store, "two-")  # the clients of another job, and of another attempt of a round, do not count
    await other.create("two", TEXT)
    await other.check_in(*"uvwxy")
    await other.tick("two", 200.0)
    await other.tick("two", 10.0)
    await other.check_in(*(f"u{number}" for number in range(9)))
    assert await store.retention.list_old_attempts("two", 1e12) == [AttemptKey("two", 1, 1)]
    for reporting, arriving in (("abc", "ghi"), ("ghi", "jkl"), ("jkl", "mno")):  # d, e and f work for round 1
        await report(driver, *reporting)
        await driver.aggregate("one")
        await driver.check_in(*arriving)
    assert await store.retention.list_old_attempts("one", 1e12) == [AttemptKey("one", 2, 1), AttemptKey("one", 3, 1)]
    await report(driver, *"def")
    await driver.aggregate("one")
    assert AttemptKey("one", 1, 1) in await store.retention.list_old_attempts("one", 1e12)


async def test_the_history_of_one_attempt_is_removed_alone(store: Store) -> None:
    """Two jobs had the same rounds, with several attempts each."""
    for job_id in ("one", "two"):
        await eventful(Driver(store, f"{job_id}-"), job_id)
    keys = await store.retention.list_old_attempts("one", 1e12)
    assert {(key.job_id, key.number) for key in keys} >= {("one", 1), ("one", 2), ("one", 3)}
    others = await store.retention.list_old_attempts("two", 1e12)
    assert [key[1:] for key in others] == [key[1:] for key in keys]

    async def read(job_id: str) -> dict[AttemptKey, tuple[int, bool, bool]]:
        """Return for each attempt the rows of its history, and whether its assignments have metrics and texts."""
        rows = [each.row for each in await store.jobs.list_history(job_id, limit=10_000)]
        found: dict[AttemptKey, tuple[int, bool, bool]] = {}
        for key in keys if job_id == "one" else others:
            made = await store.assignments.list_assignments(AssignmentFilter(job_id, key.round, key.number))
            num_rows = sum((each.round, each.attempt) == key[1:] and each.entity != "version" for each in rows)
            found[key] = (
                num_rows,
                any(each.assignment.metrics for each in made),
                any(each.assignment.text for each in made),
            )
        return found

    before, before_two = await read("one"), await read("two")
    whole = [key for key in keys if all(before[key])]
    assert len(whole) >= 1
    for key in whole:
        await store.retention.remove_history([key], metrics=True)
        before[key] = (0, False, False)
        assert (await read("one"), await read("two")) == (before, before_two)
    (busiest,) = await store.retention.list_old_attempts("two", 1e12, limit=1)
    await store.retention.remove_history([busiest], metrics=False)
    before_two[busiest] = (0, *before_two[busiest][1:])
    assert await read("two") == before_two
    assert await store.retention.list_old_attempts("one", 1e12) == [key for key in keys if key not in whole]
    assert await store.retention.list_old_attempts("two", 1e12) == others[1:]


async def test_the_history_of_old_attempts_is_removed(store: Store) -> None:
    await ended(store)
    before = len(await store.jobs.list_history("one"))
    assert await store.retention.list_old_attempts("one", 0.0) == []
    keys = await store.retention.list_old_attempts("one", 1e12)
    assert keys[:2] == sorted(keys)[:2]
    assert await store.retention.list_old_attempts("one", 1e12, limit=1) == keys[:1]
    rows = await store.jobs.list_history("one")
    mine = [one for one in rows if one.row.entity in ("attempt", "assignment")]
    first = [one for one in mine if AttemptKey("one", one.row.round, one.row.attempt) == keys[0]]
    assert await store.retention.remove_history(keys[:1], metrics=True) == len(first) > 0
    assert len(await store.jobs.list_history("one")) == before - len(first)
    assert await store.retention.remove_history(keys[1:], metrics=False) == len(mine) - len(first)
    left = await store.jobs.list_history("one")
    assert {one.row.entity for one in left} == {"job", "version"}
    assert await store.retention.list_old_attempts("one", 1e12) == []
    assert [one.attempt.metrics != {} for one in await store.jobs.list_attempts(AttemptFilter("one"))][-1]
