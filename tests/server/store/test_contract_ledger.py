"""The contract of every store for the releases of private jobs and the budgets of populations."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import sqlalchemy
from msgspec import structs

from fedplat.job import parse_job, plan_charge
from fedplat.privacy import Charge, Mechanism
from fedplat.rounds import Change, JobState
from fedplat.rounds.events import AttemptAggregated, JobAction, UpdateReported
from fedplat.rounds.states import AttemptKind, JobStatus
from fedplat_server.database import tables
from fedplat_server.database.engine import async_url, create_engine
from fedplat_server.database.records import Account, AttemptFilter, Budget, Population
from fedplat_server.database.store import Store
from fedplat_server.errors import PopulationChangedError, StaleRevisionError, StoreError
from fedplat_server.records.audit import AuditAction as Noted
from fedplat_server.records.audit import AuditEntry
from support.ledgers import list_releases
from support.store.driver import JOB_FILE, NOW, Driver, digest_of, draft

PRIVATE = """
name = "private"
population = "demo"
trainer = "digits"
rounds = 3
model.initial = "model.safetensors"
selection = { goal = 2, over_selection = 1.0, close = "deadline" }
updates = { weighting = "uniform", clip_norm = 1.0 }
privacy = { participation = "fixed", delta = 1e-6, noise_multiplier = 4.0, max_releases = 3 }
"""
PRIVACY_KEYS = {
    *("delta", "participation", "epsilon", "noise_multiplier", "max_participations"),
    *("expected_weight", "count_noise", "metrics", "max_releases"),
}
CALIBRATED = PRIVATE.replace("noise_multiplier = 4.0", "epsilon = 2.0")
MECHANISM = Mechanism("fixed", 4.0)
BUDGET = Budget(3.0, 1e-6)


async def start(driver: Driver) -> None:
    await driver.create("one", PRIVATE)


async def until_closed(driver: Driver) -> Change:
    """The change that commits a version, before it is saved."""
    await driver.check_in("a", "b")
    key, cohort = driver.cohort("one")
    await driver.send(*(UpdateReported(key, name, digest_of(key, name), 1.0) for name in cohort))
    change, *_ = driver.propose(AttemptAggregated(key, driver.next_version("one"))).changes
    assert change.version is not None
    return change


async def train(driver: Driver, job_id: str, rounds: int) -> None:
    for _ in range(rounds):
        await driver.check_in("a", "b")
        await driver.report(job_id, driver.cohort(job_id)[1])


async def test_each_version_of_a_private_job_has_one_row(store: Store) -> None:
    driver = Driver(store)
    await start(driver)
    assert await list_releases(store, "one") == []
    await train(driver, "one", 2)
    await driver.restart()
    rows = await list_releases(store, "one")
    assert [(row.version, row.round, row.mechanism) for row in rows] == [(1, 1, MECHANISM), (2, 2, MECHANISM)]
    assert rows[0].unix_s < rows[1].unix_s
    await train(driver, "one", 1)
    assert driver.coordinator.jobs["one"].status is JobStatus.COMPLETED
    assert len(await list_releases(store, "one")) == 3


async def test_rows_of_private_jobs_are_as_the_first_release_reads_them(store: Store, database: str) -> None:
    """0.1.0 stops at a key that it does not know; so does the comparison of older rows with a job's mechanism."""
    driver = Driver(store)
    await start(driver)
    await train(driver, "one", 1)
    engine = create_engine(async_url(database))
    async with engine.connect() as connection:
        mechanism = (await connection.execute(sqlalchemy.select(tables.ledger.c.mechanism))).scalar_one()
        privacy = (await connection.execute(sqlalchemy.select(tables.jobs.c.privacy))).scalar_one()
    await engine.dispose()
    assert mechanism == (
        '{"kind":"fixed","noise_multiplier":4.0,"sampling_probability":1.0,"overflow":0.0,"separation":1,'
        '"max_participations":0}'
    )
    assert privacy.keys() == PRIVACY_KEYS


async def test_a_warm_start_is_no_release(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", PRIVATE + 'warm_start = { trainer = "public", batch_size = 8, learning_rate = 0.1 }\n')
    await driver.restart()
    await driver.warm_start("one")
    assert await list_releases(store, "one") == []
    versions = [record.version for record in await store.jobs.list_versions("one")]
    assert [(one.version, one.round, one.attempt, one.num_updates) for one in versions] == [(0, 0, 0, 0), (1, 0, 1, 0)]
    attempt, _ = await store.jobs.list_attempts(AttemptFilter("one", all_attempts=True))
    assert (attempt.key[1:], attempt.attempt.kind, attempt.tally.counts) == ((0, 1), AttemptKind.WARM_START, {})
    await driver.restart()
    await train(driver, "one", 3)
    assert driver.coordinator.jobs["one"].status is JobStatus.COMPLETED
    assert [(row.version, row.round) for row in await list_releases(store, "one")] == [(2, 1), (3, 2), (4, 3)]


async def test_other_jobs_have_none(store: Store) -> None:
    driver = Driver(store)
    await driver.create("other")
    await driver.finish_attempt("other", "a")
    assert len(await store.jobs.list_versions("other")) == 2
    assert await list_releases(store, "other") == [] == await list_releases(store, "nobody")


async def test_a_commit_that_is_repeated_is_charged_once(store: Store) -> None:
    driver = Driver(store)
    await start(driver)
    change = await until_closed(driver)
    await store.jobs.save([change], NOW)
    with pytest.raises(StaleRevisionError):
        await store.jobs.save([change], NOW)
    assert [row.version for row in await list_releases(store, "one")] == [1]


async def test_a_version_without_its_row_is_refused(store: Store) -> None:
    """The store does not trust the caller's copy of the job: its privacy was fixed when it was created."""
    driver = Driver(store)
    await start(driver)
    change = await until_closed(driver)
    forgetful = structs.replace(change.job.spec, privacy=None)
    changed = dataclasses.replace(change, job=structs.replace(change.job, spec=forgetful))
    with pytest.raises(StoreError, match="version 1 and the ledger do not agree; nothing was stored"):
        await store.jobs.save([changed], NOW)
    assert len(await store.jobs.list_versions("one")) == 1
    assert await list_releases(store, "one") == []
    await store.jobs.save([change], NOW)
    assert len(await list_releases(store, "one")) == 1


async def test_a_row_of_a_job_that_is_not_private_is_refused(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", PRIVATE.replace("\nprivacy", "\n# privacy"))
    change = await until_closed(driver)
    spec = parse_job(PRIVATE)
    with pytest.raises(StoreError, match="do not agree"):
        await store.jobs.save([dataclasses.replace(change, job=structs.replace(change.job, spec=spec))], NOW)
    assert len(await store.jobs.list_versions("one")) == 1


async def test_what_was_settled_stays(store: Store) -> None:
    settled = draft("one", CALIBRATED)
    state = structs.replace(settled, spec=parse_job(CALIBRATED))
    with pytest.raises(StoreError, match="before its noise and its releases are calibrated"):
        await store.jobs.create_job(state, CALIBRATED, "key")
    assert await store.jobs.find_job("key") is None
    record = await store.jobs.create_job(settled, CALIBRATED, "key")
    assert record.state.spec == settled.spec != state.spec
    assert record.job_file == CALIBRATED
    assert (await store.jobs.load_jobs())[0].state.spec == settled.spec
    found = await store.jobs.find_job("key")
    assert found is not None
    assert found.state.spec == settled.spec


def account(state: JobState, status: JobStatus = JobStatus.DRAFT, *released: Charge) -> Account:
    return Account(state.job_id, status, plan_charge(state.spec), released)


async def test_a_population_has_the_accounts_of_its_jobs(store: Store) -> None:
    assert await store.ledger.load_population("demo") == Population("demo", 0, None, ())
    driver = Driver(store)
    await start(driver)
    await train(driver, "one", 2)
    await store.jobs.create_job(draft("other"), JOB_FILE, "key 2")
    elsewhere = draft("elsewhere", PRIVATE.replace('"demo"', '"another"'))
    await store.jobs.create_job(elsewhere, PRIVATE.replace('"demo"', '"another"'), "key 3")
    found = await store.ledger.load_population("demo")
    accounts = (account(draft("one", PRIVATE), JobStatus.RUNNING, Charge(MECHANISM, 2)), account(draft("other")))
    assert found == Population("demo", 2, None, accounts)
    assert [one.is_private for one in accounts] == [True, False]
    assert found.charges == (Charge(MECHANISM, 3),)
    await driver.operate("one", JobAction.CANCEL)
    assert (await store.ledger.load_population("demo")).charges == (Charge(MECHANISM, 2),)
    assert await store.ledger.load_populations() == [
        Population("another", 1, None, (account(elsewhere),)),
        await store.ledger.load_population("demo"),
    ]


async def test_budgets_come_and_go(store: Store) -> None:
    entry = AuditEntry("anna", Noted.BUDGET_SET, "demo", {"epsilon": 3.0})
    before = (await store.audit.read_head()).num_rows
    await store.ledger.set_budget("demo", BUDGET, 0, [entry])
    assert await store.ledger.load_population("demo") == Population("demo", 1, BUDGET, ())
    assert (await store.audit.read_head()).num_rows == before + 1
    with pytest.raises(PopulationChangedError):
        await store.ledger.set_budget("demo", Budget(9.0, 1e-6), 0, [entry])
    assert (await store.audit.read_head()).num_rows == before + 1
    await store.ledger.set_budget("demo", None, 1)
    assert await store.ledger.load_populations() == [Population("demo", 2, None, ())]


async def test_who_looked_at_a_population_that_has_changed_creates_nothing(store: Store) -> None:
    await store.jobs.create_job(draft("one"), JOB_FILE, "key 1", expected=0)
    with pytest.raises(PopulationChangedError):
        await store.jobs.create_job(draft("two"), JOB_FILE, "key 2", expected=0)
    assert await store.jobs.find_job("key 2") is None
    await store.ledger.set_budget("demo", BUDGET, 1)
    with pytest.raises(PopulationChangedError):
        await store.jobs.create_job(draft("two"), JOB_FILE, "key 2", expected=1)
    again = await store.jobs.create_job(draft("three"), JOB_FILE, "key 1", expected=0)
    assert again.state.job_id == "one"
    assert len(await store.jobs.load_jobs()) == 1


async def test_of_several_changes_of_the_same_revision_only_one_succeeds(store: Store) -> None:
    await store.ledger.set_budget("demo", BUDGET, 0)
    tries = [store.jobs.create_job(draft(f"j {n}"), JOB_FILE, f"key {n}", expected=1) for n in range(4)]
    ends = await asyncio.gather(*tries, store.ledger.set_budget("demo", None, 1), return_exceptions=True)
    assert sum(isinstance(end, PopulationChangedError) for end in ends) == 4
    assert (await store.ledger.load_population("demo")).revision == 2
