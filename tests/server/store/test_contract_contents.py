"""The contract of every store for the bytes of small updates and blobs: each shares the fate of its change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest
from msgspec import structs

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.events import AttemptAggregated, ClientRevoked, Event, JobAction, RollbackOrdered, UpdateReported
from fedplat.rounds.states import AttemptPhase
from fedplat_server.database.records import RetainedVersions
from fedplat_server.database.sql_contents import MAX_BYTES, SmallContents
from fedplat_server.database.store import Store
from fedplat_server.errors import StaleRevisionError
from support.store.driver import JOB_FILE, Driver

SYNC = JOB_FILE.partition("[evaluation")[0]
BUFFERED = SYNC.replace("rounds = 3", "rounds = 9") + '[mode]\nkind = "buffered"\nconcurrency = 6\n'


def content_of(client_id: str) -> bytes:
    return f"the update of {client_id}".encode()


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def begun(store: Store, job_file: str = SYNC) -> Driver:
    driver = Driver(store, check=False)
    await driver.create("one", job_file)
    await driver.check_in(*"abcdef"[: 6 if job_file == BUFFERED else 5])
    return driver


def reported(driver: Driver, client_id: str, size_bytes: int | None = None) -> tuple[AssignmentId, Event]:
    key, content = driver.coordinator.assignment_of(client_id), content_of(client_id)
    assert key is not None
    size_bytes = len(content) if size_bytes is None else size_bytes
    event = UpdateReported(key, client_id, digest_of(content), 4.0, {"loss": 1.0}, size_bytes)
    return AssignmentId(key, client_id), event


async def save(driver: Driver, *events: Event, contents: SmallContents) -> None:
    proposal = driver.propose(*events)
    await driver.store.jobs.save(proposal.changes, driver.now, contents=contents)
    driver.coordinator.accept(proposal)


async def report(driver: Driver, *client_ids: str) -> list[AssignmentId]:
    """Report with the bytes, one after the other."""
    keys: list[AssignmentId] = []
    for client_id in client_ids:
        key, event = reported(driver, client_id)
        await save(driver, event, contents=SmallContents({key: content_of(client_id)}))
        keys.append(key)
    return keys


async def stored(store: Store) -> Mapping[AssignmentId, bytes]:
    found = await store.contents.load_updates()
    assert all(digest_of(row.content) == row.digest for row in found.values())
    return {key: row.content for key, row in found.items()}


async def commit(driver: Driver, *blobs: bytes) -> None:
    """Commit the open attempt as a version with these model and state."""
    attempt = driver.coordinator.jobs["one"].open_attempt
    assert attempt is not None
    assert attempt.phase is AttemptPhase.COMMITTING
    version = driver.next_version("one")
    if blobs:
        model, state = map(digest_of, blobs)
        version = structs.replace(version, digest=model, state_digest=state)
    contents = SmallContents(blobs={digest_of(each): each for each in blobs})
    await save(driver, AttemptAggregated(attempt.key, version), contents=contents)


async def test_the_bytes_of_a_report_are_stored_with_it_until_the_attempt_ends(store: Store) -> None:
    driver = await begun(store)
    first, second = await report(driver, "a", "b")
    assert await stored(store) == {first: content_of("a"), second: content_of("b")}
    await driver.restart()
    assert await stored(store) == {first: content_of("a"), second: content_of("b")}
    await report(driver, "c")
    assert len(await stored(store)) == 3
    await commit(driver)
    assert await stored(store) == {}


async def test_an_attempt_that_is_given_up_takes_its_rows_along(store: Store) -> None:
    driver = await begun(store)
    await report(driver, "a", "b")
    await driver.operate("one", JobAction.PAUSE)
    assert await stored(store) == {}


async def test_only_what_a_change_accepts_is_stored(store: Store) -> None:
    driver = await begun(store)
    key, event = reported(driver, "a")
    await report(driver, "a")
    await save(driver, event, contents=SmallContents({key: b"other bytes"}))  # a duplicate, which changes nothing
    other, event = reported(driver, "b")
    stranger = other._replace(client_id="a stranger")
    await save(driver, event, contents=SmallContents({stranger: b"of no one"}, {"0" * 64: b"a blob of no version"}))
    assert await stored(store) == {key: content_of("a")}
    assert await store.contents.list_blobs() == frozenset()


async def test_a_batch_that_is_refused_stores_nothing(store: Store) -> None:
    driver = await begun(store)
    key, event = reported(driver, "a")
    proposal, contents = driver.propose(event), SmallContents({key: content_of("a")})
    await driver.store.jobs.save(proposal.changes, driver.now, contents=contents)
    await store.contents.remove_updates([key])
    with pytest.raises(StaleRevisionError):
        await driver.store.jobs.save(proposal.changes, driver.now, contents=contents)
    assert await stored(store) == {}


async def test_what_a_batch_reports_and_merges_is_never_stored(store: Store) -> None:
    driver = await begun(store)
    reports = [reported(driver, name) for name in driver.cohort("one")[1][:3]]
    first = driver.propose(*(event for _, event in reports))
    driver.coordinator.accept(first)
    key, _ = reports[0]
    second = driver.propose(AttemptAggregated(key.attempt, driver.next_version("one")))
    contents = SmallContents({key: content_of(key.client_id) for key, _ in reports})
    await store.jobs.save([*first.changes, *second.changes], driver.now, contents=contents)
    assert await stored(store) == {}


async def test_a_dropped_update_stays_while_its_attempt_is_open(store: Store) -> None:
    """It may be in use; a start does not need it."""
    driver = await begun(store)
    first, second = await report(driver, "a", "b")
    await driver.send(ClientRevoked("a"))
    assert await stored(store) == {first: content_of("a"), second: content_of("b")}
    await driver.operate("one", JobAction.PAUSE)
    assert await stored(store) == {}


async def test_the_update_of_a_buffer_outlives_the_attempt_that_it_was_made_in(store: Store) -> None:
    driver = await begun(store, BUFFERED)
    await report(driver, "a", "b", "c")
    (late,) = await report(driver, "d")  # while the first version is made
    await commit(driver)
    assert await stored(store) == {late: content_of("d")}
    early, last = await report(driver, "e", "f")
    assert early.attempt == late.attempt == AttemptKey("one", 1, 1)
    assert (await stored(store)).keys() == {late, early, last}
    await commit(driver)
    assert await stored(store) == {}


async def test_large_updates_have_no_rows_to_remove(store: Store) -> None:
    driver = await begun(store)
    (key,) = await report(driver, "a")
    for name in "bc":
        await driver.send(reported(driver, name, MAX_BYTES + 1)[1])
    assert (await stored(store)).keys() == {key}
    await commit(driver)
    assert await stored(store) == {}


async def test_blobs_are_stored_with_their_version_until_no_version_has_them(store: Store) -> None:
    driver = await begun(store)
    for names in ("abc", "ghi", "jkl"):
        if names != "abc":
            await driver.check_in(*names, names[0] * 2, names[1] * 2)
        await report(driver, *driver.cohort("one")[1][:3])
        await commit(driver, b"a model" if names != "jkl" else b"the last model", f"a state {names}".encode())
    model, last = digest_of(b"a model"), digest_of(b"the last model")
    states = [digest_of(f"a state {names}".encode()) for names in ("abc", "ghi", "jkl")]
    assert await store.contents.list_blobs() == {model, last, *states}
    some = await store.contents.load_blobs([model, states[0], "f" * 64])
    assert some == {model: b"a model", states[0]: b"a state abc"}
    keep = RetainedVersions(models_from=2, every=0, states_from=3)
    gone = await store.retention.mark_removed("one", await store.retention.list_removable("one", keep))
    assert {*states[:2]} <= gone
    assert model not in gone  # the second version has it
    assert await store.contents.list_blobs() == {model, last, states[2]}
    await store.contents.remove_blobs([last])
    assert await store.contents.list_blobs() == {model, states[2]}


async def test_a_rollback_keeps_the_row_of_the_restored_version(store: Store) -> None:
    driver = await begun(store)
    await report(driver, "a", "b", "c")
    await commit(driver, b"a model", b"a state")
    await driver.operate("one", JobAction.PAUSE)
    await driver.send(RollbackOrdered("one", driver.coordinator.jobs["one"].latest))
    keep = RetainedVersions(models_from=2, every=0, states_from=0)
    await store.retention.mark_removed("one", await store.retention.list_removable("one", keep))
    assert digest_of(b"a model") in await store.contents.list_blobs()
