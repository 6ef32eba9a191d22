"""Attempts that fail again and again: the reason of their clients is stated, and the job is paused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from fedplat.rounds import pacing
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    JobAction,
    OperatorCommand,
    UpdateRejected,
)
from fedplat.rounds.records import FutileAttempts
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from fedplat.texts import MAX_TEXT_BYTES
from support.rounds.driver import Driver, collecting


def fail_all(driver: Driver, reason: Reason, text: str = "") -> None:
    """Let both clients of an attempt fail, and begin the next one if the job still runs."""
    for client in ("c0", "c1"):
        driver.do(AssignmentFailed(driver.key, client, reason, text))
    begin_next(driver)


def begin_next(driver: Driver) -> None:
    driver.check_in("c0", "c1")
    if driver.job.resume_at is not None and driver.job.status is JobStatus.RUNNING:
        driver.wait(driver.job.resume_at - driver.now)


def start(**retry: Any) -> Driver:
    return collecting(2, retry={"base_s": 0.01, "max_s": 0.01, **retry})


def test_a_job_whose_clients_always_fail_is_paused_with_the_reason() -> None:
    driver = start()
    for _ in range(9):
        fail_all(driver, Reason.TRAINER_ERROR, "KeyError: 'epochs'")
    assert (driver.job.status, driver.attempt.phase) == (JobStatus.RUNNING, AttemptPhase.COLLECTING)
    fail_all(driver, Reason.TRAINER_ERROR, "KeyError: 'epochs'")
    assert driver.job.status is JobStatus.PAUSED
    assert driver.job.reason == (
        "round 1 failed 10 times in a row for reasons that another try does not change; last failure: 0 of at least "
        "1 needed clients reported (2 failed); client c0: TRAINER_ERROR: KeyError: 'epochs', and 1 more; remove the "
        "cause and resume the job, or cancel it"
    )
    assert driver.timers == {}
    driver.do(OperatorCommand("j", JobAction.RESUME))
    driver.check_in("c0", "c1")
    driver.play_round()
    assert (driver.job.round, driver.job.futile.number, driver.job.status) == (1, 0, JobStatus.RUNNING)


def test_a_long_text_of_a_client_is_shortened_in_the_reason_as_it_is_stored() -> None:
    driver = start()
    fail_all(driver, Reason.TRAINER_ERROR, "é" * 5000)
    assert len(driver.attempt.reason.encode()) < 500 < MAX_TEXT_BYTES


def test_a_rejection_and_a_failure_count_alike_and_the_refused_client_is_named() -> None:
    driver = start(pause_after=2)
    driver.do(UpdateRejected(driver.key, "c0", Reason.REJECTED_NONFINITE))
    driver.give_up("c1")
    begin_next(driver)
    driver.give_up("c1")
    driver.do(UpdateRejected(driver.key, "c0", Reason.REJECTED_NONFINITE))
    assert driver.job.status is JobStatus.PAUSED
    assert "client c0: REJECTED_NONFINITE: the update holds NaN or infinite values" in driver.job.reason


def test_failures_that_pass_by_themselves_do_not_pause_a_job() -> None:
    driver = start(pause_after=2)
    for reason in (Reason.TRANSFER_FAILED, Reason.CLIENT_STOPPED, Reason.KEYS_LOST, Reason.TRANSFER_FAILED):
        fail_all(driver, reason)
    assert (driver.job.status, driver.job.failures, driver.job.futile.number) == (JobStatus.RUNNING, 4, 0)


@pytest.mark.parametrize(
    ("clients", "num_eligible", "gives_up"),
    [
        ({"c0"}, 2, False),  # the job needs one, and c1 may be that one
        ({"c0"}, 1, True),
        ({"c0", "c1"}, 2, True),
        ({"c0", "c1"}, 9, False),  # two who work together
        ({f"c{number}" for number in range(20)}, 1000, True),
        (set[str](), 9, True),  # the aggregation failed
    ],
)
def test_few_clients_do_not_stop_a_job_that_can_do_without_them(
    clients: set[str], num_eligible: int, gives_up: bool
) -> None:
    job = start(pause_after=3).job
    for number in (2, 3):
        tried = structs.replace(job, futile=FutileAttempts(number, frozenset(clients), num_eligible))
        assert pacing.gives_up(tried) is (gives_up and number == 3)


def test_missed_deadlines_do_not_pause_a_job_since_a_network_may_be_the_cause() -> None:
    driver = start(pause_after=2)
    for _ in range(3):
        driver.wait(100.0)  # `training_s`
        begin_next(driver)
    assert (driver.job.status, driver.job.failures, driver.job.futile.number) == (JobStatus.RUNNING, 3, 0)


def test_a_lasting_failure_of_one_client_counts_only_if_the_attempt_failed_because_of_it() -> None:
    driver = collecting(4, goal=4, selection={"min_fraction": 0.75}, retry={"base_s": 0.01, "pause_after": 1})
    driver.do(AssignmentFailed(driver.key, "c0", Reason.TRAINER_ERROR))
    for client in ("c1", "c2"):
        driver.upload(client)
    driver.report("c3")
    driver.wait(30.0)  # `upload_s`
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert driver.job.status is JobStatus.RUNNING


@pytest.mark.parametrize(("is_lasting", "status"), [(True, JobStatus.PAUSED), (False, JobStatus.RUNNING)])
def test_an_aggregation_that_will_fail_again_pauses_the_job_and_a_full_disk_does_not(
    is_lasting: bool, status: JobStatus
) -> None:
    driver = start(pause_after=2)
    for _ in range(2):
        driver.do(AggregationFailed(driver.key, "no room", is_lasting=is_lasting))
        begin_next(driver)
    assert driver.job.status is status


def test_attempts_without_clients_never_pause_a_job() -> None:
    driver = Driver().start(0)
    for _ in range(12):
        driver.wait(400.0)
    assert driver.job.failures > 10
    assert driver.job.status is JobStatus.RUNNING


@pytest.mark.parametrize("retry", [{"pause_after": 0}, {"max_attempts": 99}])
def test_the_rule_is_off_without_a_number_and_with_one_at_which_the_job_fails(retry: dict[str, int]) -> None:
    driver = start(**retry)
    for _ in range(12):
        fail_all(driver, Reason.TRAINER_ERROR)
    assert driver.job.status is JobStatus.RUNNING
