"""The server is killed and started again: with a spool attempts continue, in memory they are tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedplat.aggregate import Contribution
from fedplat.rounds import AssignmentId
from fedplat.rounds.commands import Abort, Commit, Fold
from fedplat.rounds.events import JobAction, UpdateReported
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus, Reason
from support.rounds.driver import (
    Driver,
    aborted,
    assigned,
    collecting,
    commands_of,
    make_client,
    make_job,
    make_spec,
    names,
)

DAY_S = 86_400.0


def selecting(**sections: Any) -> Driver:
    return Driver(make_job(spec=make_spec(**sections))).start(1)


def with_reports(**sections: Any) -> Driver:
    """Two of four clients have reported, in reverse order of their names; one uploads, one trains."""
    driver = collecting(4, goal=4, **sections)
    driver.wait(10.0)
    driver.report("c3")
    driver.report("c1", num_examples=20.0, local_steps=3.0)
    driver.upload("c0")
    return driver


def committing(**sections: Any) -> Driver:
    driver = Driver(make_job(spec=make_spec(**sections))).start(2)
    driver.report("c1")
    driver.report("c0")
    return driver


def evaluating(**sections: Any) -> Driver:
    spec = make_spec(evaluation={"clients": {"evaluator": "digits-eval", "goal": 2, "timeout_s": 20.0}}, **sections)
    driver = Driver(make_job(spec=spec)).start(2)
    driver.play_round()
    driver.check_in("c0", "c1")
    assert driver.attempt.kind is AttemptKind.EVALUATE
    return driver


# --- in the spool ---


@pytest.mark.fault("F1")
def test_a_selection_begins_anew() -> None:
    driver = selecting()
    key = driver.key
    driver.wait(50.0)
    driver.crash(down_s=1000.0)
    assert (driver.key, driver.attempt.phase) == (key, AttemptPhase.SELECTING)
    assert driver.attempt.selection_ends_at == driver.now + 60.0
    assert driver.timers["j"] == driver.now + 60.0
    assert assigned(driver.check_in("c0", "c1")) == ["c0", "c1"]


@pytest.mark.fault("F2")
def test_a_collection_goes_on_with_the_time_that_is_left() -> None:
    driver = with_reports()
    proposal = driver.crash(down_s=7.0)
    assert driver.states() == {"c0": "UPLOADING", "c1": "REPORTED", "c2": "TRAINING", "c3": "REPORTED"}
    left = {name: each.deadline_at - driver.now for name, each in driver.attempt.assignments.items() if each.is_busy}
    assert left == pytest.approx({"c0": 30.0 - 7.0, "c2": 100.0 - 10.0 - 7.0})
    assert driver.timers["j"] == pytest.approx(driver.now + 23.0)
    folds = [
        Fold(driver.key, AssignmentId(driver.key, "c3"), "of-c3", Contribution(10.0, 10.0, client_id="c3"), 0),
        Fold(
            driver.key,
            AssignmentId(driver.key, "c1"),
            "of-c1",
            Contribution(20.0, 20.0, {"local_steps": 3.0}, client_id="c1"),
            0,
        ),
    ]
    assert commands_of(proposal, Fold) == folds
    assert [driver.attempt.assignments[name].report_number for name in ("c3", "c1")] == [1, 2]
    assert names(proposal) == ["Fold", "Fold"]


@pytest.mark.fault("F2")
def test_who_was_assigned_reports_with_its_token_or_gets_a_new_one() -> None:
    driver = with_reports()
    driver.crash()
    assert driver.coordinator.num_busy == 2
    proposal = driver.check_in("c2")
    assert assigned(proposal) == ["c2"]
    assert driver.report("c0").verdicts[0].accepted
    proposal = driver.report("c2")
    assert commands_of(proposal, Commit) == [Commit(driver.key, 0, 4)]
    driver.commit()
    assert driver.job.latest.num_updates == 4


@pytest.mark.fault("F12")
@pytest.mark.parametrize(("digest", "reason"), [("of-c1", None), ("other", Reason.REJECTED_CONFLICT)])
def test_a_report_that_comes_again_after_a_restart_gets_its_first_receipt(digest: str, reason: Reason | None) -> None:
    driver = with_reports()
    driver.crash()
    proposal = driver.do(UpdateReported(driver.key, "c1", digest, 20.0))
    assert proposal.verdicts[0].reason is reason
    assert proposal.changes == []
    assert commands_of(proposal, Fold) == []


def test_whose_time_ended_while_the_server_was_down_is_late() -> None:
    driver = with_reports(selection={"min_fraction": 0.5})
    proposal = driver.crash(down_s=50.0)
    assert aborted(proposal) == {"c0": "UPLOAD_TIMEOUT"}
    assert driver.states()["c2"] == "TRAINING"
    driver = with_reports(selection={"min_fraction": 0.5})
    proposal = driver.crash(down_s=500.0)
    assert names(proposal) == ["Fold", "Fold", "Abort", "Abort", "Commit"]
    assert commands_of(proposal, Commit) == [Commit(driver.key, 0, 2)]


def test_with_too_few_reports_the_round_is_tried_again() -> None:
    driver = with_reports(selection={"min_fraction": 1.0})
    key = driver.key
    driver.crash(down_s=500.0)
    assert driver.ledger.attempts[key].phase is AttemptPhase.ABANDONED
    assert driver.ledger.attempts[key].reason.startswith("2 of at least 4 needed clients reported")
    assert driver.job.failures == 1


@pytest.mark.fault("F18")
@pytest.mark.parametrize("clock_s", [-DAY_S, -1.0])
def test_a_clock_that_was_set_back_gives_no_client_more_than_the_whole_time(clock_s: float) -> None:
    driver = with_reports(deadlines={"adaptive": {"after": 1, "min_s": 1.0}})
    driver.crash(clock_s=clock_s)
    busy = {name: each for name, each in driver.attempt.assignments.items() if each.is_busy}
    assert busy["c0"].deadline_at - driver.now <= 30.0
    assert busy["c2"].deadline_at - driver.now <= 100.0
    assert all(each.assigned_at <= driver.now for each in busy.values())
    assert driver.timers["j"] <= driver.now + 30.0
    driver.report("c2")
    assert all(duration >= 0.0 for duration in driver.job.durations)


def test_no_client_gets_more_time_than_an_adaptive_deadline_gave() -> None:
    driver = collecting(2, deadlines={"adaptive": {"after": 1, "min_s": 1.0, "margin": 1.0}})
    driver.wait(2.0)
    driver.play_round()
    driver.check_in("c0", "c1")
    assert driver.attempt.assignments["c0"].deadline_at == pytest.approx(driver.now + 2.0)
    driver.crash(clock_s=-DAY_S)
    assert driver.attempt.assignments["c0"].deadline_at == pytest.approx(driver.now + 2.0)


@pytest.mark.fault("F3", "F4")
def test_a_commit_is_done_again_in_the_same_order() -> None:
    driver = committing()
    proposal = driver.crash()
    key = driver.key
    assert proposal.commands == [
        Fold(key, AssignmentId(key, "c1"), "of-c1", Contribution(10.0, 10.0, client_id="c1"), 0),
        Fold(key, AssignmentId(key, "c0"), "of-c0", Contribution(10.0, 10.0, client_id="c0"), 0),
        Commit(key, 0, 2),
    ]
    assert proposal.changes == []
    driver.commit()
    assert driver.job.round == 1


def test_a_job_that_was_paused_while_it_committed_is_still_paused_and_commits() -> None:
    driver = committing()
    driver.operate(JobAction.PAUSE)
    driver.crash()
    assert (driver.job.status, driver.attempt.phase) == (JobStatus.PAUSED, AttemptPhase.COMMITTING)
    driver.commit()
    assert (driver.job.status, driver.job.round) == (JobStatus.PAUSED, 1)


@pytest.mark.fault("F1")
def test_an_evaluation_goes_on_without_folding() -> None:
    driver = evaluating()
    key = driver.key
    driver.report("c0", loss=1.0)
    proposal = driver.crash(down_s=3.0)
    assert (driver.key, driver.attempt.phase) == (key, AttemptPhase.COLLECTING)
    assert driver.attempt.assignments["c1"].deadline_at == pytest.approx(driver.now + 17.0)
    assert names(proposal) == []
    driver.report("c1", loss=3.0)
    assert driver.ledger.attempts[key].metrics == {"loss": 2.0}


def test_a_lost_restart_is_done_again() -> None:
    driver = with_reports()
    driver.crash()
    assert driver.crash().commands == driver.crash().commands


def test_crashes_at_every_step_of_a_round_lose_nothing() -> None:
    spec = make_spec(goal=3, rounds=1)
    for at in range(6):
        driver = Driver(make_job(spec=spec))
        steps: list[Callable[[Driver], object]] = [
            lambda it: it.start(),
            lambda it: it.check_in("c0", "c1", "c2"),
            lambda it: it.report("c2"),
            lambda it: it.upload("c1"),
            lambda it: it.report("c1", "c0"),
            lambda it: it.commit(),
        ]
        for number, step in enumerate(steps):
            step(driver)
            if number == at:
                driver.crash(down_s=1.0)
        assert (driver.job.status, driver.job.latest.num_updates) == (JobStatus.COMPLETED, 3)
        assert driver.key == ("j", 1, 1)


# --- in memory ---


@pytest.mark.fault("F2")
@pytest.mark.parametrize("phase", [selecting, with_reports, committing])
def test_in_memory_the_round_is_tried_again_at_once(phase: Callable[..., Driver]) -> None:
    driver = phase(durability="memory")
    key, counts = driver.key, driver.counts()
    proposal = driver.crash()
    abandoned = driver.ledger.attempts[key]
    assert (abandoned.phase, abandoned.reason) == (AttemptPhase.ABANDONED, "the server was restarted")
    assert {name: n for name, n in abandoned.counts.items() if n} == (
        {"DROPPED": sum(counts.values())} if counts else {}
    )
    assert len(commands_of(proposal, Abort)) == counts.get("TRAINING", 0) + counts.get("UPLOADING", 0)
    assert driver.job.failures == 0
    assert (driver.key, driver.attempt.phase) == (("j", 1, key.number + 1), AttemptPhase.SELECTING)
    assert driver.job.resume_at is None
    driver.do(make_client("c0"))
    assert driver.coordinator.assignment_of("c0") is None  # nothing is left of its old work


def test_in_memory_an_evaluation_is_not_tried_again() -> None:
    driver = evaluating(durability="memory")
    driver.crash()
    assert driver.key == ("j", 2, 1)


# --- in both ---


def test_after_a_restart_back_off_is_over() -> None:
    driver = Driver().start(2)
    driver.give_up("c0", "c1")
    driver.crash()
    assert (driver.key, driver.job.failures) == (("j", 1, 2), 1)


def _drafted() -> Driver:
    return Driver()


def _paused() -> Driver:
    driver = collecting(3, goal=3)
    driver.operate(JobAction.PAUSE)
    return driver


def _completed() -> Driver:
    driver = Driver(make_job(spec=make_spec(rounds=1))).start(2)
    driver.play_round()
    return driver


@pytest.mark.parametrize("phase", [_drafted, _paused, _completed])
def test_a_restart_writes_nothing_for_jobs_that_had_nothing_under_way(phase: Callable[[], Driver]) -> None:
    driver = phase()
    proposal = driver.crash()
    assert proposal.verdicts[0].accepted
    assert (proposal.changes, proposal.commands) == ([], [])
