"""The contract of every store: lists and outcomes of assignments, samples of rounds, and the fleet."""

from __future__ import annotations

import itertools

import pytest

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.events import AssignmentFailed, UploadStarted
from fedplat.rounds.states import AssignmentState, Reason
from fedplat_server.database.records import AttemptFilter, ClientFilter, EnrollmentToken, spaced_positions
from fedplat_server.database.records import Enrollment as ClientEnrollment
from fedplat_server.database.sql_assignments import AssignmentFilter, AssignmentRecord, LabelledCount, OutcomeCount
from fedplat_server.database.sql_clients import AvailabilityHour
from fedplat_server.database.store import Store
from fedplat_server.records.audit import AuditAction, AuditEntry, AuditFilter
from support.store.driver import JOB_FILE, Driver, eventful

_S = AssignmentState


async def every(store: Store, which: AssignmentFilter, limit: int) -> list[AssignmentRecord]:
    """All pages of a list."""
    found: list[AssignmentRecord] = []
    while page := await store.assignments.list_assignments(
        which, after=found[-1].place if found else None, limit=limit
    ):
        assert len(page) <= limit
        found += page
    return found


async def test_assignments_are_listed_page_by_page(store: Store) -> None:
    driver = Driver(store)
    await eventful(driver)
    await eventful(Driver(store, "other"), "other")
    for which in (
        AssignmentFilter("eventful"),
        AssignmentFilter(client_id="a"),
        AssignmentFilter("eventful", client_id="a"),
        AssignmentFilter("eventful", round=2, number=1),
        AssignmentFilter("eventful", states=(_S.FAILED, _S.LATE)),
    ):
        whole = await store.assignments.list_assignments(which)
        assert whole
        assert await store.assignments.count_assignments(which) == len(whole)
        for limit in (1, 3, 100):
            assert await every(store, which, limit) == whole
        if which.is_by_time:
            times = [each.assigned_unix_s for each in whole]
            assert times == sorted(times, reverse=True)
        else:
            places = [(-each.place.round, -each.place.number, each.place.client_id) for each in whole]
            assert places == sorted(places)
    both = await store.assignments.list_assignments(AssignmentFilter(client_id="a"))
    assert {each.place.job_id for each in both} == {"eventful", "other"}
    states = {each.assignment.state for each in await every(store, AssignmentFilter("eventful", states=(_S.LATE,)), 2)}
    assert states == {_S.LATE}
    assert await store.assignments.list_assignments(AssignmentFilter("nobody")) == []


async def test_the_times_of_steps_are_kept(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    await driver.check_in(*"abcde")
    key, _ = driver.cohort("one")

    async def times(client_id: str) -> list[float | None]:
        which = AssignmentFilter("one", client_id=client_id)
        (found,) = await store.assignments.list_assignments(which)
        return [found.downloaded_unix_s, found.uploading_unix_s, found.ended_unix_s]

    assert await times("a") == [None, None, None]
    downloads = {AssignmentId(key, "a"): 5.5, AssignmentId(key, "b"): 6.5, AssignmentId(key, "z"): 7.5}
    await store.assignments.record_downloads(downloads)
    await store.assignments.record_downloads({AssignmentId(key, "a"): 9.5})
    await store.assignments.record_downloads({})
    assert await times("a") == [5.5, None, None]
    await driver.send(UploadStarted(key, "a"))
    _, began, _ = await times("a")
    assert began is not None
    (attempt,) = await store.jobs.list_attempts(AttemptFilter("one"))
    assert (attempt.tally.num_downloaded, attempt.tally.num_trained) == (2, 1)
    await driver.send(AssignmentFailed(key, "b", Reason.TRAINER_ERROR, "x"))
    await driver.report("one", "a")
    ended = (await times("a"))[2]
    assert await times("a") == [5.5, began, ended]
    assert ended is not None
    assert ended > began
    await driver.report("one", ["c", "d"])
    assert await times("a") == [5.5, began, ended]  # also when it is merged
    (record, *_) = await store.jobs.list_attempts(AttemptFilter("one"))
    assert (record.attempt.num_checked_in, record.attempt.num_eligible) == (5, 5)
    assert (record.tally.num_downloaded, record.tally.num_trained) == (4, 3)


async def test_outcomes_and_labels_of_an_attempt(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    token = EnrollmentToken("t", "demo", 9, 9, 0.0, 1e12)
    await store.clients.add_enrollment_token(token, b"hash")
    for name, region in zip("abcd", ("eu", "eu", "us", "us"), strict=True):
        made = ClientEnrollment(name, "demo", {"region": region}, "1", name.encode(), b"hash", f"key of {name}")
        await store.clients.enroll(made)
    await driver.check_in(*"abcde")  # e has no row any more
    key, _ = driver.cohort("one")
    for name in "abcd":
        await driver.send(AssignmentFailed(key, name, Reason.TRAINER_ERROR, f"{name}: \N{SNOWMAN}" * 500))
    first, *others = await store.assignments.list_outcomes(key)
    assert (first.state, first.reason, first.count) == (_S.FAILED, Reason.TRAINER_ERROR, 4)
    assert first.example.startswith("d: \N{SNOWMAN}")
    assert len(first.example.encode()) <= 300
    assert others == [OutcomeCount(_S.DROPPED, Reason.ATTEMPT_ABANDONED, 1, others[0].example)]
    found = await store.assignments.count_labels(key, 100)
    assert sorted(found, key=lambda each: (each.labels["region"], each.state)) == [
        LabelledCount({"region": "eu"}, _S.FAILED, 2),
        LabelledCount({"region": "us"}, _S.FAILED, 2),
    ]
    assert len(await store.assignments.count_labels(key, 1)) == 1
    assert await store.assignments.list_outcomes(AttemptKey("one", 9, 1)) == []


@pytest.mark.parametrize(("total", "most"), [(1, 1), (1, 9), (2, 1), (10, 3), (10, 10), (10_000, 250), (10_000, 2)])
def test_positions_are_evenly_spaced(total: int, most: int) -> None:
    found = spaced_positions(total, most)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (1, total)
    assert len(found) == min(total, max(most, 2 if total > 1 else 1))
    steps = [after - before for before, after in itertools.pairwise(found)]
    assert not steps or max(steps) - min(steps) <= 1


async def test_rounds_are_sampled(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one", JOB_FILE.replace("rounds = 3", "rounds = 9").partition("[evaluation")[0])
    for number in range(9):
        await driver.finish_attempt("one", f"{'ab'[number % 2]}")
    for most, expected in ((3, [1, 5, 9]), (2, [1, 9]), (99, list(range(1, 10)))):
        sample, total = await store.jobs.sample_attempts("one", most)
        assert ([each.key.round for each in sample], total) == (expected, 9)
    whole = {each.key: each for each in await store.jobs.list_attempts(AttemptFilter("one"))}
    assert all(whole[each.key] == each for each in sample)
    assert await store.jobs.sample_attempts("nobody", 5) == ([], 0)


async def test_clients_are_filtered(store: Store) -> None:
    await store.clients.add_enrollment_token(EnrollmentToken("t", "demo", 9, 9, 0.0, 1e12), b"hash")
    for name, labels in (("c-1a", {"region": "eu"}), ("c-2a", {"region": "us"}), ("c-3b", {"region": "eu", "n": "1"})):
        await store.clients.enroll(
            ClientEnrollment(name, "demo", labels, "1", name.encode(), b"hash", f"key of {name}")
        )
    await store.clients.revoke_client("c-2a")
    many = [f"c-{n}" for n in range(2000)]
    for which, expected in (
        (ClientFilter(), ["c-1a", "c-2a", "c-3b"]),
        (ClientFilter(labels={"region": "eu"}), ["c-1a", "c-3b"]),
        (ClientFilter(labels={"region": "eu", "n": "1"}), ["c-3b"]),
        (ClientFilter(labels={"n": "'); DROP TABLE clients; --"}), []),
        (ClientFilter(search="a"), ["c-1a", "c-2a"]),
        (ClientFilter(search="_"), []),
        (ClientFilter(is_revoked=True), ["c-2a"]),
        (ClientFilter(is_revoked=False, only=["c-2a", "c-3b", "c-9"]), ["c-3b"]),
        (ClientFilter(only=[*many, "c-3b", "c-1a"]), ["c-1a", "c-3b"]),
        (ClientFilter(only=[]), []),
        (ClientFilter(without=[*many, "c-1a"]), ["c-2a", "c-3b"]),
        (ClientFilter("other"), []),
    ):
        assert [each.client_id for each in await store.clients.list_clients(which)] == expected, which
        assert await store.clients.count_clients(which) == len(expected), which
        if expected:
            after = await store.clients.list_clients(which, after=expected[0], limit=1)
            assert [each.client_id for each in after] == expected[1:2]
    assert await store.clients.count_enrollment_tokens() == 1


async def test_audit_rows_are_filtered(store: Store) -> None:
    actions = (AuditAction.JOB_PAUSED, AuditAction.JOB_RESUMED)
    await store.audit.append([AuditEntry(f"anna-{n % 3}", actions[n % 2], str(n)) for n in range(12)])
    rows = await store.audit.list_rows()
    for which, expected in (
        (AuditFilter(), rows),
        (AuditFilter(actor="anna-1"), rows[1::3]),
        (AuditFilter(action="job resumed"), rows[1::2]),
        (AuditFilter("anna-1", "job resumed"), [rows[1], rows[7]]),
        (AuditFilter(since_unix_s=rows[0].unix_s + 1e6), []),
    ):
        assert await store.audit.list_rows(0, 99, which) == expected
        assert await store.audit.count_rows(0, which) == len(expected)
        assert await store.audit.list_rows(4, 99, which) == [row for row in expected if row.sequence > 4]
        assert await store.audit.count_rows(4, which) == len([row for row in expected if row.sequence > 4])
        newest = AuditFilter(which.actor, which.action, which.since_unix_s, newest_first=True)
        assert await store.audit.list_rows(0, 99, newest) == expected[::-1]
        assert await store.audit.list_rows(8, 2, newest) == [row for row in expected[::-1] if row.sequence < 8][:2]


async def test_the_larger_numbers_of_an_hour_are_kept(store: Store) -> None:
    fleet = store.fleet
    await fleet.record_availability([])
    await fleet.record_availability([AvailabilityHour("demo", 3600.0, 5, 4), AvailabilityHour("other", 3600.0, 1, 1)])
    await fleet.record_availability([AvailabilityHour("demo", 3600.0, 3, 6), AvailabilityHour("demo", 7200.0, 2, 2)])
    kept, later = AvailabilityHour("demo", 3600.0, 5, 6), AvailabilityHour("demo", 7200.0, 2, 2)
    assert await fleet.list_availability(0.0) == [kept, AvailabilityHour("other", 3600.0, 1, 1), later]
    assert await fleet.list_availability(0.0, "demo") == [kept, later]
    assert await fleet.list_availability(3601.0) == [later]
    assert await fleet.remove_availability(7200.0) == 2
    assert await fleet.list_availability(0.0) == [later]


async def test_the_traits_of_clients_are_read_in_chunks(store: Store) -> None:
    await store.clients.add_enrollment_token(EnrollmentToken("t", "demo", 9, 9, 0.0, 1e12), b"hash")
    for name in "zam":
        made = ClientEnrollment(name, "demo", {"name": name}, "1.2", name.encode(), b"hash", f"key of {name}")
        await store.clients.enroll(made)
    await store.clients.revoke_client("a")
    first = await store.fleet.list_traits(0, 2)
    rest = await store.fleet.list_traits(first[-1].sequence, 2)
    found = [(each.labels["name"], each.population, each.software_version, each.is_revoked) for each in (*first, *rest)]
    assert found == [("z", "demo", "1.2", False), ("a", "demo", "1.2", True), ("m", "demo", "1.2", False)]
    assert await store.fleet.list_traits(rest[-1].sequence, 2) == []
