"""How often a client takes part: rest between participations, trials of each client, and what is remembered."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedplat.rounds import pacing
from fedplat.rounds.commands import Assign, Commit, RetryWindow
from fedplat.rounds.events import AggregationFailed, JobAction, OperatorCommand, TimerFired
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from support.rounds.driver import EVALUATOR, Driver, assigned, commands_of, make_client, make_job, make_spec


def separated(rest: int, num_clients: int, goal: int = 2, rounds: int = 50, **selection: Any) -> Driver:
    """A running job with a waiting fleet, whose clients rest for `rest` rounds."""
    spec = make_spec(goal, rounds, selection={"min_separation": rest} | selection)
    return Driver(make_job(spec=spec)).start(num_clients)


def idle(driver: Driver, num_clients: int) -> list[str]:
    return [name for i in range(num_clients) if (name := f"c{i}") not in driver.coordinator.room.clients]


@pytest.mark.parametrize(("rest", "num_clients"), [(1, 4), (2, 6), (3, 11)])
def test_a_client_rests_and_is_drawn_again(rest: int, num_clients: int) -> None:
    driver, rounds = separated(rest, num_clients), dict[str, list[int]]()
    for _ in range(12):
        for client_id in driver.attempt.assignments:
            rounds.setdefault(client_id, []).append(driver.key.round)
        driver.play_round()
        driver.check_in(*idle(driver, num_clients))
    gaps = [later - earlier for each in rounds.values() for earlier, later in itertools.pairwise(each)]
    assert min(gaps) == rest + 1
    assert sum(map(len, rounds.values())) == 24


def test_the_same_round_may_try_again_with_those_whose_attempt_came_to_nothing() -> None:
    """Otherwise a fleet that is just large enough could never try again."""
    driver = separated(1, 4)
    first = set(driver.attempt.assignments)
    driver.give_up(*first)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    driver.wait(2)
    assert set(driver.attempt.assignments) == {"c0", "c1", "c2", "c3"} - first
    driver.give_up(*driver.attempt.assignments)
    driver.check_in(*sorted(first))
    driver.wait(5)
    assert (driver.key.round, driver.key.number) == (1, 3)
    assert set(driver.attempt.assignments) <= {"c0", "c1", "c2", "c3"}


def test_those_who_waited_for_another_attempt_rest_when_the_round_goes_on_without_them() -> None:
    driver = separated(1, 2)
    driver.give_up("c0", "c1")
    driver.check_in("c0", "c1", *(f"d{i}" for i in range(40)))
    driver.wait(2)
    assert driver.key == ("j", 1, 2)
    drawn = set(driver.attempt.assignments)
    driver.play_round()
    assert driver.key.round == 2
    assert not set(driver.attempt.assignments) & ({"c0", "c1"} | drawn)


def test_a_restart_forgets_no_client_that_rests() -> None:
    driver = separated(2, 2)
    driver.play_round()
    driver.crash()
    driver.check_in("c0", "c1", "d0")
    assert driver.attempt.phase is AttemptPhase.SELECTING
    assert assigned(driver.check_in("d1")) == ["d0", "d1"]
    driver.play_round()
    driver.crash()
    assert assigned(driver.check_in("d0", "c0", "c1", "d1", "e0", "e1")) == ["e0", "e1"]
    driver.play_round()
    driver.crash()
    assert set(assigned(driver.check_in("c0", "c1"))) == {"c0", "c1"}


def test_a_lost_batch_that_began_the_next_round_ends_nobodys_rest() -> None:
    driver = separated(1, 4)
    resting = set(driver.attempt.assignments)
    driver.play_round()
    driver.check_in(*resting, "d0", "d1")
    driver.report(*driver.attempt.assignments)
    driver.do(driver.aggregated(), stored=False)
    driver.do(AggregationFailed(driver.key, "the disk is full"))
    driver.wait(2)
    assert driver.key == ("j", 2, 2)
    assert set(driver.attempt.assignments) == {"d0", "d1"}


def test_who_lost_its_work_and_came_back_in_one_batch_rests_afterwards() -> None:
    driver = separated(1, 1, wait_for=3)
    driver.now += 60.0
    events = (
        TimerFired("j"),
        OperatorCommand("j", JobAction.PAUSE),
        make_client("c0"),
        OperatorCommand("j", JobAction.RESUME),
    )
    assert len(commands_of(driver.do(*events), Assign)) == 0
    assert driver.states() == {}
    assert driver.key == ("j", 1, 2)
    seed = 0
    while True:  # until c0 is not among the two that are drawn
        driver.rng = np.random.default_rng(seed)
        if "c0" not in assigned(driver.do(make_client("d0"), make_client("d1"), stored=False)):
            break
        seed += 1
    driver.rng = np.random.default_rng(seed)
    assert "c0" not in assigned(driver.check_in("d0", "d1"))
    driver.play_round()
    assert (driver.key.round, driver.coordinator.room.num_resting("j")) == (2, 1)


def test_a_job_that_starves_gives_a_reason() -> None:
    driver = separated(3, 4)
    driver.play_round()
    driver.play_round()
    driver.check_in("c0", "c1", "c2", "c3")
    driver.wait(60)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert driver.job.reason == (
        "round 3 attempt 1 was abandoned: 0 of at least 1 needed clients were available for selection; "
        "4 more must rest (selection.min_separation = 3, for which 8 eligible clients are needed); retrying"
    )


def test_a_client_that_rests_is_told_to_come_back_when_it_may_be_over() -> None:
    driver = separated(4, 4)
    driver.now += 8.0
    driver.play_round()
    assert driver.key.round == 2
    rests = idle(driver, 4)
    resting = next(name for name in rests if name not in driver.attempt.assignments)
    refusal = driver.leave_after_check_in(resting)
    # A round took 8 s, and it may be drawn in round 6, four rounds after the one that runs.
    assert (refusal.reason, refusal.retry) == (Reason.NOT_SELECTED, RetryWindow(16.0, 32.0))
    assert driver.leave_after_check_in("new").retry == RetryWindow(0.0, 0.5)


def test_rests_end_early_rather_than_late() -> None:
    assert pacing.after_rest(RetryWindow(5.0, 9.0), 0.0) == RetryWindow(5.0, 9.0)
    assert pacing.after_rest(RetryWindow(0.0, 0.5), 1e9) == RetryWindow(1800.0, 3600.0)
    spec = make_spec(deadlines={"training_s": 50.0})
    assert [pacing.round_s(spec.deadlines, durations) for durations in ((), (3.0, 7.0), (70.0,))] == [50.0, 7.0, 50.0]


def test_evaluations_ask_no_client_to_rest() -> None:
    clients = {"evaluator": EVALUATOR, "goal": 2}
    spec = make_spec(2, 3, selection={"min_separation": 1}, evaluation={"clients": clients})
    driver = Driver(make_job(spec=spec)).start(2)
    driver.play_round()
    assert set(assigned(driver.check_in("c0", "c1"))) == {"c0", "c1"}
    driver.report("c0", "c1")
    assert driver.key.round == 2
    assert assigned(driver.check_in("c0", "c1", "d0", "d1")) == ["d0", "d1"]
    driver.play_round()
    # It has evaluated since, and still rests from training.
    assert driver.leave_after_check_in("d0").retry == RetryWindow(0.0, 0.5)  # it may evaluate at any time


def test_a_job_that_ends_forgets_its_clients() -> None:
    driver = separated(1, 4, rounds=2)
    assert list(driver.coordinator.histories) == ["j"]
    driver.play_round()
    driver.play_round()
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.coordinator.histories == {}
    assert Driver().start(2).coordinator.histories == {}


def test_a_paused_job_begins_anew_with_the_clients_that_wait_then() -> None:
    driver = separated(1, 4)
    driver.operate(JobAction.PAUSE)
    driver.check_in("c0", "c1", "c2", "c3")
    assert driver.operate(JobAction.RESUME).accepted
    assert len(driver.attempt.assignments) == 2
    assert driver.key == ("j", 1, 2)


# --- trials of each client ---


def test_trials_are_made_when_the_time_for_selection_is_over() -> None:
    spec = make_spec(50, selection={"sampling": {"policy": "poisson", "rate": 0.5}, "min_fraction": 0.2})
    driver = Driver(make_job(spec=spec), seed=3).start(100)
    assert driver.attempt.phase is AttemptPhase.SELECTING
    driver.wait(60)
    assert 35 < len(driver.attempt.assignments) < 65
    assert len(driver.coordinator.room.clients) == 100 - len(driver.attempt.assignments)


def test_trials_are_made_when_enough_wait() -> None:
    sizes: Counter[int] = Counter()
    for seed in range(20):
        sampling = {"policy": "poisson", "rate": 0.25}
        spec = make_spec(2, selection={"sampling": sampling, "wait_for": 40, "min_fraction": 0.1})
        driver = Driver(make_job(spec=spec), seed=seed).start(39)
        assert driver.attempt.phase is AttemptPhase.SELECTING
        driver.check_in("c39")
        sizes[len(driver.attempt.assignments)] += 1
    assert len(sizes) > 3  # neither the goal nor the target decides


def test_trials_that_too_few_pass_are_made_again_by_the_next_attempt() -> None:
    sampling = {"policy": "poisson", "rate": 0.001}
    driver = Driver(make_job(spec=make_spec(2, selection={"sampling": sampling, "wait_for": 10}))).start(10)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert "0 of at least 1 needed clients" in driver.job.reason
    assert len(driver.coordinator.room.clients) == 10


# --- how an attempt closes ---


def test_an_attempt_may_wait_for_everybody_though_its_goal_is_reached() -> None:
    driver = Driver(make_job(spec=make_spec(2, selection={"close": "deadline", "over_selection": 2.0}))).start(4)
    driver.report("c0", "c1", "c2")
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    (commit,) = commands_of(driver.report("c3"), Commit)
    assert commit.num_updates == 4


def test_such_an_attempt_ends_at_the_deadline() -> None:
    driver = Driver(make_job(spec=make_spec(2, selection={"close": "deadline", "over_selection": 2.0}))).start(4)
    driver.report("c0", "c1", "c2")
    driver.wait(99.9)
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    driver.wait(0.1)
    assert driver.counts() == {"LATE": 1, "REPORTED": 3}
    assert driver.attempt.phase is AttemptPhase.COMMITTING
