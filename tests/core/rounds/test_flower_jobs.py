"""A job with a Flower app: the app draws the clients, each is assigned when it arrives, and the app ends the job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fedplat.errors import JobFileError
from fedplat.rounds import attempts
from fedplat.rounds.commands import Commit, RunWarmStart
from fedplat.rounds.events import (
    AggregationFailed,
    AttemptAggregated,
    CandidatesDrawn,
    JobAction,
    OperatorCommand,
    RollbackOrdered,
    ServerRestarted,
)
from fedplat.rounds.protocols.flower_app import cohort_of
from fedplat.rounds.states import AttemptPhase, JobStatus
from support.rounds.driver import Driver, assigned, commands_of, make_aggregated, make_job, make_spec

APP = {"app": "digits"}
COHORT = ("c1", "c3", "c5")


def make(cohort: tuple[str, ...] = COHORT, **sections: Any) -> Driver:
    """The app has sent its first messages."""
    spec = make_spec(goal=1, rounds=1000, flower=APP, retry={"base_s": 1.0}, **sections)
    driver = Driver(make_job(spec=spec))
    proposal = driver.do(OperatorCommand("j", JobAction.START))
    assert [each for each in proposal.commands if isinstance(each, RunWarmStart)] == [RunWarmStart(driver.key, 0)]
    advance(driver, cohort)
    return driver


def advance(driver: Driver, cohort: tuple[str, ...]) -> None:
    """The app sends its next messages."""
    version = make_aggregated(driver.job).version
    driver.do(AttemptAggregated(driver.key, version, {"loss": 0.5}, cohort))


def test_only_the_clients_that_the_app_has_drawn_are_assigned() -> None:
    driver = make()
    driver.check_in("c0", "c1", "c2", "c3", "c4", "c5")
    assert driver.states() == {"c1": "TRAINING", "c3": "TRAINING", "c5": "TRAINING"}
    driver.report("c5", "c1")
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    proposal = driver.report("c3")
    assert [command.num_updates for command in commands_of(proposal, Commit)] == [3]
    advance(driver, ("c0", "c2"))
    assert driver.states() == {"c0": "TRAINING", "c2": "TRAINING"}
    assert (driver.key.round, driver.attempt.base_version) == (2, 2)


def test_each_is_assigned_when_it_arrives() -> None:
    driver = make()
    assert assigned(driver.check_in("c3")) == ["c3"]
    driver.report("c3")
    assert driver.attempt.phase is AttemptPhase.COLLECTING, "the others are still expected"
    driver.wait(30.0)
    assert assigned(driver.check_in("c0", "c5")) == ["c5"]
    assert assigned(driver.check_in("c1")) == ["c1"]
    assert commands_of(driver.report("c1", "c5"), Commit)


def test_a_client_that_does_not_arrive_is_not_waited_for_longer_than_selection_s() -> None:
    driver = make()
    driver.check_in("c1", "c3")
    driver.report("c1")
    driver.wait(60.0)
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    assert assigned(driver.check_in("c5")) == [], "its time is over"
    proposal = driver.report("c3")
    assert [command.num_updates for command in commands_of(proposal, Commit)] == [2]


def test_the_end_of_the_selection_closes_an_attempt_that_waits_for_no_one_else() -> None:
    driver = make()
    driver.check_in("c1", "c3")
    driver.report("c1", "c3")
    proposals = driver.wait(60.0)
    assert [command.num_updates for each in proposals for command in commands_of(each, Commit)] == [2]


@pytest.mark.parametrize(("min_fraction", "phase"), [(0.5, AttemptPhase.ABANDONED), (0.3, AttemptPhase.COMMITTING)])
def test_too_few_clients_abandon_the_attempt(min_fraction: float, phase: AttemptPhase) -> None:
    driver = make(selection={"min_fraction": min_fraction})
    driver.check_in("c1")
    driver.report("c1")
    before = driver.key
    driver.wait(60.0)
    if phase is AttemptPhase.COMMITTING:
        assert driver.attempt.phase is phase
        return
    assert "1 of at least 2 needed clients" in driver.job.reason
    driver.wait(10.0)
    assert driver.key == (before.job_id, before.round, before.number + 1)
    assert assigned(driver.check_in(*COHORT)) == [*COHORT], "the same clients are drawn again"


def test_no_client_abandons_the_attempt() -> None:
    driver = make()
    driver.check_in("c0")
    driver.wait(60.0)
    assert "0 of at least" in driver.job.reason


def test_over_selection_closes_the_attempt_early() -> None:
    driver = make(cohort=("c0", "c1", "c2", "c3"), selection={"over_selection": 2.0})
    driver.check_in("c0", "c1", "c2")
    driver.report("c0")
    proposal = driver.report("c2")
    assert [command.num_updates for command in commands_of(proposal, Commit)] == [2]


def test_a_failed_client_counts_as_arrived() -> None:
    driver = make()
    driver.check_in(*COHORT)
    driver.give_up("c1")
    proposal = driver.report("c3", "c5")
    assert [command.num_updates for command in commands_of(proposal, Commit)] == [2]


def test_a_restart_waits_again_for_those_that_have_not_arrived() -> None:
    driver = make()
    driver.check_in("c1")
    driver.report("c1")
    driver.crash()
    driver.do(ServerRestarted("j"))
    assert cohort_of(driver.job) == COHORT
    driver.check_in("c3", "c5")
    assert [command.num_updates for command in commands_of(driver.report("c3", "c5"), Commit)] == [3]


def test_the_app_ends_the_job() -> None:
    driver = make()
    driver.check_in(*COHORT)
    driver.report(*COHORT)
    advance(driver, ())
    assert (driver.job.status, driver.job.round, driver.job.latest.version) == (JobStatus.COMPLETED, 1, 2)


def test_a_client_whose_reply_the_app_cannot_use_is_rejected_by_name() -> None:
    driver = make()
    driver.check_in(*COHORT)
    driver.report(*COHORT)
    aggregated = make_aggregated(driver.job).version
    weight = aggregated.total_weight - driver.attempt.assignments["c3"].weight
    version = msgspec.structs.replace(aggregated, num_updates=2, total_weight=weight)
    driver.do(AttemptAggregated(driver.key, version, {}, (), {"c3": "it has other keys", "c9": "unknown"}))
    assert driver.states() == {"c1": "MERGED", "c3": "REJECTED", "c5": "MERGED"}
    assert driver.attempt.assignments["c3"].text == "it has other keys"
    assert (driver.job.status, driver.job.latest.num_updates) == (JobStatus.COMPLETED, 2)


def test_an_app_that_ends_in_a_pause_completes_when_the_job_resumes() -> None:
    driver = make()
    driver.check_in(*COHORT)
    driver.report(*COHORT)
    driver.operate(JobAction.PAUSE)
    advance(driver, ())
    assert driver.job.status is JobStatus.PAUSED
    driver.operate(JobAction.RESUME)
    assert driver.job.status is JobStatus.COMPLETED


def test_a_failing_app_is_tried_again_with_the_same_clients() -> None:
    driver = make(cohort=("c1",))
    driver.check_in("c1")
    driver.report("c1")
    driver.do(AggregationFailed(driver.key, "the ServerApp of digits raised ValueError: no"))
    assert "the ServerApp of digits raised ValueError: no" in driver.job.reason
    driver.wait(10.0)
    assert assigned(driver.check_in("c1")) == ["c1"]


def test_clients_of_the_job_return_soon() -> None:
    driver = make()
    driver.check_in("c0")
    assert driver.leave("c0").retry.max_s <= 60.0


def test_a_rollback_is_refused() -> None:
    driver = make()
    driver.check_in(*COHORT)
    driver.report(*COHORT)
    advance(driver, COHORT)
    driver.operate(JobAction.PAUSE)
    refused = driver.verdict(RollbackOrdered("j", driver.job.latest))
    assert not refused.accepted
    assert "cannot roll back a job with a Flower app" in refused.text


def test_candidates_that_come_too_late_are_not_assigned() -> None:
    driver = make()
    driver.check_in(*COHORT)
    assert not attempts.selects(driver.job)
    with pytest.raises(AssertionError):
        driver.do(CandidatesDrawn("j", ("c0",)))


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"privacy": {"epsilon": 1.0, "delta": 1e-5, "participation": "min_separation"}}, "no guarantee would hold"),
        ({"mode": {"kind": "buffered", "concurrency": 4}}, "mode: the Flower app decides"),
        ({"robust": {"rule": {"name": "median"}, "byzantine": 0}}, "robust: the Flower app decides"),
        ({"aggregation": {"rule": "fedadam"}}, "aggregation: the Flower app decides"),
        ({"selection": {"min_separation": 1}}, "selection: the Flower app draws the clients"),
        ({"flower": {"app": "x", "run_config": {"lr": float("inf")}}}, "flower.run_config.lr = inf"),
    ],
)
def test_tables_for_what_the_app_decides_are_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(JobFileError, match=text):
        make_spec(1, 2, **({"flower": APP} | sections))
