"""A rollback: the older version becomes a new one, and rounds continue from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from fedplat.rounds import ModelVersion, Verdict
from fedplat.rounds.events import JobAction, RollbackOrdered
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from support.rounds import phases
from support.rounds.buffers import buffered
from support.rounds.driver import Driver, aborted, make_job, make_spec, names

STATES = ("", "state 1", "state 2")


def version(number: int, **fields: Any) -> ModelVersion:
    return ModelVersion(
        version=number,
        round=number,
        attempt=1,
        digest=f"version {number}",
        size_bytes=4,
        state_digest=STATES[number],
        num_updates=2,
        **fields,
    )


def after_two_rounds(**sections: Any) -> Driver:
    """A job that works at round 3."""
    driver = Driver(make_job(spec=make_spec(rounds=5, **sections))).start(2)
    for number in (1, 2):
        driver.report(*driver.attempt.assignments)
        made = driver.aggregated()
        made = dataclasses.replace(made, version=version(number, total_weight=made.version.total_weight))
        driver.do(made)
        driver.check_in("c0", "c1")
    assert driver.key == ("j", 3, 1)
    return driver


def roll_back(driver: Driver, number: int, **fields: Any) -> Any:
    (found,) = (each for each in driver.ledger.versions["j"] if each.version == number)
    return driver.do(RollbackOrdered("j", structs.replace(found, **fields)))


def test_the_older_version_is_committed_again_and_the_open_attempt_is_abandoned() -> None:
    driver = after_two_rounds()
    late = driver.aggregated()
    proposal = roll_back(driver, 1)
    assert proposal.verdicts[0].accepted
    expected = ModelVersion(3, 0, 0, "version 1", 4, state_digest="state 1", restored_from=1)
    assert driver.job.latest == driver.ledger.versions["j"][-1] == expected
    assert aborted(proposal) == {"c0": "ATTEMPT_ABANDONED", "c1": "ATTEMPT_ABANDONED"}
    assert "Abandon" in names(proposal)
    (row,) = (row for change in proposal.changes for row in change.history if row.entity == "version")
    assert (row.from_state, row.to_state, row.reason) == ("2", "3", "rolled back to version 1")
    reasons = [row.reason for row in driver.ledger.history["j"] if row.to_state == "ABANDONED"]
    assert reasons == ["the job was rolled back to version 1"]
    assert driver.verdict(late) == Verdict(Reason.STALE)
    # The next attempt is at the same round, and begins with the older model.
    assert (driver.key, driver.attempt.base_version, driver.job.round) == (("j", 3, 2), 3, 2)
    driver.check_in("c0", "c1")
    driver.play_round()
    assert (driver.job.round, driver.job.latest.version, driver.job.latest.restored_from) == (3, 4, None)


def test_a_state_that_is_not_kept_is_begun_anew() -> None:
    driver = after_two_rounds()
    roll_back(driver, 1, state_digest="")
    assert (driver.job.latest.digest, driver.job.latest.state_digest) == ("version 1", "")


def test_a_private_job_goes_on_with_its_latest_state() -> None:
    """A step back in a tree of noise would use the noise of its nodes twice."""
    privacy = {"participation": "fixed", "delta": 1e-6, "noise_multiplier": 1.0}
    updates = {"clip_norm": 1.0, "weighting": "uniform"}
    driver = after_two_rounds(privacy=privacy, updates=updates, selection={"close": "deadline"})
    roll_back(driver, 1)
    assert (driver.job.latest.digest, driver.job.latest.state_digest) == ("version 1", "state 2")
    assert not driver.job.latest.is_aggregate


def test_asked_twice_in_a_row_it_changes_nothing() -> None:
    driver = after_two_rounds()
    roll_back(driver, 1)
    again = roll_back(driver, 1)
    assert again.verdicts[0].accepted
    assert (again.changes, driver.job.latest.version) == ([], 3)
    roll_back(driver, 3 - 1)
    assert (driver.job.latest.version, driver.job.latest.digest) == (4, "version 2")


def test_a_paused_job_stays_paused() -> None:
    driver = after_two_rounds()
    driver.operate(JobAction.PAUSE)
    roll_back(driver, 0)
    assert (driver.job.status, driver.job.reason) == (JobStatus.PAUSED, "the job was paused")
    assert (driver.job.latest.version, driver.job.latest.digest, driver.job.round) == (3, "initial", 2)
    driver.crash()
    assert driver.job.latest.restored_from == 0
    driver.operate(JobAction.RESUME)
    assert (driver.key, driver.attempt.base_version) == (("j", 3, 2), 3)


def test_a_pause_that_commits_is_cut_short() -> None:
    driver = after_two_rounds()
    driver.report("c0", "c1")
    driver.operate(JobAction.PAUSE)
    late = driver.aggregated()
    assert driver.attempt.phase is AttemptPhase.COMMITTING
    roll_back(driver, 1)
    assert (driver.attempt.phase, driver.job.open_attempt) == (AttemptPhase.ABANDONED, None)
    assert driver.verdict(late) == Verdict(Reason.STALE)


def test_failures_are_forgotten() -> None:
    driver = after_two_rounds()
    driver.give_up("c0", "c1")
    assert driver.job.failures == 1
    roll_back(driver, 1)
    assert (driver.job.failures, driver.job.resume_at) == (0, None)
    assert driver.attempt.phase is AttemptPhase.SELECTING


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (phases.drafted, "cannot roll back a job that is DRAFT; it has no rounds yet: start it"),
        (
            phases.completed,
            "cannot roll back a job that is COMPLETED; it has ended for good; export version 0 and submit a new job "
            "that begins with it",
        ),
        (phases.selecting, "cannot roll back to version 0: expected an older version than the latest, 0"),
    ],
)
def test_an_operator_is_told_what_is_possible(phase: Callable[[], Driver], text: str) -> None:
    driver = phase()
    proposal = roll_back(driver, 0)
    assert (proposal.verdicts, proposal.changes) == ([Verdict(None, text)], [])


def test_clients_that_work_for_a_buffer_stop() -> None:
    """Carried clients train from a model that is no longer wanted."""
    driver = buffered(3, concurrency=3, goal=1)
    driver.report("c0")
    driver.commit()
    assert driver.job.num_busy == 2
    proposal = roll_back(driver, 0)
    assert aborted(proposal) == {"c1": "ATTEMPT_ABANDONED", "c2": "ATTEMPT_ABANDONED"}
    assert driver.job.num_busy == 0
    driver.check_in("c1")
    assert [each.base_version for each in driver.attempt.busy] == [2]
