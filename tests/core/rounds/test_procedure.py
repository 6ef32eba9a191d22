"""A job with a procedure: the same sites in each step, all of their replies, and a pause while one is lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fedplat.procedures.contract import FEATURE
from fedplat.rounds.commands import Commit
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    AttemptAggregated,
    JobAction,
    OperatorCommand,
    RollbackOrdered,
    ServerRestarted,
)
from fedplat.rounds.protocols.base import training_of
from fedplat.rounds.protocols.procedure import ProcedureState
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from fedplat.secure_aggregation.setup import EXACT_FEATURE
from support.rounds.driver import Driver, assigned, commands_of, make_aggregated, make_client, make_job, make_spec

MEANS = {"kind": "means", "columns": {"age": {"low": 0, "high": 120, "resolution": 1}}}
SITES = ("a", "b", "c")
FEATURES = frozenset({FEATURE, EXACT_FEATURE})


def make(rounds: int = 3, **sections: Any) -> Driver:
    selection = {"goal": 3, "over_selection": 1.0, "min_fraction": 1.0}
    fields = {"procedure": MEANS, "model": {}, "selection": selection, "retry": {"base_s": 1.0}}
    spec = make_spec(3, rounds, **fields, **sections)
    driver = Driver(make_job(spec=spec))
    driver.do(OperatorCommand("j", JobAction.START))
    return driver


def arrive(driver: Driver, *sites: str) -> list[str]:
    return assigned(driver.do(*(make_client(site, features=FEATURES) for site in sites)))


def finish_step(driver: Driver, cohort: tuple[str, ...] = SITES) -> None:
    """The procedure has asked again; without a cohort it has a result."""
    driver.do(AttemptAggregated(driver.key, make_aggregated(driver.job).version, {}, cohort))


def test_the_sites_of_the_first_step_answer_all_others() -> None:
    driver = make()
    assert arrive(driver, "a", "b") == []
    assert sorted(arrive(driver, "c")) == [*SITES]
    arrive(driver, "d", "e", "f")
    driver.report("a", "b")
    assert driver.attempt.phase is AttemptPhase.COLLECTING, "a step needs all replies"
    assert [each.num_updates for each in commands_of(driver.report("c"), Commit)] == [3]
    finish_step(driver)
    assert driver.key.round == 2
    assert arrive(driver, "a", "b") == []
    assert sorted(arrive(driver, "c")) == [*SITES], "others wait, too, and are not drawn"
    driver.report(*SITES)
    finish_step(driver, ())
    assert (driver.job.status, driver.job.round) == (JobStatus.COMPLETED, 2)


def test_a_lost_site_pauses_the_job_with_its_name_and_resuming_asks_for_it_again() -> None:
    driver = make()
    arrive(driver, *SITES)
    driver.report(*SITES)
    finish_step(driver)
    arrive(driver, "a", "c", "d")
    driver.wait(60.0)
    assert driver.job.status is JobStatus.PAUSED
    assert driver.job.reason == (
        "step 2 needs all 3 sites of the first step, and 1 did not come within deadlines.selection_s = 60 s: b; resume "
        "the job when they are back, or submit a new job for the others"
    )
    driver.do(OperatorCommand("j", JobAction.RESUME))
    assert sorted(arrive(driver, *SITES)) == [*SITES]


def test_a_site_that_leaves_within_a_step_is_asked_again_from_the_same_message() -> None:
    driver = make()
    arrive(driver, *SITES)
    driver.report("a", "b")
    driver.wait(100.0)  # the training timeout of c
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    driver.wait(2.0)
    assert (driver.key.round, driver.key.number, driver.attempt.base_version) == (1, 2, 0)
    assert sorted(arrive(driver, *SITES, "d")) == [*SITES]


@pytest.mark.parametrize("reason", [Reason.TRAINER_ERROR, Reason.UNSAFE_AGGREGATION])
def test_a_site_that_cannot_answer_pauses_the_job_at_once(reason: Reason) -> None:
    driver = make()
    arrive(driver, *SITES)
    driver.report("a")
    driver.do(AssignmentFailed(driver.key, "b", reason, "the table has no column 'age'"))
    assert driver.job.status is JobStatus.PAUSED
    assert driver.job.reason == (
        f"step 1 failed: client b: {reason}: the table has no column 'age'; remove the cause and resume the job, or "
        "cancel it"
    )


def test_under_masks_a_site_that_cannot_answer_pauses_the_job_and_a_late_one_does_not() -> None:
    driver = make(secure_aggregation={})
    assert sorted(arrive(driver, *SITES)) == [*SITES]
    assert (driver.attempt.phase, driver.attempt.minimum) == (AttemptPhase.ADVERTISING, 3)
    driver.wait(100.0)
    assert (driver.attempt.phase, driver.job.status) == (AttemptPhase.ABANDONED, JobStatus.RUNNING)
    driver.wait(2.0)
    assert sorted(arrive(driver, *SITES, "d")) == [*SITES]
    driver.do(AssignmentFailed(driver.key, "b", Reason.TRAINER_ERROR, "the table has no column 'age'"))
    driver.wait(100.0)
    assert driver.job.status is JobStatus.PAUSED
    assert "step 1 failed: client b: TRAINER_ERROR: the table has no column 'age'; remove" in driver.job.reason


def test_a_failed_sum_is_tried_again_with_the_same_sites() -> None:
    driver = make()
    arrive(driver, *SITES)
    driver.report(*SITES)
    driver.do(AggregationFailed(driver.key, "the disk is full"))
    driver.wait(2.0)
    assert sorted(arrive(driver, "d", *SITES)) == [*SITES]


def test_a_procedure_that_needs_more_steps_than_rounds_fails() -> None:
    driver = make(rounds=1)
    arrive(driver, *SITES)
    driver.report(*SITES)
    finish_step(driver)
    assert driver.job.status is JobStatus.FAILED
    assert driver.job.reason == "the procedure has no result after rounds = 1 steps; submit it with more"


def test_the_sites_are_stored_and_no_version_is_restored() -> None:
    driver = make()
    assert training_of(driver.job).write_state(driver.job) is None
    arrive(driver, *SITES)
    driver.report(*SITES)
    finish_step(driver)
    protocol = training_of(driver.job)
    stored = protocol.write_state(driver.job)
    read = protocol.read_state(msgspec.json.decode(msgspec.json.encode(stored)), driver.job.spec)
    assert read == driver.job.protocol == ProcedureState(driver.job.protocol.cohort)  # type: ignore[attr-defined]
    driver.do(ServerRestarted("j"))
    assert sorted(arrive(driver, *SITES, "d")) == [*SITES]
    driver.operate(JobAction.PAUSE)
    assert "cannot roll back a procedure" in driver.verdict(RollbackOrdered("j", driver.job.latest)).text


def test_a_client_of_an_older_release_is_not_asked() -> None:
    driver = make()
    driver.check_in(*SITES)
    driver.wait(60.0)
    assert "3 more do not have procedure.1 (upgrade the client)" in driver.job.reason
