"""Clients whose owner does not allow a job: they are asked once in a session, and cost the others no training."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.rounds.commands import Refuse
from fedplat.rounds.events import AssignmentFailed, ClientLeft, JobAction
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from support.rounds.driver import Driver, collecting, commands_of, make_client

SESSION = 7


def start(num_clients: int = 3, reason: Reason = Reason.UNSAFE_AGGREGATION, **sections: Any) -> Driver:
    """Play a round of all clients, of which c0 declines; it waits again, and the others too."""
    sections = {"rounds": 5, "selection": {"min_fraction": 0.6}} | sections
    driver = collecting(num_clients, num_clients, **sections)
    driver.do(AssignmentFailed(driver.key, "c0", reason, "the owner requires a larger group", SESSION))
    driver.do(make_client("c0", session=SESSION))
    return driver


def report(driver: Driver, *client_ids: str) -> None:
    driver.report(*client_ids)
    driver.commit()
    driver.check_in(*client_ids)


@pytest.mark.parametrize("reason", [Reason.UNSAFE_AGGREGATION, Reason.PRIVACY_LIMIT])
def test_the_next_rounds_do_not_ask_a_client_that_has_declined_and_do_not_wait_for_it(reason: Reason) -> None:
    driver = start(reason=reason)
    for round_ in (1, 2, 3):
        report(driver, "c1", "c2")
        assert (driver.job.round, driver.attempt.phase) == (round_, AttemptPhase.COLLECTING)
        assert driver.attempt.assignments.keys() == {"c1", "c2"}
    assert driver.now < 1.0
    (refusal,) = commands_of(driver.do(ClientLeft("c0")), Refuse)
    assert refusal.reason is Reason.NOT_ELIGIBLE


def test_an_error_of_a_trainer_declines_nothing() -> None:
    driver = start(reason=Reason.TRAINER_ERROR)
    report(driver, "c1", "c2")
    assert "c0" in driver.attempt.assignments


def test_a_client_that_was_restarted_is_asked_again() -> None:
    driver = start()
    driver.do(make_client("c0", session=SESSION + 1))
    report(driver, "c1", "c2")
    assert driver.attempt.assignments.keys() == {"c0", "c1", "c2"}


def test_a_job_that_was_paused_and_resumed_asks_again() -> None:
    driver = start()
    driver.operate(JobAction.PAUSE)
    driver.check_in("c1", "c2")
    driver.operate(JobAction.RESUME)
    assert driver.attempt.assignments.keys() == {"c0", "c1", "c2"}


def test_a_job_that_needs_clients_that_have_declined_says_so_and_is_paused() -> None:
    driver = start(2, selection={"min_fraction": 1.0}, retry={"base_s": 0.01, "max_s": 0.01, "pause_after": 3})
    driver.check_in("c1")
    num_asked = 1
    while driver.job.status is JobStatus.RUNNING:
        driver.wait(70.0)
        num_asked += "c1" in driver.attempt.assignments
    assert (driver.job.status, num_asked, driver.attempt.key.number) == (JobStatus.PAUSED, 1, 3)
    assert "1 of at least 2 needed clients were available for selection; 1 more have refused the job" in (
        driver.job.reason
    )
