"""The contract of every store for deleting jobs: what a private job has spent stays, and nothing else does."""

from __future__ import annotations

import pytest

from fedplat.rounds.states import JobStatus
from fedplat_server.database.sql_assignments import AssignmentFilter
from fedplat_server.database.store import Store
from fedplat_server.errors import StoreError
from fedplat_server.records import audit
from support.ledgers import list_releases
from support.store.driver import JOB_FILE, Driver, digest_of, run_to_the_end

pytestmark = pytest.mark.slow
PRIVATE = """
name = "private"
population = "demo"
trainer = "digits"
rounds = 2
model.initial = "model.safetensors"
selection = { goal = 2, over_selection = 1.0, close = "deadline" }
updates = { weighting = "uniform", clip_norm = 1.0 }
privacy = { participation = "fixed", delta = 1e-6, noise_multiplier = 4.0, max_releases = 2 }
"""


def entry(job_id: str) -> audit.AuditEntry:
    return audit.AuditEntry("anna", audit.AuditAction.JOB_DELETED, job_id)


async def remove(store: Store, job_id: str) -> set[str]:
    """Remove a deleted job; the digests of files that are no longer needed."""
    digests = set[str]()
    while (part := await store.deletion.remove_part(job_id)) is not None:
        digests |= part
    return digests


async def test_a_deleted_job_is_gone_at_once_and_another_stays(store: Store) -> None:
    driver = Driver(store)
    for job_id in ("one", "two"):
        await driver.create(job_id, JOB_FILE)
        await run_to_the_end(driver, job_id, f"{job_id}-")
    await store.deletion.delete_job("one", [entry("one")])
    await store.deletion.delete_job("one", [entry("one")])  # an operator who was not answered
    assert [record.state.job_id for record in await store.jobs.load_jobs()] == ["two"]
    seen = AssignmentFilter(
        client_id=(await store.assignments.list_assignments(AssignmentFilter("two")))[0].place.client_id
    )
    assert {each.place.job_id for each in await store.assignments.list_assignments(seen)} <= {"two"}
    assert await store.deletion.list_deleted() == ["one"]
    digests = await remove(store, "one")
    assert {digest_of("one", 1), digest_of("one", "state", 1)} <= digests
    assert not digests & await store.retention.list_referenced()
    assert await store.deletion.list_deleted() == []
    assert await store.jobs.list_versions("one") == []
    assert len(await store.jobs.list_versions("two")) == 4
    assert [row.action for row in await store.audit.list_rows()].count("job deleted") == 1


async def test_only_jobs_that_have_ended_are_deleted(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", JOB_FILE)
    for job_id in ("one", "nothing"):
        with pytest.raises(StoreError, match=f"there is no job {job_id} that has ended"):
            await store.deletion.delete_job(job_id, [entry(job_id)])
    assert await store.deletion.remove_part("one") is None
    assert len(await store.jobs.load_jobs()) == 1
    assert await store.audit.list_rows() == []


async def test_what_a_private_job_has_spent_stays(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", PRIVATE)
    for _ in range(2):
        await driver.check_in("a", "b")
        await driver.report("one", driver.cohort("one")[1])
    assert driver.coordinator.jobs["one"].status is JobStatus.COMPLETED
    before, releases = await store.ledger.load_population("demo"), await list_releases(store, "one")
    assert len(before.charges) == 1
    assert await store.deletion.count_releases("one") == len(releases) == 2
    await store.deletion.delete_job("one", [entry("one")])
    await remove(store, "one")
    assert await remove(store, "one") == set()  # as after each start
    after = await store.ledger.load_population("demo")
    assert (after.charges, after.accounts) == (before.charges, before.accounts)
    assert after.revision > before.revision
    assert await list_releases(store, "one") == releases
    assert await store.jobs.load_jobs() == []
    assert await store.retention.list_referenced() == set()
    versions = await store.jobs.list_versions("one")
    assert [version.model_removed_unix_s is None for version in versions] == [False] * 3
