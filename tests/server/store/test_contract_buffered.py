"""What every store keeps for a job with a buffer: the attempt of each client, and the staleness of each update."""

from __future__ import annotations

import pytest

from fedplat.rounds import AttemptKey
from fedplat.rounds.events import AssignmentFailed, JobAction, ServerRestarted, UpdateReported, UploadStarted
from fedplat.rounds.states import AssignmentState, AttemptKind, Reason
from fedplat_server.database.records import AttemptFilter, Staleness
from fedplat_server.database.store import Store
from support.store.driver import JOB_FILE, Driver, check_invariants, digest_of

BUFFERED = JOB_FILE.replace("rounds = 3", "rounds = 9") + '[mode]\nkind = "buffered"\nconcurrency = 6\n'


async def begun(store: Store, job_file: str = BUFFERED) -> Driver:
    """Six clients at work; the driver compares its state with the stored one after every step."""
    driver = Driver(store)
    await driver.create("one", job_file)
    await driver.check_in(*"abcdef")
    return driver


async def report(driver: Driver, *client_ids: str) -> None:
    for client_id in client_ids:
        key = driver.coordinator.assignment_of(client_id)
        assert key is not None
        await driver.send(UpdateReported(key, client_id, digest_of(key, client_id), 4.0, {"loss": 1.0}, 100))


async def test_assignments_outlive_their_attempts(store: Store, database: str) -> None:
    driver = await begun(store)
    await report(driver, "a", "b", "c")
    await report(driver, "d")  # while the first version is made
    await driver.aggregate("one")
    await driver.finish_attempt("one", "scores-")
    job = driver.coordinator.jobs["one"]
    assert job.attempt is not None
    states = {name: (str(each.state), each.key.round) for name, each in job.attempt.assignments.items()}
    assert states == {"d": ("REPORTED", 1), "e": ("TRAINING", 1), "f": ("TRAINING", 1)}
    await driver.check_in(*"abc")
    await driver.send(UploadStarted(AttemptKey("one", 1, 1), "e"))
    await report(driver, "a", "e")
    await driver.aggregate("one")
    assert job.attempt.assignments["d"].weight == 4.0 * 2**-0.5
    rounds = [
        one for one in await store.jobs.list_attempts(AttemptFilter("one")) if one.attempt.kind is AttemptKind.TRAIN
    ]
    tallies = [one.tally for one in rounds[:2]]
    assert [one.counts.get(AssignmentState.MERGED) for one in tallies] == [3, 3]
    assert [one.staleness for one in tallies] == [Staleness(), Staleness(2 / 3, 1)]
    assert [one.update_bytes for one in tallies] == [300, 300]
    await check_invariants(database)


async def test_the_last_attempt_counts_what_it_took_over(store: Store) -> None:
    driver = await begun(store, BUFFERED.replace("[evaluation.clients]", "[evaluation]\n[evaluation.clients]"))
    await report(driver, "a", "b", "c")
    await driver.aggregate("one")
    await driver.finish_attempt("one", "scores-")
    await report(driver, "f")
    (*_, last) = await store.jobs.list_attempts(AttemptFilter("one", all_attempts=True))
    assert last is not None
    tally = last.tally
    assert (last.key.round, dict(tally.counts), tally.staleness) == (
        2,
        {AssignmentState.REPORTED: 1},
        Staleness(1.0, 1),
    )
    assert await store.jobs.find_attempts([last.key]) == {last.key: last}


async def test_all_clients_continue_after_a_restart(store: Store, database: str) -> None:
    driver = await begun(store)
    await report(driver, "a", "b", "c")
    await report(driver, "f")
    await driver.restart()
    job = driver.coordinator.jobs["one"]
    assert {name: str(each.state) for name, each in job.carried_over.assignments.items()} == {
        "d": "TRAINING",
        "e": "TRAINING",
        "f": "REPORTED",
    }
    await driver.aggregate("one")
    await driver.restart()  # while version 1 is evaluated
    await driver.finish_attempt("one", "scores-")
    await driver.send(AssignmentFailed(AttemptKey("one", 1, 1), "d", Reason.CLIENT_STOPPED))
    await driver.restart()
    await driver.check_in(*"abc")
    await driver.send(ServerRestarted("one"))
    assert driver.coordinator.num_busy == 4
    await driver.operate("one", JobAction.PAUSE)
    assert driver.coordinator.num_busy == 0
    await driver.restart()
    await driver.operate("one", JobAction.RESUME)
    await check_invariants(database)


@pytest.mark.parametrize("number", [0, 1])
async def test_versions_are_found_by_their_number(store: Store, number: int) -> None:
    driver = await begun(store)
    await report(driver, "a", "b", "c")
    await driver.aggregate("one")
    found = await store.jobs.find_version("one", number)
    assert found == [one.version for one in await store.jobs.list_versions("one")][number]
    assert await store.jobs.find_version("one", 7) is None
    assert await store.jobs.find_version("two", 0) is None
