"""Jobs with clocks: who waits for whom, who leaves the clock set, and how a client comes back.

Arbitrary schedules, with the bound after each change, are in `test_machine`.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest

from fedplat.rounds.events import ClientRevoked, UpdateReported
from fedplat.rounds.protocols import ssp
from fedplat.rounds.protocols.ssp import (
    CLEAN_CLOCKS,
    ClockSet,
    Lapse,
    clocks_from_builtins,
    clocks_of,
    clocks_to_builtins,
    list_withheld,
)
from fedplat.rounds.states import AttemptKind, JobStatus, Reason
from support.rounds.driver import Driver, assigned, make_job, make_spec


def begin(num_clients: int, slack: int, concurrency: int = 2, rounds: int = 30, **sections: Any) -> Driver:
    """A job whose clients c0, c1, ... have begun, as many as may."""
    spec = make_spec(1, rounds, mode={"kind": "ssp", "concurrency": concurrency, "slack": slack}, **sections)
    return Driver(make_job(spec=spec)).start(num_clients)


def work(driver: Driver, client_id: str) -> list[str]:
    """The client reports, a version is made of it, and it asks for more; returns who is given work then."""
    driver.report(client_id)
    driver.commit()
    return assigned(driver.check_in(client_id))


def clocks(driver: Driver) -> dict[str, int]:
    return dict(clocks_of(driver.job).clocks)


def is_at_work(driver: Driver, client_id: str) -> bool:
    return driver.coordinator.assignment_of(client_id) is not None


def test_a_client_gets_at_most_one_clock_more_than_the_slack_ahead() -> None:
    driver = begin(2, slack=2)
    assert [work(driver, "c0") for _ in range(3)] == [["c0"], ["c0"], []]
    assert clocks(driver) == {"c0": 3, "c1": 0}
    assert list_withheld(driver.job) == ["c0"]
    driver.report("c1")
    assert assigned(driver.commit()) == ["c0"]
    assert clocks_of(driver.job).minimum == 1
    assert driver.job.latest.version == 4


def test_without_slack_all_begin_each_clock_with_the_same_version() -> None:
    driver = begin(2, slack=0, concurrency=3, rounds=9, selection={"wait_for": 3})
    assert not driver.coordinator.num_busy
    assert assigned(driver.check_in("c2")) == ["c0", "c1", "c2"]
    for clock in range(3):
        names = [f"c{number}" for number in range(3)]
        found = [each.base_version for each in driver.job.open_assignments]
        assert found == [3 * clock] * 3
        driver.report(*names)
        for _ in names:
            assert not driver.coordinator.num_busy or clock == 0
            driver.commit()
        if clock < 2:
            driver.check_in(*names)
    assert driver.job.status is JobStatus.COMPLETED
    assert clocks(driver) == dict.fromkeys(("c0", "c1", "c2"), 3)


def test_clocks_decide_who_trains_and_not_who_evaluates() -> None:
    """The clock set is full, so no other client may train; the version is evaluated by those that are free."""
    driver = begin(2, slack=0, evaluation={"clients": {"evaluator": "digits-eval", "goal": 2}})
    assert assigned(driver.check_in("c2", "c3")) == []
    driver.report("c0")
    assert sorted(assigned(driver.commit())) == ["c2", "c3"]
    assert driver.attempt.kind is AttemptKind.EVALUATE
    assert clocks(driver) == {"c0": 1, "c1": 0}


def test_the_slowest_dies_and_comes_back_at_the_minimum() -> None:
    driver = begin(2, slack=0)
    assert work(driver, "c0") == []
    driver.wait(101.0)  # c1 is late
    assert clocks(driver) == {"c0": 1}
    assert is_at_work(driver, "c0")
    driver.check_in("c1")
    driver.report("c0")
    assert assigned(driver.commit()) == ["c1"]
    assert clocks(driver) == {"c0": 2, "c1": 2}


def test_a_client_that_never_returns_leaves_after_the_time_for_selection() -> None:
    driver = begin(2, slack=0)
    driver.report("c1")
    driver.commit()
    assert work(driver, "c0") == ["c0"]
    assert work(driver, "c0") == []
    driver.wait(59.0)
    assert clocks(driver) == {"c0": 2, "c1": 1}
    driver.wait(2.0)
    assert clocks(driver) == {"c0": 2}
    assert is_at_work(driver, "c0")
    assert driver.job.failures == 0


def test_leaving_is_no_way_around_the_bound() -> None:
    driver = begin(2, slack=1)
    assert [work(driver, "c0") for _ in range(2)] == [["c0"], []]
    driver.leave("c0")
    driver.wait(61.0)
    assert clocks(driver) == {"c1": 0}
    assert assigned(driver.check_in("c0")) == []
    driver.report("c1")
    assert assigned(driver.commit()) == ["c0"]
    assert clocks(driver) == {"c0": 2, "c1": 1}


def test_clocks_outlive_the_server_and_all_get_the_whole_time_to_return() -> None:
    driver = begin(2, slack=0)
    assert work(driver, "c0") == []
    driver.crash()
    assert clocks(driver) == {"c0": 1, "c1": 0}
    assert assigned(driver.check_in("c0")) == []
    driver.report("c1")
    assert assigned(driver.commit()) == ["c0"]


def test_a_repeated_report_counts_once() -> None:
    driver = begin(2, slack=1)
    event = UpdateReported(driver.key_of("c0"), "c0", "of-c0", 10.0)
    assert driver.verdict(event).accepted
    assert driver.verdict(event).accepted
    driver.commit()
    assert driver.verdict(event).reason is Reason.STALE  # the server finds the receipt in its store
    assert clocks(driver) == {"c0": 1, "c1": 0}


def test_a_revoked_client_leaves_at_once_at_work_or_not() -> None:
    driver = begin(3, slack=0, concurrency=3)
    driver.report("c1")
    driver.commit()
    assert work(driver, "c0") == []
    driver.do(ClientRevoked("c1"))
    assert clocks(driver) == {"c0": 1, "c2": 0}
    assert assigned(driver.do(ClientRevoked("c2"))) == ["c0"]


def test_a_revoked_client_takes_no_one_with_it() -> None:
    """c1 waits, and its time is over at this moment; only a roll call would show that it is present."""
    driver = begin(3, slack=0, concurrency=3)
    assert [work(driver, name) for name in ("c0", "c1")] == [[], []]
    driver.now += 60.0
    driver.do(ClientRevoked("c0"))
    assert clocks(driver) == {"c1": 1, "c2": 0}


def test_another_client_joins_when_one_has_failed() -> None:
    driver = begin(3, slack=0)
    first = set(clocks(driver))
    (other,) = {"c0", "c1", "c2"} - first
    assert assigned(driver.give_up(min(first))) == [other]
    assert clocks(driver) == {max(first): 0, other: 0}


def test_an_empty_set_keeps_its_minimum_and_begins_again() -> None:
    driver = begin(1, slack=0)
    assert work(driver, "c0") == ["c0"]
    driver.give_up("c0")
    assert (clocks(driver), clocks_of(driver.job).minimum) == ({}, 1)
    assert assigned(driver.check_in("c1")) == ["c1"]
    assert clocks(driver) == {"c1": 1}


def test_one_client_that_only_takes_work_holds_the_others_back_ever_more_rarely() -> None:
    """It costs a deadline of 100 s whenever it is given work: after 1, 2, 4, ... clocks, and at most every 32."""
    driver = begin(2, slack=0, rounds=110)
    held: list[int] = []
    while driver.is_running:
        while is_at_work(driver, "c0"):
            work(driver, "c0")
        if is_at_work(driver, "c1"):
            held.append(clocks_of(driver.job).minimum)
            driver.crash()  # neither the clocks nor who has left are forgotten
            driver.check_in("c0")
            driver.wait(101.0)
            driver.check_in("c1")
    rests = np.diff(held).tolist()
    assert rests == [2, 3, 5, 9, 17, *[33] * (len(rests) - 5)]
    assert len(rests) >= 6


def test_a_member_that_waits_is_asked_back_at_once_in_a_large_fleet() -> None:
    driver = begin(2, slack=0)
    assert work(driver, "c0") == []
    driver.check_in(*(f"other{number}" for number in range(200)))
    assert driver.leave("other7").retry.min_s > driver.job.spec.deadlines.selection_s
    assert driver.leave("c0").retry.max_s <= 1.0


def test_clean_clocks_forgive_a_client_that_has_left() -> None:
    late = ClockSet().join("a").join("b").tick("a").leave(["b"])
    assert late.lapses == {"b": Lapse(1, 1)}
    for _ in range(CLEAN_CLOCKS):
        assert late.lapses
        late = late.tick("a")
    assert late.list_resting() == []
    assert late.tick("a").lapses == {}
    again = late.join("b").leave(["b"])
    assert again.lapses == {"b": Lapse(2, late.minimum)}
    assert clocks_from_builtins(clocks_to_builtins(again)) == again


def test_those_who_have_left_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssp, "MAX_LEFT", 3)
    driver = begin(1, slack=9, concurrency=2, rounds=100)
    joined = 0
    for number in range(8):
        name = f"x{number}"
        driver.check_in(name)
        if is_at_work(driver, name):
            joined += 1
            assert work(driver, name) == [name]
            driver.give_up(name)
    assert joined == 3
    assert clocks_of(driver.job).ahead == {"x0": 1, "x1": 1, "x2": 1}
    assert clocks_of(driver.job).is_closed
    driver.report("c0")
    driver.commit()
    assert not clocks_of(driver.job).ahead
    driver.check_in("c0")
    assert set(clocks(driver)) > {"c0"}


def run_in_virtual_time(took_s: np.ndarray, slack: int) -> np.ndarray:
    """The moments at which clients reach their clocks, with the coordinator; [client, clock] like `took_s`."""
    num_clients, num_clocks = took_s.shape
    driver = begin(num_clients, slack, num_clients, rounds=1000, selection={"wait_for": num_clients})
    reached = np.full(took_s.shape, np.nan)
    at_work = [(float(took_s[number, 0]), number) for number in range(num_clients)]
    heapq.heapify(at_work)
    while at_work:
        driver.now, number = heapq.heappop(at_work)
        clock = clocks(driver)[f"c{number}"]
        reached[number, clock] = driver.now
        driver.report(f"c{number}")
        begun = [*assigned(driver.commit()), *assigned(driver.check_in(f"c{number}"))]
        for name in begun:
            if (next_clock := clocks(driver)[name]) < num_clocks:
                heapq.heappush(at_work, (driver.now + float(took_s[int(name[1:]), next_clock]), int(name[1:])))
    return reached


def reference(took_s: np.ndarray, slack: int) -> np.ndarray:
    """A clock begins after the client's last one, and after everyone's clock `slack` + 1 before it."""
    reached = np.zeros_like(took_s)
    for clock in range(took_s.shape[1]):
        begins = reached[:, clock - 1] if clock else np.zeros(len(took_s))
        if clock > slack:
            begins = np.maximum(begins, reached[:, clock - 1 - slack].max())
        reached[:, clock] = begins + took_s[:, clock]
    return reached


def test_the_time_falls_with_the_slack_when_clients_are_slow_now_and_then() -> None:
    """From that of synchronous rounds, the sum of the slowest of each, to that of the slowest client alone."""
    took_s = np.where(np.random.default_rng(0).random((4, 12)) < 0.25, 4.0, 1.0)
    times: list[float] = []
    for slack in (0, 1, 3, 12):
        reached = run_in_virtual_time(took_s, slack)
        np.testing.assert_array_equal(reached, reference(took_s, slack))
        times.append(float(reached.max()))
    assert times[0] == took_s.max(axis=0).sum()
    assert times[-1] == took_s.sum(axis=1).max()
    assert times == sorted(times, reverse=True)
    assert times[0] > times[1] > times[-1]
