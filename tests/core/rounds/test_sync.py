"""A synchronous round: goal, deadlines, reports and failures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedplat.rounds import Verdict
from fedplat.rounds.commands import Assign, Commit, Fold
from fedplat.rounds.events import (
    AssignmentFailed,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from fedplat.texts import MAX_TEXT_BYTES
from support.rounds.driver import Driver, aborted, collecting, commands_of, names

SIX_OF_TEN = {"goal": 10, "min_fraction": 0.55}  # ceil(5.5) reports are enough


# --- the goal ---


def test_a_job_runs_through_its_rounds() -> None:
    driver = Driver().start(2)
    for version in (1, 2):
        assert driver.attempt.base_version == version - 1
        driver.play_round()
        assert driver.job.latest.version == driver.job.round == version
        driver.check_in("c0", "c1")
    assert driver.job.status is JobStatus.COMPLETED
    assert [v.version for v in driver.ledger.versions["j"]] == [0, 1, 2]
    assert driver.timers == {}


def test_the_goal_closes_the_attempt_and_the_rest_is_surplus() -> None:
    driver = collecting(3, goal=2, selection={"over_selection": 1.5})
    driver.upload("c2")
    assert names(driver.report("c0")) == ["Fold"]
    proposal = driver.report("c1", num_examples=3)
    assert names(proposal) == ["Fold", "Abort", "Commit"]
    assert commands_of(proposal, Fold)[0].contribution.weight == 3
    assert aborted(proposal) == {"c2": "SURPLUS"}
    assert commands_of(proposal, Commit) == [Commit(driver.key, 0, 2)]
    assert proposal.timers == {"j": None}
    assert driver.states() == {"c0": "REPORTED", "c1": "REPORTED", "c2": "SURPLUS"}
    assert driver.coordinator.num_busy == 0
    assert driver.verdict(UpdateReported(driver.key, "c2", "d", 1)) == Verdict(Reason.SURPLUS)
    key = driver.key
    driver.commit()
    found = driver.ledger.attempts[key]
    assert (found.phase, found.ended_at) == (AttemptPhase.COMMITTED, driver.now)
    assert driver.coordinator.find(key, "c0") is None  # the next attempt is now the job's last one


@pytest.mark.parametrize("num_reports", [2, 3])
def test_a_job_that_closes_at_its_deadline_waits_for_all_clients(num_reports: int) -> None:
    driver = collecting(3, goal=2, selection={"over_selection": 1.5, "close": "deadline"})
    driver.report("c0", "c1")
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    if num_reports == 3:
        driver.report("c2")
    else:
        driver.wait(100.0)
    assert (driver.attempt.phase, driver.attempt.num_reported) == (AttemptPhase.COMMITTING, num_reports)


# --- deadlines ---


@pytest.mark.parametrize(("num_reports", "phase"), [(6, AttemptPhase.COMMITTING), (5, AttemptPhase.ABANDONED)])
def test_at_the_deadline_the_minimum_decides(num_reports: int, phase: AttemptPhase) -> None:
    driver = collecting(10, selection=SIX_OF_TEN)
    late = [f"c{i}" for i in range(num_reports, 10)]
    driver.report(*(f"c{i}" for i in range(num_reports)))
    assert driver.wait(99.9) == []
    (proposal,) = driver.wait(0.1)
    assert driver.attempt.phase is phase
    assert aborted(proposal) == dict.fromkeys(late, "TRAIN_TIMEOUT")
    outcome = "REPORTED" if phase is AttemptPhase.COMMITTING else "DROPPED"
    assert driver.counts() == {"LATE": len(late), outcome: num_reports}
    if phase is AttemptPhase.ABANDONED:
        assert driver.attempt.reason == (
            "5 of at least 6 needed clients reported (5 late, 5 reported); client c5: TRAIN_TIMEOUT: the deadline "
            "passed while the client was training, and 4 more"
        )
        assert driver.job.reason == f"round 1 attempt 1 was abandoned: {driver.attempt.reason}; retrying"


@pytest.mark.fault("F15", "F16")
def test_training_and_uploading_have_deadlines_of_their_own() -> None:
    driver = collecting(2)
    driver.wait(90)
    driver.upload("c0")  # 90 of 100 s for training; now 30 s for the upload
    (proposal,) = driver.wait(10)
    assert aborted(proposal) == {"c1": "TRAIN_TIMEOUT"}
    assert driver.states() == {"c0": "UPLOADING", "c1": "LATE"}
    assert driver.wait(19.9) == []
    (proposal,) = driver.wait(0.1)
    assert aborted(proposal) == {"c0": "UPLOAD_TIMEOUT"}
    assert driver.attempt.phase is AttemptPhase.ABANDONED


def test_an_upload_that_is_asked_for_again_gets_no_more_time() -> None:
    driver = collecting(2)
    driver.upload("c0")
    driver.wait(20)
    revision = driver.job.revision
    assert driver.verdict(UploadStarted(driver.key, "c0")).accepted
    assert driver.job.revision == revision
    driver.wait(10)
    assert driver.reasons() == {"c0": "UPLOAD_TIMEOUT", "c1": ""}


@pytest.mark.fault("F16")
def test_a_late_report_is_told_so_and_never_merged() -> None:
    driver = collecting(2)
    driver.report("c0")
    driver.wait(100)
    assert driver.attempt.phase is AttemptPhase.COMMITTING
    for event in (
        UpdateReported(driver.key, "c1", "d", 1),
        UploadStarted(driver.key, "c1"),
        AssignmentFailed(driver.key, "c1", Reason.TRAINER_ERROR),
        UpdateRejected(driver.key, "c1", Reason.REJECTED_SCHEMA),
    ):
        proposal = driver.do(event)
        assert proposal.verdicts == [Verdict(Reason.TRAIN_TIMEOUT)]
        assert proposal.commands == []
        assert proposal.changes == []
    driver.commit()
    assert driver.ledger.folded == {("j", 1, 1): ["c0"]}


def test_a_straggler_may_take_part_again_once_it_is_free() -> None:
    driver = collecting(2)
    driver.report("c0")
    driver.wait(100)
    driver.check_in("c0", "c1")
    driver.commit()
    assert driver.key.round == 2
    assert driver.states() == {"c0": "TRAINING", "c1": "TRAINING"}


@pytest.mark.parametrize("percentile", [50.0, 90.0])
def test_an_adaptive_deadline_is_a_percentile_of_what_assignments_took(percentile: float) -> None:
    adaptive = {"percentile": percentile, "margin": 1.5, "min_s": 2.0, "after": 4}
    driver = collecting(4, goal=4, rounds=9, deadlines={"adaptive": adaptive})
    took = [3.0, 5.0, 11.0, 12.0]
    for client_id, moment in zip(driver.states(), took, strict=True):
        driver.wait(moment - driver.now + driver.attempt.opened_at)
        driver.report(client_id)
    driver.commit()
    assert driver.job.durations == tuple(took)
    expected = float(np.percentile(took, percentile) * 1.5)
    proposal = driver.check_in("a", "b", "c", "d")
    assert [c.training_timeout_s for c in commands_of(proposal, Assign)] == [expected] * 4
    driver.wait(expected)
    assert driver.counts() == {"LATE": 4}
    # No client finished within the learned time: the next attempt gets the whole time.
    driver.check_in("a", "b", "c", "d")
    (proposal,) = driver.wait(1)
    assert [c.training_timeout_s for c in commands_of(proposal, Assign)] == [100.0] * 4


@pytest.mark.parametrize(("took", "expected"), [(0.0, 2.0), (99.0, 100.0)])
def test_an_adaptive_deadline_stays_within_its_bounds(took: float, expected: float) -> None:
    adaptive = {"percentile": 90.0, "margin": 1.5, "min_s": 2.0, "after": 2}
    driver = collecting(2, deadlines={"adaptive": adaptive})
    driver.wait(took)
    driver.play_round()
    (first, second) = commands_of(driver.check_in("a", "b"), Assign)
    assert first.training_timeout_s == second.training_timeout_s == expected


def test_an_adaptive_deadline_waits_for_enough_reports() -> None:
    driver = collecting(2, deadlines={"adaptive": {"after": 3}})
    driver.wait(1)
    driver.play_round()
    (first, _) = commands_of(driver.check_in("a", "b"), Assign)
    assert first.training_timeout_s == 100.0


def test_a_timer_that_fires_too_early_changes_nothing_and_is_set_again() -> None:
    driver = collecting(2)
    proposal = driver.fire()
    assert proposal.changes == []
    assert (proposal.commands, proposal.timers) == ([], {"j": 100.0})
    selecting = Driver().start()
    assert selecting.fire().timers == {"j": 60.0}
    driver.give_up("c0", "c1")
    assert driver.job.resume_at is not None
    assert driver.fire().timers == {"j": driver.job.resume_at}


# --- reports ---


@pytest.mark.fault("F12", "F13")
def test_the_first_report_stands() -> None:
    driver = collecting(2)
    event = UpdateReported(driver.key, "c0", "one", 5, {"loss": 1.0})
    assert driver.verdict(event).accepted
    revision = driver.job.revision
    for again in (event, dataclasses.replace(event, num_examples=9.0)):
        proposal = driver.do(again)
        assert proposal.verdicts[0].accepted
        assert proposal.commands == []
    assert driver.verdict(dataclasses.replace(event, digest="two")) == Verdict(Reason.REJECTED_CONFLICT)
    assert driver.job.revision == revision
    assert driver.attempt.assignments["c0"].num_examples == 5
    driver.report("c1")
    assert driver.verdict(event).accepted  # also during the commit
    assert driver.verdict(dataclasses.replace(event, digest="two")) == Verdict(Reason.REJECTED_CONFLICT)


@pytest.mark.fault("F12")
def test_two_reports_in_one_batch_are_one_fold() -> None:
    driver = collecting(2)
    one, two = (UpdateReported(driver.key, "c0", digest, 5) for digest in ("one", "two"))
    proposal = driver.do(one, two, one)
    assert [verdict.reason for verdict in proposal.verdicts] == [None, Reason.REJECTED_CONFLICT, None]
    assert names(proposal) == ["Fold"]


def test_events_of_another_attempt_or_client_or_job_are_stale() -> None:
    driver = collecting(2)
    key = driver.key
    stranger = UpdateReported(key, "nobody", "d", 1)
    older = UpdateReported(key._replace(number=7), "c0", "d", 1)
    elsewhere = UpdateReported(key._replace(job_id="x"), "c0", "d", 1)
    proposal = driver.do(stranger, older, elsewhere)
    assert [verdict.reason for verdict in proposal.verdicts] == [Reason.STALE] * 3
    assert proposal.verdicts[2].text == "there is no job x"
    assert proposal.changes == []


# --- failures ---


def test_an_attempt_that_cannot_succeed_any_more_closes_early() -> None:
    driver = collecting(10, selection=SIX_OF_TEN)
    driver.give_up("c0", "c1", "c2")
    driver.do(UpdateRejected(driver.key, "c3", Reason.REJECTED_NONFINITE, "NaN in layer1"))
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    driver.report("c4")
    proposal = driver.give_up("c5")
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert driver.attempt.reason == (
        "1 of at least 6 needed clients reported (4 failed, 1 rejected, 1 reported, 4 training); "
        "client c0: TRAINER_ERROR: boom, and 3 more"
    )
    assert aborted(proposal) == {f"c{i}": "ATTEMPT_ABANDONED" for i in range(6, 10)}
    assert names(proposal)[-1] == "Abandon"
    rejected = driver.attempt.assignments["c3"]
    assert (rejected.reason, rejected.text) == (Reason.REJECTED_NONFINITE, "NaN in layer1")


@pytest.mark.fault("F46")
def test_the_text_of_an_end_is_bounded() -> None:
    driver = collecting(10, selection=SIX_OF_TEN)
    proposal = driver.do(UpdateRejected(driver.key, "c3", Reason.REJECTED_SCHEMA, "\x1b" * 10**6))
    text = driver.attempt.assignments["c3"].text
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert "\x1b" not in text
    assert proposal.changes[0].history[0].reason == text


def test_an_attempt_closes_when_no_client_is_left_to_wait_for() -> None:
    driver = collecting(3, goal=3)
    driver.report("c0", "c1")
    proposal = driver.give_up("c2")
    assert names(proposal) == ["Commit"]


def test_a_failure_that_is_told_twice_is_told_the_same() -> None:
    driver = collecting(2)
    event = AssignmentFailed(driver.key, "c0", Reason.TRAINER_ERROR, "boom")
    assert driver.verdict(event).accepted
    assert driver.verdict(event).accepted
    assert driver.verdict(UpdateReported(driver.key, "c0", "d", 1)) == Verdict(Reason.TRAINER_ERROR, "boom")


def test_a_report_cannot_be_taken_back() -> None:
    driver = collecting(2)
    driver.report("c0")
    assert driver.verdict(AssignmentFailed(driver.key, "c0", Reason.TRAINER_ERROR)) == Verdict(Reason.STALE)
    assert driver.states()["c0"] == "REPORTED"


@pytest.mark.fault("F33")
def test_back_off_grows_within_its_jitter_up_to_its_cap() -> None:
    retry = {"base_s": 2.0, "max_s": 9.0}
    driver = collecting(2, retry=retry)
    waits: list[float] = []
    for failures in range(1, 9):
        driver.give_up("c0", "c1")
        assert driver.job.failures == failures
        assert driver.job.resume_at is not None
        waits.append(driver.job.resume_at - driver.now)
        ceiling = min(2.0 * 2 ** (failures - 1), 9.0)
        assert ceiling / 2 <= waits[-1] <= ceiling
        driver.check_in("c0", "c1")
        assert driver.attempt.phase is AttemptPhase.ABANDONED  # the clients wait for the retry
        driver.wait(waits[-1])
        assert (driver.key.number, driver.attempt.phase) == (failures + 1, AttemptPhase.COLLECTING)
    assert len(set(waits)) == len(waits)
    driver.play_round()
    assert driver.job.failures == 0
    assert driver.key == ("j", 2, 1)


@pytest.mark.fault("F33")
def test_after_max_attempts_the_job_fails_with_a_reason() -> None:
    driver = collecting(2, retry={"base_s": 1.0, "max_attempts": 2})
    driver.give_up("c0", "c1")
    driver.check_in("c0", "c1")
    driver.wait(1)
    proposal = driver.give_up("c0", "c1")
    assert driver.job.status is JobStatus.FAILED
    assert driver.job.reason == (
        "round 1 failed 2 times; last failure: 0 of at least 1 needed clients reported (2 failed); "
        "client c0: TRAINER_ERROR: boom, and 1 more"
    )
    assert names(proposal) == ["Abandon"]
    assert driver.timers == {}
    assert driver.leave_after_check_in("c0").reason is Reason.NO_WORK


def test_failures_in_a_row_are_counted_not_all() -> None:
    driver = collecting(2, rounds=9, retry={"max_attempts": 2})
    for _ in range(4):
        driver.give_up("c0", "c1")
        driver.check_in("c0", "c1")
        driver.wait(1)
        driver.play_round()
        driver.check_in("c0", "c1")
    assert (driver.job.round, driver.job.status) == (4, JobStatus.RUNNING)
