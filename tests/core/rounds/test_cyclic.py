"""Cyclic jobs: the model goes from client to client, and each has one turn in a cycle."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fedplat.errors import JobFileError
from fedplat.rounds.protocols.cyclic import turns_of
from fedplat.rounds.states import AttemptPhase, JobStatus
from support.rounds.driver import Driver, assigned, make_job, make_spec, names


def cyclic(*clients: str, size: int = 3, rounds: int = 6) -> Driver:
    spec = make_spec(goal=1, rounds=rounds, mode={"kind": "cyclic", "clients": size})
    driver = Driver(make_job(spec=spec))
    driver.start()
    driver.check_in(*clients)
    return driver


def take_turn(driver: Driver) -> str:
    """The client of this turn trains, and the version that it makes is committed."""
    (client_id,) = (each.client_id for each in driver.attempt.busy)
    driver.report(client_id)
    driver.commit()
    driver.check_in(client_id)
    return client_id


def test_each_client_has_one_turn_in_a_cycle_and_the_model_passes_on() -> None:
    driver = cyclic("c0", "c1", "c2")
    turns = list[str]()
    for version in range(6):
        assert driver.attempt.base_version == version
        assert driver.attempt.num_busy == 1
        turns.append(take_turn(driver))
    assert sorted(turns[:3]) == sorted(turns[3:]) == ["c0", "c1", "c2"]
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.job.latest.version == 6


def test_a_client_that_fails_is_followed_by_another_and_keeps_its_turn() -> None:
    driver = cyclic("c0", size=2)
    driver.give_up("c0")
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert turns_of(driver.job) == ()
    driver.wait(60.0)
    assert assigned(driver.check_in("c1")) == ["c1"]
    assert take_turn(driver) == "c1"
    assert assigned(driver.check_in("c0")) == ["c0"]


def test_a_cycle_ends_without_those_that_do_not_come() -> None:
    driver = cyclic("c0")
    take_turn(driver)
    assert driver.attempt.phase is AttemptPhase.SELECTING
    driver.wait(30.0)
    driver.check_in("c0")
    assert driver.attempt.phase is AttemptPhase.SELECTING
    (proposal,) = driver.wait(30.0)
    assert names(proposal) == ["Assign"]
    assert turns_of(driver.job) == ()


def test_a_restart_keeps_the_cycle_and_the_turn() -> None:
    driver = cyclic("c0", "c1", "c2")
    first = take_turn(driver)
    (second,) = (each.client_id for each in driver.attempt.busy)
    assert driver.ledger.jobs["j"].protocol == (first,)
    driver.crash()
    assert turns_of(driver.job) == (first,)
    assert take_turn(driver) == second
    (third,) = {"c0", "c1", "c2"} - {first, second}
    assert assigned(driver.check_in(first, second, third)) == [third]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"goal": 2}, 'selection.goal = 2: with mode.kind = "cyclic" a round is the turn of one client; expected goal'),
        ({"min_separation": 1}, "selection.min_separation = 1: the cycle decides when a client trains again"),
        ({"sampling": {"policy": "weighted"}}, 'selection.sampling.policy = "weighted": each client has'),
    ],
)
def test_options_of_whole_cohorts_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobFileError, match=re.escape(problem)):
        make_spec(mode={"kind": "cyclic", "clients": 3}, selection={"goal": 1} | changes)
