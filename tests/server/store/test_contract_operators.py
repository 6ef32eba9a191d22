"""What every store does with operators and the audit log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from fedplat.rounds.events import JobAction, OperatorCommand
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import LastAdminError, OperatorError, StaleRevisionError
from fedplat_server.records.audit import SERVER, AuditEntry, AuditHead, OperatorRecord, Role
from fedplat_server.records.audit import AuditAction as Noted
from support.access import ADMIN_NAME
from support.store import audit_log
from support.store.driver import JOB_FILE, NOW, Driver, Ticks, draft

ANNA = OperatorRecord("anna", Role.ADMIN, 1.5)
BEN = OperatorRecord("ben", Role.VIEWER, 2.5, expires_unix_s=3.5)


def note(actor: str, **details: str | int) -> AuditEntry:
    return AuditEntry(actor, Noted.JOB_STARTED, "j-1", details)


async def operators(store: Store) -> list[OperatorRecord]:
    """Those that a test has made: the database may be a copy of one that has its own."""
    return [one for one in await store.operators.list_operators() if one.name != ADMIN_NAME]


async def problems(store: Store) -> list[str]:
    return audit_log.find_problems(await store.audit.list_rows(limit=10_000), await store.audit.read_head())


async def test_operators_come_and_go(store: Store) -> None:
    await store.operators.add_operator(BEN, b"b")
    await store.operators.add_operator(ANNA, b"a")
    assert await operators(store) == [ANNA, BEN]
    assert await store.operators.find_operator(b"b") == BEN
    await store.operators.remove_operator("ben")
    assert await store.operators.find_operator(b"b") is None
    assert await operators(store) == [ANNA]


@pytest.mark.fault("F47")
async def test_operators_are_listed_page_by_page(store: Store) -> None:
    """In the order of the characters' numbers, whatever language a database sorts by."""
    names = ["Zoe", "a-1", "a.1", "a1", "aB", "ab", "b"]
    for name in names:
        await store.operators.add_operator(OperatorRecord(name, Role.VIEWER, 1.5), name.encode())
    whole, found, after = await store.operators.list_operators(), list[OperatorRecord](), ""
    while page := await store.operators.list_operators(after=after, limit=2):
        found += page
        after = page[-1].name
    assert found == whole
    assert [one.name for one in whole if one.name in names] == sorted(names)


async def test_a_name_is_given_once_and_nothing_is_noted_of_what_did_not_happen(store: Store) -> None:
    await store.operators.add_operator(ANNA, b"a", [note("host")])
    with pytest.raises(OperatorError, match="operator anna exists already"):
        await store.operators.add_operator(ANNA, b"b", [note("host")])
    with pytest.raises(OperatorError, match="no operator ben"):
        await store.operators.remove_operator("ben", [note("host")])
    assert (await store.audit.read_head()).num_rows == 1


@pytest.mark.parametrize("others", [(), (BEN,), (dataclasses.replace(ANNA, name="carl", expires_unix_s=2.0),)])
async def test_the_last_admin_stays_if_it_is_to(store: Store, others: tuple[OperatorRecord, ...]) -> None:
    """Neither a viewer nor an admin whose token has expired can make another operator."""
    await forget_the_tests_own(store)
    for one in (ANNA, *others):
        await store.operators.add_operator(one, one.name.encode())
    with pytest.raises(LastAdminError, match="last one with the role admin"):
        await store.operators.remove_operator("anna", [note("anna")], keep_an_admin=True)
    assert (await store.audit.read_head()).num_rows == 0
    for one in others:
        await store.operators.remove_operator(one.name, keep_an_admin=True)
    await store.operators.remove_operator("anna")  # by a command on the server's machine, which can make another one
    assert await store.operators.list_operators() == []


async def test_two_admins_who_remove_each_other_leave_one(database: str) -> None:
    """Two daemons ask at the same moment."""
    stores = [await open_store(database, Ticks()) for _ in range(2)]
    await forget_the_tests_own(stores[0])
    for turn in range(10):
        for one in (ANNA, dataclasses.replace(ANNA, name="carl")):
            with contextlib.suppress(OperatorError):
                await stores[0].operators.add_operator(one, f"{one.name} {turn}".encode())
        names = ("anna", "carl") if turn % 2 else ("carl", "anna")
        removals = (
            store.operators.remove_operator(name, keep_an_admin=True) for store, name in zip(stores, names, strict=True)
        )
        answers = await asyncio.gather(*removals, return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["LastAdminError", "NoneType"]
        assert len(await stores[0].operators.list_operators()) == 1
    for store in stores:
        await store.close()


async def forget_the_tests_own(store: Store) -> None:
    for one in await store.operators.list_operators():
        await store.operators.remove_operator(one.name)


async def test_an_empty_log(store: Store) -> None:
    assert await store.audit.list_rows() == []
    assert await store.audit.read_head() == AuditHead()
    await store.audit.append([])
    assert await problems(store) == []


async def test_rows_are_given_back_as_they_were_hashed(store: Store) -> None:
    await store.audit.append([note("anna", text="naïve \x00 ✓ \ud800", number=7), note("zero \x00 and \ud800")])
    await store.audit.append([AuditEntry(SERVER, Noted.SERVER_STARTED)])
    rows = await store.audit.list_rows()
    assert [row.sequence for row in rows] == [1, 2, 3]
    assert rows[0].actor == "anna"
    assert rows[0].details == '{"number":7,"text":"na\\u00efve \\u0000 \\u2713 \\ud800"}'
    assert await problems(store) == []
    assert await store.audit.list_rows(after_sequence=1, limit=1) == rows[1:2]


async def test_concurrent_appends_make_one_chain(store: Store) -> None:
    await asyncio.gather(*(store.audit.append([note(f"{n}-{m}") for m in range(3)]) for n in range(20)))
    assert await problems(store) == []
    actors = [row.actor for row in await store.audit.list_rows()]
    assert sorted(actors) == sorted(f"{n}-{m}" for n in range(20) for m in range(3))
    for start in range(0, 60, 3):
        assert len({actor.split("-")[0] for actor in actors[start : start + 3]}) == 1


async def test_several_daemons_on_one_database_make_one_chain(database: str) -> None:
    stores = [await open_store(database) for _ in range(3)]
    await asyncio.gather(*(store.audit.append([note(f"{n}")]) for store in stores for n in range(10)))
    assert await problems(stores[0]) == []
    assert (await stores[1].audit.read_head()).num_rows == 30
    for store in stores:
        await store.close()


async def test_a_new_job_is_noted_once(store: Store) -> None:
    for _ in range(2):
        await store.jobs.create_job(draft("j-1"), JOB_FILE, "a key for it", [note("anna")])
    assert [row.actor for row in await store.audit.list_rows()] == ["anna"]


async def test_a_change_and_its_note_are_stored_together_or_not_at_all(store: Store) -> None:
    driver = Driver(store)
    await driver.create("j-1")
    changes = driver.propose(OperatorCommand("j-1", JobAction.PAUSE)).changes
    await store.jobs.save(changes, NOW, audit=[note("anna")])
    with pytest.raises(StaleRevisionError):
        await store.jobs.save(changes, NOW, audit=[note("anna")])
    assert [row.actor for row in await store.audit.list_rows()] == ["anna"]
    assert await problems(store) == []
