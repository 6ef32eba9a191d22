"""The contract of every store for enrollment tokens and clients."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from fedplat_server.database.records import ClientFilter, ClientRecord, Enrollment, EnrollmentToken
from fedplat_server.database.store import Store
from fedplat_server.errors import EnrollmentConflictError, StoreError, TokenRefusedError
from fedplat_server.records.audit import AuditAction, AuditEntry
from fedplat_server.records.events import EventType
from support.store.driver import Driver

FAR = 9e9
"""A moment that never comes; the clock of the tests' stores begins at 1,000,000."""


def token(name: str = "t", **changes: Any) -> EnrollmentToken:
    made = EnrollmentToken(name, "demo", 10, 10, 1.0, FAR)
    return dataclasses.replace(made, **changes)


def enrollment(name: str, **changes: Any) -> Enrollment:
    made = Enrollment(name, "demo", {"region": "eu"}, "0.1.0", name.encode(), b"hash of t", f"key of {name}")
    return dataclasses.replace(made, **changes)


@pytest.fixture
async def open_store(store: Store) -> Store:
    """A store with a token that ten clients may use."""
    await store.clients.add_enrollment_token(token(), b"hash of t")
    return store


async def num_left(store: Store) -> int:
    return (await store.clients.list_enrollment_tokens())[0].num_left


async def test_tokens_are_listed_in_order_and_revoked_once(store: Store) -> None:
    made = [token(name, created_unix_s=at) for name, at in (("z", 3.0), ("a", 2.0))]
    for one in made:
        await store.clients.add_enrollment_token(one, f"hash of {one.token_id}".encode())
    assert await store.clients.list_enrollment_tokens() == made
    audit = [AuditEntry("anna", AuditAction.ENROLLMENT_REVOKED, "a")]
    revoked = await store.clients.revoke_enrollment_token("a", audit)
    assert revoked is not None
    assert revoked.revoked_unix_s is not None
    assert await store.clients.revoke_enrollment_token("a", audit) == revoked
    assert [row.subject for row in await store.audit.list_rows()] == ["a"]
    assert await store.clients.list_enrollment_tokens() == [made[0], revoked]
    assert await store.clients.list_enrollment_tokens(limit=1) == made[:1]
    assert await store.clients.list_enrollment_tokens(after="z", limit=1) == [revoked]
    assert (
        await store.clients.list_enrollment_tokens(after="a")
        == await store.clients.list_enrollment_tokens(after="b")
        == []
    )
    assert await store.clients.revoke_enrollment_token("b") is None


async def test_a_token_is_found_by_its_hash(store: Store) -> None:
    await store.clients.add_enrollment_token(token("t"), b"hash of t")
    await store.clients.add_enrollment_token(token("u", num_left=1), b"hash of u")
    assert await store.clients.find_enrollment_token(b"hash of u") == token("u", num_left=1)
    assert await store.clients.find_enrollment_token(b"hash of v") is None


async def test_enrolled_clients_are_listed_in_order(open_store: Store) -> None:
    store = open_store
    await store.clients.add_enrollment_token(token("p", population="production"), b"hash of p")
    assert [(await store.clients.enroll(enrollment(name))).client_id for name in ("z", "a", "m")] == ["z", "a", "m"]
    await store.clients.enroll(enrollment("other", population="production", token_hash=b"hash of p"))
    assert [client.client_id for client in await store.clients.list_clients(ClientFilter("demo"))] == ["z", "a", "m"]
    assert [client.client_id for client in await store.clients.list_clients()] == ["z", "a", "m", "other"]
    assert await store.clients.list_clients(ClientFilter("nobody")) == []
    assert await store.clients.count_clients() == 4
    assert [one.num_left for one in await store.clients.list_enrollment_tokens()] == [7, 9]


async def test_clients_are_listed_page_by_page(open_store: Store) -> None:
    store = open_store
    await store.clients.add_enrollment_token(token("p", population="production"), b"hash of p")
    for name in ("z", "a"):
        await store.clients.enroll(enrollment(name))
    await store.clients.enroll(enrollment("other", population="production", token_hash=b"hash of p"))
    await store.clients.enroll(enrollment("m"))

    async def page(population: str | None, after: str, limit: int | None) -> list[str]:
        return [
            one.client_id
            for one in await store.clients.list_clients(ClientFilter(population), after=after, limit=limit)
        ]

    assert await page(None, "", 2) == ["z", "a"]
    assert await page(None, "a", 2) == ["other", "m"]
    assert await page("demo", "a", 2) == ["m"]
    assert await page("demo", "other", None) == ["m"]
    assert await page(None, "m", 2) == await page(None, "nobody", 2) == []


async def test_a_client_is_found_by_its_id(open_store: Store) -> None:
    made = await open_store.clients.enroll(enrollment("a"))
    assert made == ClientRecord("a", "demo", {"region": "eu"}, "0.1.0", made.enrolled_unix_s, b"a", token_id="t")
    assert await open_store.clients.find_clients(["a", "b"]) == {"a": made}
    assert await open_store.clients.find_clients(["b"]) == {}


async def test_enrolling_again_costs_nothing_whatever_became_of_the_token(open_store: Store) -> None:
    store = open_store
    first = await store.clients.enroll(enrollment("a"))
    await store.clients.revoke_enrollment_token("t")
    again = enrollment("b", public_key=b"a", idempotency_key="key of a", labels={"x": "y"}, software_version="0.2.0")
    second = await store.clients.enroll(again)
    assert second == dataclasses.replace(first, labels={"x": "y"}, software_version="0.2.0")
    assert await store.clients.list_clients() == [second]
    assert await num_left(store) == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"population": "production"}, "population demo"),
        ({"public_key": b"other"}, "another public key"),
    ],
)
async def test_enrolling_again_as_another_client_is_refused(
    open_store: Store, changes: dict[str, Any], said: str
) -> None:
    await open_store.clients.enroll(enrollment("a"))
    before = await open_store.clients.list_clients()
    again = enrollment("b", **{"public_key": b"a", "idempotency_key": "key of a", "labels": {}, **changes})
    with pytest.raises(EnrollmentConflictError, match=said):
        await open_store.clients.enroll(again)
    assert await open_store.clients.list_clients() == before
    assert await num_left(open_store) == 9


async def test_two_clients_cannot_share_a_key(open_store: Store) -> None:
    await open_store.clients.enroll(enrollment("a"))
    with pytest.raises(EnrollmentConflictError, match="public key"):
        await open_store.clients.enroll(enrollment("b", public_key=b"a"))
    assert [client.client_id for client in await open_store.clients.list_clients()] == ["a"]
    assert await num_left(open_store) == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_left": 0}, "used up"),
        ({"expires_unix_s": 2.0}, "expired"),
        ({"revoked_unix_s": 2.0}, "revoked"),
        ({"population": "production"}, "another population"),
    ],
)
async def test_a_token_of_no_use_lets_no_client_in(store: Store, changes: dict[str, Any], said: str) -> None:
    await store.clients.add_enrollment_token(token(**changes), b"hash of t")
    with pytest.raises(TokenRefusedError, match=said) as caught:
        await store.clients.enroll(enrollment("a"))
    assert caught.value.is_known
    assert await store.clients.list_clients() == []
    assert await store.clients.list_enrollment_tokens() == [token(**changes)]


async def test_an_unknown_token_lets_no_client_in(open_store: Store) -> None:
    with pytest.raises(TokenRefusedError) as caught:
        await open_store.clients.enroll(enrollment("a", token_hash=b"x"))
    assert not caught.value.is_known
    assert await open_store.clients.list_clients() == []


async def test_of_many_at_once_only_as_many_get_in_as_the_token_says(store: Store) -> None:
    await store.clients.add_enrollment_token(token(num_left=3), b"hash of t")
    answers = await asyncio.gather(
        *(store.clients.enroll(enrollment(f"c{n}")) for n in range(8)), return_exceptions=True
    )
    assert sum(isinstance(answer, ClientRecord) for answer in answers) == 3
    assert sum(isinstance(answer, TokenRefusedError) for answer in answers) == 5
    assert await num_left(store) == 0
    assert len(await store.clients.list_clients()) == 3


async def test_one_that_enrols_many_times_at_once_is_one_client(open_store: Store) -> None:
    calls = (enrollment(f"c{n}", public_key=b"k", idempotency_key="the key") for n in range(8))
    answers = await asyncio.gather(*(open_store.clients.enroll(call) for call in calls))
    assert len({answer.client_id for answer in answers}) == 1
    assert await num_left(open_store) == 9


async def test_sessions_are_counted(open_store: Store) -> None:
    made = await open_store.clients.enroll(enrollment("a"))
    for number in (1, 2, 3):
        changed = dataclasses.replace(made, session_number=number)
        assert await open_store.clients.begin_sessions(["b", "a"]) == {"a": changed}
    assert await open_store.clients.list_clients() == [changed]
    other = await open_store.clients.enroll(enrollment("z"))
    found = await open_store.clients.begin_sessions(["a", "z"])
    assert {name: one.session_number for name, one in found.items()} == {"a": 4, "z": 1}
    assert await open_store.clients.find_clients(["z"]) == {"z": dataclasses.replace(other, session_number=1)}
    await open_store.clients.begin_sessions(["z"])
    assert (await open_store.clients.find_clients(["a"]))["a"].session_number == 4


async def test_idle_clients_have_no_work_and_were_not_seen(open_store: Store) -> None:
    store, driver = open_store, Driver(open_store)
    names = "abcdefgh"
    for name in names:
        await store.clients.enroll(enrollment(name))
    await driver.create("one")
    await driver.check_in(*"abcde")
    assert await store.clients.list_idle_clients(FAR) == ["f", "g", "h"]
    await store.clients.record_seen({})
    await store.clients.record_seen({"g": 2.0, "f": FAR})
    assert await store.clients.list_idle_clients(FAR) == ["g", "h"]
    assert await store.clients.list_idle_clients(3.0) == ["g"]
    assert await store.clients.list_idle_clients(2.0) == []
    assert await store.clients.remove_clients(["f", "g"], FAR) == 1  # f was seen after it was listed
    assert [one.client_id for one in await store.clients.list_clients()] == list("abcdefh")


async def test_a_client_is_revoked_once(open_store: Store) -> None:
    made = await open_store.clients.enroll(enrollment("a"))
    audit = [AuditEntry("anna", AuditAction.CLIENT_REVOKED, "a")]
    revoked = await open_store.clients.revoke_client("a", audit)
    assert revoked is not None
    assert revoked.revoked_unix_s is not None
    assert revoked == dataclasses.replace(made, revoked_unix_s=revoked.revoked_unix_s)
    assert await open_store.clients.revoke_client("a", audit) == revoked
    assert [row.subject for row in await open_store.audit.list_rows()] == ["a"]
    assert await open_store.clients.find_clients(["a"]) == {"a": revoked}
    assert await open_store.clients.revoke_client("b") is None
    events = await open_store.events.list_events(types={EventType.CLIENT_REVOKED})
    assert [(one.client_id, one.population) for one in events] == [("a", "demo")]


async def test_the_clients_of_a_token_are_revoked_page_by_page(open_store: Store) -> None:
    store = open_store
    await store.clients.add_enrollment_token(token("u"), b"hash of u")
    for name in ("z", "a", "m"):
        await store.clients.enroll(enrollment(name))
    other = await store.clients.enroll(enrollment("other", token_hash=b"hash of u"))
    first = await store.clients.revoke_client("a")

    def noted(client: ClientRecord) -> list[AuditEntry]:
        return [AuditEntry("anna", AuditAction.CLIENT_REVOKED, client.client_id)]

    async def page(token_id: str, after: str) -> list[str]:
        found = await store.clients.revoke_clients_of(token_id, after, 2, noted)
        assert all(one.revoked_unix_s is not None for one in found)
        return [one.client_id for one in found]

    assert [await page("t", after) for after in ("", "a", "m")] == [["z", "a"], ["m"], []]
    assert await page("t", "") == ["z", "a"]  # safe to repeat
    assert await page("nothing", "") == []
    assert await store.clients.find_clients(["a", "other"]) == {"a": first, "other": other}
    assert [row.subject for row in await store.audit.list_rows()] == ["z", "m"]
    events = await store.events.list_events(types={EventType.CLIENT_REVOKED})
    assert [one.client_id for one in events] == ["a", "z", "m"]


async def test_what_a_client_says_of_itself_is_replaced(open_store: Store) -> None:
    await open_store.clients.enroll(enrollment("a"))
    await open_store.clients.update_client("a", {"gpu": "yes", "ü": "\N{SNOWMAN}"}, "0.3.0")
    (client,) = await open_store.clients.list_clients()
    assert (client.labels, client.software_version) == ({"gpu": "yes", "ü": "\N{SNOWMAN}"}, "0.3.0")
    with pytest.raises(StoreError, match="no client b"):
        await open_store.clients.update_client("b", {}, "")
