"""No store lets a client of a private job take part too often, whatever the coordinator believes."""

from __future__ import annotations

import pytest

from fedplat.rounds import AttemptKey
from fedplat.rounds.commands import Assign
from fedplat.rounds.events import ClientCheckedIn, JobAction
from fedplat_server.database.records import AttemptFilter
from fedplat_server.database.sql_jobs import recall_participations
from fedplat_server.database.store import Store
from fedplat_server.database.writes import ParticipationLimits
from fedplat_server.errors import ParticipationError
from support.store.driver import Driver
from support.store.limits import BOTH, LIMITED, SEPARATED, play, write


def forgetful(driver: Driver, job_id: str, keep: str = "") -> None:
    """The coordinator forgets who took part in what, but for one client."""
    driver.coordinator.room.clients.clear()
    memory = driver.coordinator.histories[job_id]
    memory.clients = {name: past for name, past in memory.clients.items() if name == keep}


async def stored(store: Store, job_id: str) -> object:
    job = next(record for record in await store.jobs.load_jobs() if record.state.job_id == job_id)
    history, attempts = (
        await store.jobs.list_history(job_id),
        await store.jobs.list_attempts(AttemptFilter(job_id, all_attempts=True)),
    )
    return job.state.revision, history, attempts, await store.jobs.list_participations(job_id, range(1, 99))


async def refused(driver: Driver, job_id: str, *names: str) -> str:
    """What the store says to a draw of these clients; nothing of it is written."""
    before = await stored(driver.store, job_id)
    handlers = frozenset({"digits"})
    proposal = driver.propose(*(ClientCheckedIn(name, "demo", {}, handlers, handlers) for name in names))
    assert {c.client_id for c in proposal.commands if isinstance(c, Assign)} == set(names)
    with pytest.raises(ParticipationError) as raised:
        await driver.store.jobs.save(proposal.changes, driver.now)
    driver.coordinator.reject(proposal)
    assert await stored(driver.store, job_id) == before
    return str(raised.value)


async def test_not_beyond_the_limit(store: Store) -> None:
    driver = Driver(store, check=False)
    await driver.create("j", LIMITED)
    await play(driver, "j", "a", "b")
    await play(driver, "j", "a", "c")
    forgetful(driver, "j")
    text = await refused(driver, "j", "a", "d")
    assert text == (
        "j round 3 attempt 1 must not have client a: it would take part in 3 rounds (privacy.max_participations = 2); "
        "nothing was written"
    )
    forgetful(driver, "j")
    await play(driver, "j", "b", "c")


async def test_not_within_the_separation(store: Store) -> None:
    driver = Driver(store, check=False)
    await driver.create("j", SEPARATED)
    await play(driver, "j", "a", "b")
    for names in (("a", "c"), ("a", "d")):
        forgetful(driver, "j")
        text = await refused(driver, "j", *names)
        await play(driver, "j", *(f"{name}-{names[1]}" for name in ("x", "y")))
    assert text == (
        "j round 3 attempt 1 must not have client a: it takes part in a round too near by "
        "(selection.min_separation = 2); nothing was written"
    )
    forgetful(driver, "j")
    await play(driver, "j", "a", "b")  # two rounds lie between


async def test_both_hold(store: Store) -> None:
    driver = Driver(store, check=False)
    await driver.create("j", BOTH)
    await play(driver, "j", "a", "b")
    forgetful(driver, "j")
    assert "min_separation" in await refused(driver, "j", "a", "c")
    await play(driver, "j", "c", "d")
    await play(driver, "j", "a", "e")
    await play(driver, "j", "f", "g")
    forgetful(driver, "j")
    assert "max_participations" in await refused(driver, "j", "h", "a")


@pytest.mark.parametrize("job_file", [write("fixed", most=1, rest=0), SEPARATED])
async def test_another_attempt_at_the_same_round_is_no_other_participation(store: Store, job_file: str) -> None:
    driver = Driver(store)
    await driver.create("j", job_file)
    for _ in range(3):
        await driver.check_in("a", "b")
        assert len(driver.cohort("j")[1]) == 2
        await driver.restart()
        await driver.operate("j", JobAction.PAUSE)
        await driver.operate("j", JobAction.RESUME)
    await play(driver, "j", "a", "b")
    forgetful(driver, "j")
    await refused(driver, "j", "a", "c")


async def test_the_coordinator_never_proposes_what_is_refused(store: Store) -> None:
    """Restarts in between, and whole memories read back."""
    driver = Driver(store)
    await driver.create("j", BOTH)
    for _ in range(5):
        busy = driver.cohort("j")[1]
        await driver.check_in(*(f"c{i}" for i in range(6) if f"c{i}" not in busy))
        await driver.report("j", driver.cohort("j")[1])
        await driver.restart()
    rounds: dict[str, list[int]] = {}
    for each in await recall_participations(store.jobs, driver.coordinator.jobs["j"]):
        rounds.setdefault(each.client_id, []).append(each.round)
    assert max(len(each) for each in rounds.values()) == 2
    assert min(each[1] - each[0] for each in rounds.values() if len(each) > 1) >= 2


async def test_rounds_of_another_job_do_not_count(store: Store) -> None:
    driver = Driver(store, check=False)
    for job_id in ("one", "two"):
        await driver.create(job_id, LIMITED)
        await play(driver, job_id, "a", "b")
        await play(driver, job_id, "a", "c")
        forgetful(driver, job_id)
        assert "max_participations" in await refused(driver, job_id, "a", "d")
        await driver.operate(job_id, JobAction.CANCEL)
    await driver.create("three", SEPARATED)
    await play(driver, "three", "a", "b")


async def test_other_jobs_have_no_such_limit(store: Store) -> None:
    driver = Driver(store, check=False)
    await driver.create("limited", LIMITED)
    for number in range(3):
        await play(driver, "limited", f"a{number}", f"b{number}")
    other = LIMITED.replace('"demo"', '"other"').replace("max_participations = 2", "max_participations = 0")
    await driver.create("other", other)
    handlers = frozenset({"digits"})
    for _ in range(4):
        await driver.send(*(ClientCheckedIn(name, "other", {}, handlers, handlers) for name in ("a0", "b0")))
        assert sorted(driver.cohort("other")[1]) == ["a0", "b0"]
        await driver.report("other", ["a0", "b0"])


def test_what_is_said_tells_both_apart() -> None:
    limits = ParticipationLimits(min_separation=2, max_participations=3)
    said = [str(limits.refusal(AttemptKey("j", 1, 1), "c", number)) for number in (3, 4)]
    assert ["min_separation" in text for text in said] == [True, False]
