"""A job that needs many clients at once beside jobs that take each one as it comes: none of them starves."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fedplat.job import JobSpec
from fedplat.rounds import Proposal, selection
from fedplat.rounds.commands import Assign, Commit
from fedplat.rounds.events import JobAction, UpdateReported
from support.rounds.driver import Driver, commands_of, make_aggregated, make_client, make_job, make_spec

TASK_S, AWAY_S = 0.5, 0.05
MANY = 10_000


class Fleet:
    """Clients that train for half a second, report, and check in again a moment later."""

    def __init__(self, jobs: Mapping[str, JobSpec], labels: Mapping[str, Mapping[str, str]]) -> None:
        self.driver = Driver(*(make_job(name, spec) for name, spec in jobs.items()))
        self._labels = labels
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], Proposal]]] = []
        for client_id in labels:
            self._check_in(client_id, 0.0)
        for name in jobs:
            self.driver.operate(JobAction.START, name)

    def play(self, seconds: float) -> Counter[str]:
        """Let time pass; the rounds that each job has committed meanwhile."""
        before, end = self._rounds(), self.driver.now + seconds
        while self._queue and self._queue[0][0] <= end:
            moment, _, act = heapq.heappop(self._queue)
            for proposal in self.driver.wait(max(moment - self.driver.now, 0.0)):
                self._follow(proposal)
            self._follow(act())
        for proposal in self.driver.wait(end - self.driver.now):
            self._follow(proposal)
        return self._rounds() - before

    def _rounds(self) -> Counter[str]:
        return Counter({name: job.latest.version for name, job in self.driver.coordinator.jobs.items()})

    def _check_in(self, client_id: str, moment: float) -> None:
        labels = self._labels[client_id]
        self._at(moment, lambda: self.driver.do(make_client(client_id, labels=labels)))

    def _at(self, moment: float, act: Callable[[], Proposal]) -> None:
        heapq.heappush(self._queue, (moment, next(self._numbers), act))

    def _follow(self, proposal: Proposal) -> None:
        for each in commands_of(proposal, Assign):
            report = UpdateReported(each.key, each.client_id, "update", 10.0)
            self._at(self.driver.now + TASK_S, lambda report=report: self.driver.do(report))
            self._check_in(each.client_id, self.driver.now + TASK_S + AWAY_S)
        for each in commands_of(proposal, Commit):
            self._follow(self.driver.do(make_aggregated(self.driver.coordinator.jobs[each.key.job_id])))


def small(**sections: Any) -> JobSpec:
    return make_spec(goal=1, rounds=MANY, **sections)


def full(goal: int = 4, **sections: Any) -> JobSpec:
    return make_spec(
        goal=goal, rounds=MANY, selection={"min_fraction": 1.0} | sections.pop("selection", {}), **sections
    )


def fleet(jobs: Mapping[str, JobSpec], num_clients: int = 4, **labels: Callable[[int], str]) -> Fleet:
    return Fleet(jobs, {f"c{n}": {name: value(n) for name, value in labels.items()} for n in range(num_clients)})


def test_a_job_that_needs_every_client_goes_on_beside_small_ones() -> None:
    jobs = {"full": full(), "one": small(), "two": small()}
    playing = fleet(jobs)
    for _ in range(3):
        rounds = playing.play(30.0)
        # Each of its rounds takes the patience, the end of the tasks at work, and its own: about 3 s.
        assert 8 <= rounds["full"] <= 12
        assert min(rounds["one"], rounds["two"]) >= 3 * rounds["full"]


def test_two_jobs_that_need_every_client_take_turns() -> None:
    rounds = fleet({"full": full(), "other": full(), "one": small()}).play(60.0)
    assert min(rounds.values()) >= 12
    assert abs(rounds["full"] - rounds["other"]) <= 1


def test_an_attempt_that_cannot_have_enough_clients_stops_nobody() -> None:
    alone, beside = fleet({"one": small()}, 3).play(60.0), fleet({"full": full(), "one": small()}, 3).play(60.0)
    assert beside["one"] == alone["one"]


def test_a_client_that_goes_away_for_good_ends_the_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    playing = fleet({"full": full(), "one": small()})
    assert playing.play(20.0)["full"] > 3
    driver = playing.driver
    gone = next(iter(driver.coordinator.room.clients or driver.coordinator.busy_clients))
    monkeypatch.setattr(playing, "_check_in", _except(gone, playing))
    playing.play(selection.RETURN_S + 70.0)  # until the selection in progress is over
    rounds = playing.play(30.0)
    assert rounds["one"] >= 40
    assert rounds["full"] == 0


def _except(gone: str, playing: Fleet) -> Callable[[str, float], None]:
    check_in = playing._check_in  # pyright: ignore[reportPrivateUsage]
    return lambda client_id, moment: check_in(client_id, moment) if client_id != gone else None


def test_other_clients_stay_free_while_some_are_reserved() -> None:
    """Half of the clients have the label; a job for the other half is not slower for the reservation."""
    jobs = {"east": full(2, selection={"where": "region == 'east'"}), "one": small()}
    jobs["west"] = small(selection={"where": "region == 'west'"})
    beside = fleet(jobs, region=lambda n: "east" if n < 2 else "west").play(30.0)
    assert beside["east"] >= 8
    assert beside["west"] >= 40


def test_an_attempt_that_may_begin_with_fewer_keeps_those_at_the_end_of_its_time() -> None:
    """It asks for 6 of 4 clients, and 3 would do: without a reservation it finds none when its time is over."""
    wanting = full(4, selection={"over_selection": 1.5, "min_fraction": 0.75}, deadlines={"selection_s": 10.0})
    rounds = fleet({"full": wanting, "one": small(), "two": small(), "three": small(), "four": small()}).play(60.0)
    assert rounds["full"] >= 4
    assert rounds["one"] >= 20


@pytest.mark.parametrize("loses", [False, True])
def test_a_lost_batch_changes_no_reservation(loses: bool) -> None:
    driver = Driver(make_job("full", full(3)), make_job("one", small()))
    driver.operate(JobAction.START, "full")
    driver.check_in("a", "b")
    driver.now = 3.0
    if loses:
        driver.do(make_client("d"), stored=False)
    driver.operate(JobAction.START, "one")  # ready, and "full" could never have enough
    assert driver.coordinator.num_busy == 1
