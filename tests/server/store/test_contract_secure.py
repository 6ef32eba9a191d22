"""What every store keeps of secure aggregations: messages until the attempt ends, the survivors for good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event, func, select

from fedplat.job.privacy import charges
from fedplat.rounds import AttemptKey
from fedplat.rounds.events import JobAction, SharesSent, UploadStarted
from fedplat.rounds.states import AttemptPhase
from fedplat_server import crash_points
from fedplat_server.database import tables
from fedplat_server.database.engine import async_url, create_engine
from fedplat_server.database.records import AttemptFilter, Enrollment, EnrollmentToken
from fedplat_server.database.store import Store
from support.ledgers import list_releases
from support.rounds.secure_driver import answer_event, confirmation_event, keys_event, report_event, shares_event
from support.store.driver import check_invariants
from support.store.secure import CLIENTS, FILE, PRIVATE, SecureDriver, finish, play

_M = tables.secure_messages.c


async def count_messages(database: str) -> dict[str, int]:
    """The number of stored messages of each kind."""
    engine = create_engine(async_url(database))
    async with engine.connect() as connection:
        found = await connection.execute(select(_M.kind, func.count().label("total")).group_by(_M.kind))
        counts = {row.kind: row.total for row in found}
    await engine.dispose()
    return counts


async def started(store: Store, job_id: str = "one", file: str = FILE) -> SecureDriver:
    driver = SecureDriver(store, job_id)
    await driver.create(job_id, file)
    return driver


async def playing(store: Store, phase: str = "UNMASKING") -> SecureDriver:
    """A job in a phase of its first attempt, of which the last message is missing."""
    driver = await started(store)
    async with contextlib.aclosing(play(driver)) as phases:
        async for reached in phases:
            if reached == phase:
                break
    return driver


async def test_each_state_is_read_back(store: Store, database: str) -> None:
    """The driver compares after each step; here also in the middle of each phase, as a restarted server sees it."""
    driver, phases = await started(store), list[AttemptPhase]()
    async for phase in play(driver):
        phases.append(phase)
        await check_invariants(database)
        await driver.restart()
    assert phases == ["ADVERTISING", "SHARING", "COLLECTING", "CONFIRMING", "UNMASKING"]
    assert await count_messages(database) == {"keys": 5, "shares": 4, "confirmation": 3, "answer": 2}
    await finish(driver)
    await check_invariants(database)
    assert driver.coordinator.jobs["one"].latest.num_updates == 3


@pytest.mark.parametrize("commits", [True, False])
async def test_the_end_of_an_attempt_removes_its_messages(store: Store, database: str, commits: bool) -> None:
    driver = await playing(store)
    await (finish(driver) if commits else driver.tick("one", 1000.0))
    assert await count_messages(database) == {}
    (attempt,) = await store.jobs.list_attempts(AttemptFilter("one", all_attempts=True), limit=1)
    assert attempt.attempt.phase == ("COMMITTED" if commits else "ABANDONED")
    tally = attempt.tally
    assert (attempt.attempt.num_survivors, tally.num_trained, sum(tally.counts.values())) == (3, 5, 7)
    await check_invariants(database)
    if not commits:
        await driver.tick("one", 10.0)
    await driver.check_in(*CLIENTS)
    assert await count_messages(database) == {}


@pytest.mark.parametrize("phase", ["ADVERTISING", "SHARING", "COLLECTING", "CONFIRMING"])
async def test_a_cancelled_attempt_leaves_no_message(store: Store, database: str, phase: str) -> None:
    driver = await playing(store, phase)
    assert await count_messages(database) != {}
    await driver.operate("one", JobAction.CANCEL)
    assert await count_messages(database) == {}
    await check_invariants(database)


async def test_other_attempts_keep_their_messages(store: Store, database: str) -> None:
    first, second = await playing(store), await started(store, "two")
    await second.check_in("x", "y", "z", *"tuvw")
    key, _ = second.cohort("two")
    await second.send(keys_event(key, "x"), keys_event(key, "y"))
    await finish(first)
    assert await count_messages(database) == {"keys": 2}


@pytest.mark.fault("F6")
async def test_a_crash_at_the_end_leaves_all_messages_or_none(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await playing(store)
    before = await count_messages(database)

    def fail(name: str) -> None:
        if name == "save.uncommitted":
            raise RuntimeError("a power cut")

    with monkeypatch.context() as patch:
        patch.setattr(crash_points, "point", fail)
        with pytest.raises(RuntimeError, match="power cut"):
            await driver.operate("one", JobAction.CANCEL)
    assert await count_messages(database) == before
    await driver.restart()
    await driver.operate("one", JobAction.CANCEL)
    assert await count_messages(database) == {}


async def test_every_unmasked_sum_is_charged_by_its_survivors(store: Store, database: str) -> None:
    """The first attempt is abandoned after its sum was unmasked. Costs outlive restarts and the removal of history."""
    driver = await started(store, file=PRIVATE)
    async for phase in play(driver):
        (account,) = (await store.ledger.load_population("demo")).accounts
        assert [charge.releases for charge in account.released] == ([1] if phase == "UNMASKING" else [])
    await driver.tick("one", 1000.0)
    await driver.tick("one", 10.0)
    await driver.check_in(*CLIENTS)
    for send in (keys_event, shares_event, report_event, confirmation_event, answer_event):
        key, _ = driver.cohort("one")
        attempt = driver.coordinator.jobs["one"].attempt
        assert attempt is not None
        names = sorted(name for name, each in attempt.assignments.items() if each.is_open)
        await driver.send(*(send(key, name) for name in names))
    await driver.aggregate("one")

    job = driver.coordinator.jobs["one"]
    assert (job.latest.version, job.unmasked) == (1, (3, 5))
    await store.retention.remove_history([AttemptKey("one", 1, 1), AttemptKey("one", 1, 2)], metrics=True)
    await driver.restart()
    assert driver.coordinator.jobs["one"].unmasked == (3, 5)
    (account,) = (await store.ledger.load_population("demo")).accounts
    assert account.released == tuple(charges(job.spec, [3, 5]))
    planned, most = (charge.mechanism.noise_multiplier for charge in account.released)
    assert (planned, most) == pytest.approx((4.0, 4.0 * (5 / 3) ** 0.5))
    (row,) = await list_releases(store, "one")
    assert (row.version, row.mechanism.noise_multiplier) == (1, most)
    await check_invariants(database)


async def test_clients_between_the_steps_are_not_idle(store: Store) -> None:
    """Those that wait for the others' keys or shares are not removed, although they have not opened a session since."""
    driver = await started(store)
    await store.clients.add_enrollment_token(EnrollmentToken("t", "demo", 10, 10, 1.0, 1e12), b"hash")
    for name in CLIENTS:
        await store.clients.enroll(Enrollment(name, "demo", {}, "1", name.encode(), b"hash", name))
    await driver.check_in(*CLIENTS)
    key, _ = driver.cohort("one")
    await driver.send(*(keys_event(key, name) for name in "abcd"))
    assert await store.clients.list_idle_clients(1e12) == []
    await driver.send(keys_event(key, "e"))
    assert await store.clients.list_idle_clients(1e12) == ["f", "g"]
    await driver.send(*(shares_event(key, name) for name in "abcde"))
    assert await store.clients.list_idle_clients(1e12) == ["f", "g"]


class Written:
    """The messages that are written: their rows and their bytes, and the bytes of all other rows."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin to count again."""
        self.rows = self.bytes = self.other_bytes = 0

    def count(self, _: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        """Count what a statement is executed with: one set of values, or a list of them."""
        if statement.startswith("SELECT"):
            return
        for values in parameters if isinstance(parameters, list) else [parameters]:
            size = sum(
                len(value)
                for value in (values.values() if isinstance(values, dict) else values)
                if isinstance(value, str | bytes | memoryview)
            )
            if "INTO secure_messages" in statement:
                self.rows += 1
                self.bytes += size
            else:
                self.other_bytes += size


@pytest.fixture
def written() -> Iterator[Written]:
    """What is written from now on."""
    found = Written()
    event.listen(sqlalchemy.Engine, "before_cursor_execute", found.count)
    yield found
    event.remove(sqlalchemy.Engine, "before_cursor_execute", found.count)


async def test_a_message_is_written_once(store: Store, written: Written) -> None:
    """With 300 clients and messages of 20 kB, a step that changes every client writes none of them again."""
    names, size = [f"client-{number}" for number in range(300)], 20_000
    driver = SecureDriver(store, check=False)
    await driver.create("one", FILE.replace("goal = 5", f"goal = {len(names)}").replace("1.4", "1.0"))
    await driver.check_in(*names)
    key, _ = driver.cohort("one")
    await driver.send(*(keys_event(key, name) for name in names))
    assert driver.phase == "SHARING"
    assert written.rows == len(names)
    written.clear()
    await driver.send(*(SharesSent(key, name, bytes(size)) for name in names))
    assert driver.phase == "COLLECTING"
    assert written.rows == len(names)
    assert len(names) * size <= written.bytes < len(names) * (size + 200)

    written.clear()
    await driver.send(*(UploadStarted(key, name) for name in names))
    await driver.send(*(report_event(key, name) for name in names))
    assert driver.phase == "CONFIRMING"
    assert (written.rows, written.bytes) == (0, 0)
    assert written.other_bytes < len(names) * 2000
    await driver.send(confirmation_event(key, names[0]))
    assert written.rows == 1
    assert written.bytes < 500
