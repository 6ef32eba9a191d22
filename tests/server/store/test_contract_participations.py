"""What every store gives back of the past, for a selection that asks for it."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec import structs

from fedplat.rounds import Participation, ParticipationHistory
from fedplat.rounds.events import UpdateReported
from fedplat_server.database.sql_jobs import ROUNDS_PER_QUERY, JobStore, recall_participations
from fedplat_server.database.store import Store
from support.store.driver import JOB_FILE, Driver, digest_of, draft, eventful

REMEMBERS = JOB_FILE.replace("min_fraction = 0.6", "min_fraction = 0.6, sampling = { policy = 'weighted' }")
SEPARATED = JOB_FILE.replace("min_fraction = 0.6", "min_fraction = 0.6, min_separation = 1").replace(
    "rounds = 3", "rounds = 9"
)


async def test_a_memory_follows_from_what_is_stored_whatever_happens(store: Store) -> None:
    driver = Driver(store)  # which compares after each step
    await eventful(driver, "eventful", REMEMBERS)
    found = await store.jobs.list_participations("eventful", range(1, 10))
    assert {each.client_id for each in found} > set("abcdeghlmnqr")
    assert not {"e0", "e1"} & {each.client_id for each in found if each.round == 2}  # they evaluated


async def test_participations_come_in_the_order_of_their_reports(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", REMEMBERS)
    await driver.create("other", REMEMBERS)
    await driver.check_in(*"abcde")
    key, _ = driver.cohort("one")
    metrics = {"loss": 1 / 3, "loss_squared": 2.5}
    driver.now += 1.5
    await driver.send(
        UpdateReported(key, "d", digest_of("d"), 7.0, metrics), UpdateReported(key, "b", digest_of("b"), 2.0)
    )
    found = await store.jobs.list_participations("one", range(1, 2))
    assert found[:2] == [Participation("d", 1, 1, 7.0, 1.5, metrics), Participation("b", 1, 1, 2.0, 1.5, {})]
    assert sorted(found[2:], key=lambda each: each.client_id) == [Participation(c, 1, 1, 0.0, None, {}) for c in "ace"]
    assert await store.jobs.list_participations("one", range(2, 9)) == []
    assert await store.jobs.list_participations("other", range(1, 9)) == []
    assert await store.jobs.list_participations("nothing", range(1, 9)) == []


async def test_only_the_rounds_that_matter_are_read_back(store: Store) -> None:
    driver = Driver(store, check=False)
    await driver.create("plain")
    await driver.create("one", SEPARATED)
    for round_ in range(1, 4):
        for job_id in ("plain", "one"):
            await driver.finish_attempt(job_id, f"{job_id}-{round_}-")
            await driver.finish_attempt(job_id, f"{job_id}-evaluator-{round_}-")
    jobs = driver.coordinator.jobs
    assert jobs["one"].round == 3
    assert {each.round for each in await recall_participations(store.jobs, jobs["one"])} == {3}
    assert await recall_participations(store.jobs, jobs["plain"]) == []
    before, after = (
        driver.coordinator.histories["one"],
        ParticipationHistory.recall(jobs["one"].spec, await recall_participations(store.jobs, jobs["one"])),
    )
    assert after is not None
    assert before.clients.keys() > after.clients.keys()
    for client_id in before.clients:
        assert before.rounds_to_rest(client_id, 4) == after.rounds_to_rest(client_id, 4)


@pytest.mark.parametrize("num_rounds", [ROUNDS_PER_QUERY - 1, ROUNDS_PER_QUERY, 2 * ROUNDS_PER_QUERY + 1])
async def test_many_rounds_are_read_piece_by_piece(num_rounds: int) -> None:
    class Asked:
        """Notes what it is asked for."""

        def __init__(self) -> None:
            self.rounds: list[int] = []

        async def list_participations(self, job_id: str, rounds: range) -> list[Participation]:
            assert 0 < len(rounds) <= ROUNDS_PER_QUERY
            self.rounds += rounds
            return [Participation("c", rounds[0], 1, 0.0, None, {})]

    asked, job = Asked(), draft("one", REMEMBERS)
    await recall_participations(cast(JobStore, asked), structs.replace(job, round=num_rounds))
    assert asked.rounds == list(range(1, num_rounds + 2))
