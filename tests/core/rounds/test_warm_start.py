"""A job with `[warm_start]`: the server trains before round 1, in an attempt without a cohort."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.rounds import AttemptKey, Proposal
from fedplat.rounds.commands import Abandon, RunWarmStart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated, JobAction, OperatorCommand
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus
from support.rounds.driver import Driver, make_aggregated, make_job, make_spec

TABLE = {"trainer": "public", "batch_size": 8, "learning_rate": 0.1}
FIRST = AttemptKey("j", 0, 1)


def ordered(*proposals: Proposal) -> list[RunWarmStart]:
    return [each for proposal in proposals for each in proposal.commands if isinstance(each, RunWarmStart)]


def make(**sections: Any) -> Driver:
    return Driver(make_job(spec=make_spec(warm_start=TABLE, **sections)))


def orders(driver: Driver, action: JobAction = JobAction.START) -> list[RunWarmStart]:
    """What an operator's word makes the server do."""
    return ordered(driver.do(OperatorCommand("j", action)))


def test_it_comes_before_round_1_and_has_a_version_of_its_own() -> None:
    driver = make()
    driver.check_in("c0", "c1")
    assert orders(driver) == [RunWarmStart(FIRST, 0)]
    assert (driver.attempt.kind, driver.attempt.phase) == (AttemptKind.WARM_START, AttemptPhase.COMMITTING)
    assert driver.coordinator.num_busy == 0
    proposal = driver.do(AttemptAggregated(FIRST, make_aggregated(driver.job).version, {"loss": 0.5}))
    assert [(row.entity, row.from_state, row.to_state) for row in proposal.changes[0].history] == [
        ("attempt", "COMMITTING", "COMMITTED"),
        ("version", "0", "1"),
    ]
    assert (driver.job.round, driver.job.latest.version, driver.job.latest.is_aggregate) == (0, 1, False)
    assert (driver.key, driver.attempt.base_version, driver.states()) == (
        AttemptKey("j", 1, 1),
        1,
        {"c0": "TRAINING", "c1": "TRAINING"},
    )
    driver.play_round()
    driver.check_in("c0", "c1")
    driver.play_round()
    assert (driver.job.status, driver.job.round, driver.job.latest.version) == (JobStatus.COMPLETED, 2, 3)


def test_one_that_fails_is_tried_again_and_at_last_fails_the_job() -> None:
    driver = make(retry={"base_s": 2.0, "max_attempts": 2})
    orders(driver)
    driver.do(AggregationFailed(FIRST, "the trainer raised ValueError: no"))
    assert driver.job.reason == ("the warm start attempt 1 was abandoned: the trainer raised ValueError: no; retrying")
    proposals = driver.wait(10.0)
    second = AttemptKey("j", 0, 2)
    assert ordered(*proposals) == [RunWarmStart(second, 0)]
    driver.do(AggregationFailed(second, "no"))
    assert (driver.job.status, driver.job.reason) == (
        JobStatus.FAILED,
        "the warm start failed 2 times; last failure: no",
    )


@pytest.mark.parametrize("action", [JobAction.PAUSE, JobAction.CANCEL])
def test_operators_stop_it_at_once(action: JobAction) -> None:
    driver = make()
    orders(driver)
    proposal = driver.do(OperatorCommand("j", action))
    assert [command for command in proposal.commands if isinstance(command, Abandon)] == [Abandon(FIRST)]
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert not driver.verdict(make_aggregated(driver.job)).accepted, "it is late"
    if action is JobAction.PAUSE:
        assert orders(driver, JobAction.RESUME) == [RunWarmStart(AttemptKey("j", 0, 2), 0)]


@pytest.mark.parametrize("durability", ["spool", "memory"])
def test_a_server_that_is_started_again_goes_on_with_it(durability: str) -> None:
    driver = make(durability=durability)
    orders(driver)
    assert ordered(driver.crash(down_s=1000.0)) == [RunWarmStart(FIRST, 0)]
    driver.commit()
    assert driver.job.latest.version == 1
    assert ordered(driver.crash()) == []


def test_no_client_evaluates_what_it_made() -> None:
    driver = make(evaluation={"clients": {"evaluator": "digits-eval", "goal": 1, "timeout_s": 20.0}})
    orders(driver)
    driver.commit()
    assert (driver.attempt.kind, driver.key) == (AttemptKind.TRAIN, AttemptKey("j", 1, 1))


def test_in_a_job_with_a_buffer() -> None:
    driver = make(mode={"kind": "buffered", "concurrency": 2, "max_staleness": 1})
    orders(driver)
    driver.commit()
    driver.check_in("c0", "c1")
    driver.play_round()
    assert (driver.job.round, driver.job.latest.version) == (1, 2)
