"""The contract of every store, driven by a real coordinator's decisions; `save` is in test_contract_save.py."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math

import pytest
from msgspec import structs

from fedplat.rounds import AssignmentId, AttemptKey, HistoryRow
from fedplat.rounds.events import JobAction, OperatorCommand
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, JobStatus, Reason
from fedplat_server.database.records import AttemptFilter, AttemptRecord
from fedplat_server.database.store import Store
from fedplat_server.errors import StoreError
from support.store.driver import (
    JOB_FILE,
    NOW,
    Driver,
    as_stored,
    check_invariants,
    digest_of,
    draft,
    eventful,
    token_hash,
)


async def test_ping(store: Store) -> None:
    await store.ping()


# --- jobs ------------------------------------------------------------------------------------------------------


async def test_a_new_job_is_a_draft_with_version_0(store: Store) -> None:
    state = draft("one")
    record = await store.jobs.create_job(state, JOB_FILE, "key")
    assert (record.state, record.job_file, record.created_unix_s) == (state, JOB_FILE, 1_000_001.0)
    assert await store.jobs.load_jobs() == [record]
    (version,) = await store.jobs.list_versions("one")
    assert (version.version, version.metrics) == (state.latest, {})
    (history,) = await store.jobs.list_history("one")
    assert history.row == HistoryRow("job", "", "DRAFT")
    assert await store.jobs.last_sequence("one") == history.sequence > 0
    assert await store.jobs.last_sequence("another") == 0


async def test_creating_a_job_again_changes_nothing(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    history = await store.jobs.list_history("one")
    again = await store.jobs.create_job(draft("two"), JOB_FILE, "key of one")
    assert (again.state.job_id, again.state.status) == ("one", JobStatus.RUNNING)
    assert again.state == as_stored(driver.coordinator.jobs["one"])
    assert await store.jobs.list_history("one") == history
    assert len(await store.jobs.load_jobs()) == 1


async def test_jobs_are_loaded_in_the_order_of_their_creation(store: Store) -> None:
    for job_id in ("z", "a", "m"):
        await store.jobs.create_job(draft(job_id), JOB_FILE, job_id)
    assert [record.state.job_id for record in await store.jobs.load_jobs()] == ["z", "a", "m"]


async def test_two_jobs_cannot_share_an_id(store: Store) -> None:
    await store.jobs.create_job(draft("one"), JOB_FILE, "key 1")
    with pytest.raises(StoreError):
        await store.jobs.create_job(draft("one"), JOB_FILE, "key 2")
    assert len(await store.jobs.list_history("one")) == 1


async def test_concurrent_creations_with_one_key_make_one_job(store: Store) -> None:
    records = await asyncio.gather(*(store.jobs.create_job(draft(f"job {n}"), JOB_FILE, "key") for n in range(8)))
    assert len({record.state.job_id for record in records}) == 1
    assert len(await store.jobs.load_jobs()) == 1


# --- assignments and attempts ----------------------------------------------------------------------------------


async def test_assignments_are_found_by_token_however_old(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    found = await store.jobs.find_assignment(token_hash(driver.tokens["b"]))
    assert found is not None
    assert found.id == AssignmentId(AttemptKey("eventful", 1, 1), "b")
    assert (found.kind, found.state) == (AttemptKind.TRAIN, AssignmentState.FAILED)
    assert (found.reason, found.text) == (Reason.TRAINER_ERROR, "ValueError: \N{SNOWMAN}")
    found = await store.jobs.find_assignment(token_hash(driver.tokens["d"]))
    assert found is not None
    assert found.state is AssignmentState.MERGED
    assert (found.num_examples, found.weight, found.took_s) == (17.0, 17.0, 4.5)
    assert found.metrics == {"loss": 1 / 3 + 1004.5, "accuracy": 0.5}
    assert await store.jobs.find_assignment(token_hash("no such token")) is None


async def test_a_replaced_token_finds_nothing(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    await driver.check_in(*"abcde")
    old = driver.tokens["a"]
    await driver.check_in("a")
    assert driver.tokens["a"] != old
    assert await store.jobs.find_assignment(token_hash(old)) is None
    found = await store.jobs.find_assignment(token_hash(driver.tokens["a"]))
    assert found is not None
    assert found.client_id == "a"


async def test_attempts_are_listed_with_their_counts(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    committed = await store.jobs.list_attempts(AttemptFilter("eventful"))
    everything = await store.jobs.list_attempts(AttemptFilter("eventful", all_attempts=True))
    assert [tuple(one.key[1:]) for one in everything] == [
        *((1, 1), (1, 2)),
        *((2, 1), (2, 2), (2, 3), (2, 4), (2, 5)),  # a restart in between did not end the last one
        (3, 1),
    ]
    assert [one for one in everything if one.attempt.phase is not AttemptPhase.ABANDONED] == committed
    (first, of_first), (evaluation, _), (late, of_late) = ((one.attempt, one.tally) for one in everything[:3])
    assert (first.kind, first.base_version, first.goal, first.minimum, first.target) == (AttemptKind.TRAIN, 0, 3, 2, 5)
    assert of_first.counts == {AssignmentState.MERGED: 3, AssignmentState.FAILED: 1, AssignmentState.REJECTED: 1}
    assert (of_first.update_bytes, of_late.update_bytes) == (3 * 2**33, 2**33)
    assert first.metrics.keys() == {"loss", "accuracy"}
    assert evaluation.kind is AttemptKind.EVALUATE
    assert of_late.counts == {AssignmentState.DROPPED: 1, AssignmentState.LATE: 4}
    assert late.phase is AttemptPhase.ABANDONED
    assert "1 of at least 2 needed clients reported" in late.reason
    found = await store.jobs.find_attempts([one.key for one in everything] + [AttemptKey("nobody", 1, 1)])
    assert found == {one.key: one for one in everything}
    assert await store.jobs.find_attempts([]) == {}
    assert await store.jobs.list_attempts(AttemptFilter("nobody")) == []


@pytest.mark.fault("F47")
async def test_attempts_are_listed_page_by_page(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    for all_attempts, newest_first in itertools.product((True, False), repeat=2):
        which = AttemptFilter("eventful", all_attempts=all_attempts, newest_first=newest_first)
        whole = await store.jobs.list_attempts(which)
        assert await store.jobs.count_attempts(which) == len(whole)
        assert [one.key for one in whole] == sorted((one.key for one in whole), reverse=newest_first)
        for limit in (1, 2, 100):
            found, after = list[AttemptRecord](), None
            while page := await store.jobs.list_attempts(which, after=after, limit=limit):
                assert len(page) <= limit
                found += page
                after = page[-1].key[1:]
            assert found == whole
        assert await store.jobs.list_attempts(which, after=(2, 0)) == [
            one for one in whole if (one.key.round < 2 if newest_first else one.key.round > 1)
        ]
        second = dataclasses.replace(which, round=2)
        assert await store.jobs.list_attempts(second) == [one for one in whole if one.key.round == 2]
        assert await store.jobs.count_attempts(second) == (5 if all_attempts else 1)


async def test_an_attempt_has_a_beginning_and_an_end(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    (open_one,) = await store.jobs.list_attempts(AttemptFilter("one"))
    assert open_one.ended_unix_s is None
    await driver.finish_attempt("one", "a")
    ended, _ = await store.jobs.list_attempts(AttemptFilter("one"))
    assert ended.opened_unix_s == open_one.opened_unix_s
    assert ended.ended_unix_s is not None
    assert ended.ended_unix_s > ended.opened_unix_s
    await driver.finish_attempt("one", "b")
    assert (await store.jobs.list_attempts(AttemptFilter("one")))[0] == ended


# --- versions --------------------------------------------------------------------------------------------------


async def test_versions_are_listed_as_they_were_committed(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    records = await store.jobs.list_versions("eventful")
    assert [record.version.version for record in records] == [0, 1, 2]
    assert records[2].version == driver.coordinator.jobs["eventful"].latest
    assert records[2].version.size_bytes == 2**40 + 2
    assert await store.jobs.list_versions("nobody") == []
    assert await store.jobs.list_versions("eventful", after=0, limit=1) == records[1:2]
    assert await store.jobs.list_versions("eventful", after=1, limit=9) == records[2:]
    assert await store.jobs.list_versions("eventful", after=2) == []
    assert await store.jobs.list_versions_of_rounds("eventful", (0, 1)) == records[:2]
    assert await store.jobs.list_versions_of_rounds("eventful", (2, 9)) == records[2:]
    assert await store.jobs.list_versions_of_rounds("nobody", (0, 9)) == []


async def test_metrics_of_a_version_are_noted(store: Store, database: str) -> None:
    driver = Driver(store)
    await eventful(driver)
    before = await store.jobs.list_history("eventful")
    metrics = {"accuracy": 0.25, "loss": math.inf, "low": -math.inf}
    await store.jobs.set_version_metrics("eventful", 2, metrics)
    records = await store.jobs.list_versions("eventful")
    assert [record.metrics for record in records] == [{}, {}, metrics]
    *earlier, noted = await store.jobs.list_history("eventful")
    assert earlier == before
    version = records[2].version
    assert noted.row == HistoryRow("version", "2", "2", version.round, version.attempt, metrics=metrics)
    await check_invariants(database)


async def test_a_metric_may_be_nan(store: Store) -> None:
    await store.jobs.create_job(draft("one"), JOB_FILE, "key")
    await store.jobs.set_version_metrics("one", 0, {"loss": math.nan})
    (record,) = await store.jobs.list_versions("one")
    assert math.isnan(record.metrics["loss"])


async def test_metrics_of_a_version_that_is_not_there_are_refused(store: Store) -> None:
    await store.jobs.create_job(draft("one"), JOB_FILE, "key")
    for job_id, version in (("one", 1), ("nobody", 0)):
        with pytest.raises(StoreError, match="no version"):
            await store.jobs.set_version_metrics(job_id, version, {})
    assert len(await store.jobs.list_history("one")) == 1


async def test_digests_and_who_may_read_them(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    await driver.create("two", JOB_FILE.replace('"demo"', '"production"'))
    await driver.finish_attempt("one", "a")
    latest = driver.coordinator.jobs["one"].latest
    assert await store.jobs.find_populations(latest.digest) == {"demo"}
    assert await store.jobs.find_populations(latest.delta_digest) == {"demo"}
    assert await store.jobs.find_populations(latest.state_digest) == frozenset()
    await store.jobs.create_job(
        structs.replace(
            draft("three", JOB_FILE.replace('"demo"', '"third"')),
            latest=structs.replace(latest, version=0, round=0, delta_digest=""),
        ),
        JOB_FILE.replace('"demo"', '"third"'),
        "three",
    )
    assert await store.jobs.find_populations(latest.digest) == {"demo", "third"}
    assert await store.retention.list_referenced() == {
        digest_of("one", 0),
        digest_of("two", 0),
        latest.digest,
        latest.state_digest,
        latest.delta_digest,
    }


# --- history ---------------------------------------------------------------------------------------------------


async def test_history_is_complete_and_ordered(store: Store) -> None:
    driver, rows = Driver(store), list[HistoryRow]()
    await driver.create("one")
    rows = [record.row for record in await store.jobs.list_history("one")]
    for names in ("a", "b"):
        proposal = driver.propose(OperatorCommand("one", JobAction.PAUSE), OperatorCommand("one", JobAction.RESUME))
        await store.jobs.save(proposal.changes, NOW)
        driver.coordinator.accept(proposal)
        rows += [row for change in proposal.changes for row in change.history]
        assert [record.row for record in await store.jobs.list_history("one")] == rows
        await driver.finish_attempt("one", names)
        rows = [record.row for record in await store.jobs.list_history("one")]
    records = await store.jobs.list_history("one")
    assert [r.sequence for r in records] == sorted({r.sequence for r in records})
    assert [r.unix_s for r in records] == sorted(r.unix_s for r in records)


async def test_history_is_read_in_pages_of_one_job(store: Store) -> None:
    await store.jobs.create_job(draft("one"), JOB_FILE, "key")
    await eventful(Driver(store), "two")
    await store.jobs.set_version_metrics("one", 0, {})
    records, pages, after = await store.jobs.list_history("two"), list[object](), 0
    while page := await store.jobs.list_history("two", after, limit=7):
        assert len(page) <= 7
        pages += page
        after = page[-1].sequence
    assert pages == records
    assert [record.row.to_state for record in await store.jobs.list_history("one")] == ["DRAFT", "0"]
    assert await store.jobs.list_history("nobody") == []
