"""How buffers end: too few clients, operators, failures, the last version, evaluation between them, restarts."""

from __future__ import annotations

import pytest

from fedplat.aggregate import Contribution
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.commands import Abort, Assign, Commit, Fold
from fedplat.rounds.events import AggregationFailed, ClientLeft, JobAction, UpdateRejected
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus, Reason
from support.rounds.buffers import FIRST, SECOND, buffered, carried, play, staleness
from support.rounds.driver import Driver, aborted, commands_of, make_client

# --- too few clients ---


def test_a_buffer_that_is_never_full_is_committed_if_it_has_enough() -> None:
    driver = buffered(2, goal=4)
    driver.report("c0")
    driver.wait(30.0)
    driver.report("c1")
    assert driver.attempt.selection_ends_at == 90.0
    (proposal,) = driver.wait(60.0)
    assert commands_of(proposal, Commit) == [Commit(FIRST, 0, 2)]


def test_a_buffer_with_too_little_is_given_up_and_the_job_backs_off() -> None:
    driver = buffered(1, goal=4)
    driver.report("c0")
    driver.wait(60.0)
    assert (driver.attempt.phase, driver.job.failures) == (AttemptPhase.ABANDONED, 1)
    assert driver.attempt.reason == "1 of at least 2 needed clients reported (1 reported)"
    assert driver.states() == {"c0": "DROPPED"}
    driver.wait(1.0)
    assert driver.key == AttemptKey("j", 1, 2)
    driver.check_in("c0", "c1", "c2")
    assert driver.attempt.num_busy == 3


def test_a_client_that_comes_in_time_keeps_the_buffer() -> None:
    driver = buffered(1, goal=4)
    driver.report("c0")
    driver.wait(59.0)
    driver.check_in("c1")
    driver.wait(59.0)
    assert driver.counts() == {"REPORTED": 1, "TRAINING": 1}


def test_no_client_comes() -> None:
    driver = buffered(0)
    assert driver.timers == {"j": 60.0}
    driver.wait(60.0)
    assert driver.attempt.reason == "0 of at least 1 needed clients reported (no client checked in)"
    assert "retrying" in driver.job.reason


# --- the end ---


def test_the_last_version_makes_everybody_surplus() -> None:
    driver = buffered(3, rounds=1)
    proposal = driver.report("c0", "c1")
    assert commands_of(proposal, Abort) == [Abort(FIRST, "c2", Reason.SURPLUS)]
    driver.commit()
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.coordinator.num_busy == 0


def test_updates_that_wait_for_more_than_the_last_version_end_with_a_reason() -> None:
    driver = buffered(5, concurrency=5, rounds=2)
    driver.report("c0", "c1")
    driver.report("c2", "c3", "c4")
    driver.commit()
    driver.commit()
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.ledger.cohorts[FIRST]["c4"].reason is Reason.SURPLUS


@pytest.mark.parametrize(
    ("action", "status"), [(JobAction.PAUSE, JobStatus.PAUSED), (JobAction.CANCEL, JobStatus.CANCELLED)]
)
@pytest.mark.parametrize("during_commit", [False, True])
def test_an_operator_stops_everybody(action: JobAction, status: JobStatus, during_commit: bool) -> None:
    driver = buffered(4, concurrency=4)
    driver.report("c0", *(("c1",) if during_commit else ()))
    if during_commit:
        driver.report("c3")
    driver.operate(action)
    assert (driver.job.status, driver.coordinator.num_busy) == (status, 0)
    assert driver.ledger.cohorts[FIRST]["c3"].reason == f"JOB_{status}"
    paused_in_time = during_commit and action is JobAction.PAUSE
    if paused_in_time:
        driver.commit()
    assert driver.job.latest.version == int(paused_in_time)
    if action is JobAction.PAUSE:
        driver.operate(JobAction.RESUME)
        assert driver.job.latest.version + 1 == driver.key.round


def test_a_version_that_cannot_be_made_costs_all_that_there_is() -> None:
    driver = buffered(4, concurrency=4)
    driver.report("c0", "c1")
    driver.report("c2")
    proposal = driver.do(AggregationFailed(FIRST, "disk full"))
    assert aborted(proposal) == {"c3": "ATTEMPT_ABANDONED"}
    assert driver.ledger.cohorts[FIRST]["c2"].reason is Reason.ATTEMPT_ABANDONED
    assert driver.job.failures == 1
    driver.wait(1.0)
    assert driver.key == AttemptKey("j", 1, 2)


# --- federated evaluation ---


def evaluating() -> Driver:
    """Version 1 is being evaluated while c2 and c3 still train."""
    section = {"clients": {"evaluator": "digits-eval", "goal": 1, "timeout_s": 20.0}}
    driver = buffered(4, concurrency=4, evaluation=section)
    driver.report("c0", "c1")
    driver.commit()
    driver.check_in("c0")
    assert (driver.attempt.kind, driver.states()) == (AttemptKind.EVALUATE, {"c0": "TRAINING"})
    return driver


def test_clients_train_on_while_others_evaluate() -> None:
    driver = evaluating()
    assert carried(driver) == {"c2": "TRAINING", "c3": "TRAINING"}
    driver.report("c2")
    driver.wait(5.0)
    proposal = driver.report("c0", loss=1.0)
    assert commands_of(proposal, Fold)[0].contribution.staleness == 1
    assert (driver.key, driver.attempt.kind) == (SECOND, AttemptKind.TRAIN)
    assert driver.states() == {"c2": "REPORTED", "c3": "TRAINING"}


def test_deadlines_strike_while_others_evaluate() -> None:
    driver = evaluating()
    driver.wait(19.0)
    driver.upload("c2")
    assert driver.timers == {"j": 20.0}
    driver.wait(1.0)  # the evaluation has failed, and training continues
    assert (driver.key, driver.states()) == (SECOND, {"c2": "UPLOADING", "c3": "TRAINING"})
    driver.wait(30.0)
    assert driver.reasons() == {"c2": "UPLOAD_TIMEOUT", "c3": ""}


# --- restarts ---


def test_a_clock_that_was_set_back_gives_carried_over_assignments_no_more_time() -> None:
    driver = buffered(4, concurrency=4)
    driver.report("c0", "c1")
    assert carried(driver) == {"c2": "TRAINING", "c3": "TRAINING"}
    driver.crash(clock_s=-86_400.0)
    longest = driver.job.spec.deadlines.training_s
    assert carried(driver) == {"c2": "TRAINING", "c3": "TRAINING"}
    assert all(each.deadline_at <= driver.now + longest for each in driver.job.carried_over.busy)


@pytest.mark.fault("F2")
def test_a_buffer_continues_after_a_crash() -> None:
    driver = buffered(4, concurrency=4)
    play(driver, "c0", "c1")
    driver.report("c2")
    driver.wait(10.0)
    proposal = driver.crash(down_s=7.0)
    fold = Fold(
        SECOND, AssignmentId(FIRST, "c2"), "of-c2", Contribution(10.0 * 2**-0.5, 10.0, staleness=1, client_id="c2"), 0
    )
    assert commands_of(proposal, Fold) == [fold]
    assert driver.states() == {"c0": "TRAINING", "c1": "TRAINING", "c2": "REPORTED", "c3": "TRAINING"}
    assert driver.timers["j"] == pytest.approx(driver.now + 83.0)
    assert commands_of(driver.check_in("c3"), Assign)[0].base_version == 0
    assert commands_of(driver.report("c3"), Commit) == [Commit(SECOND, 1, 2)]


@pytest.mark.fault("F4")
def test_a_commit_is_done_again_while_clients_work() -> None:
    driver = buffered(4, concurrency=4)
    driver.report("c1", "c0")
    driver.report("c3")
    before = carried(driver)
    proposal = driver.crash()
    assert [command.assignment.client_id for command in commands_of(proposal, Fold)] == ["c1", "c0"]
    assert commands_of(proposal, Commit) == [Commit(FIRST, 0, 2)]
    assert proposal.changes == []
    assert carried(driver) == before == {"c2": "TRAINING", "c3": "REPORTED"}
    driver.commit()
    assert staleness(driver) == {"c3": 1}


def test_time_that_passed_while_the_server_was_down_is_over() -> None:
    driver = buffered(3)
    driver.report("c0")
    proposal = driver.crash(down_s=200.0)
    assert aborted(proposal) == {"c1": "TRAIN_TIMEOUT", "c2": "TRAIN_TIMEOUT"}
    assert driver.timers == {"j": driver.now + 60.0}
    driver.check_in("c3")
    driver.report("c3")
    assert driver.attempt.phase is AttemptPhase.COMMITTING


def test_in_memory_updates_are_lost_and_clients_work_on() -> None:
    driver = buffered(3, goal=3, durability="memory")
    driver.report("c0")
    assert commands_of(driver.crash(), Fold) == []
    assert (driver.key, driver.states()) == (FIRST, {"c0": "DROPPED", "c1": "TRAINING", "c2": "TRAINING"})
    driver.check_in("c3")
    driver.report("c1", "c2", "c3")
    assert driver.commit().timers
    assert driver.job.latest.num_updates == 3


def test_in_memory_a_version_that_was_being_made_is_lost() -> None:
    driver = buffered(5, concurrency=5, durability="memory")
    driver.report("c0", "c1")
    driver.report("c2")
    driver.crash()
    assert (driver.key, driver.attempt.phase) == (AttemptKey("j", 1, 2), AttemptPhase.COLLECTING)
    assert driver.states() == {"c3": "TRAINING", "c4": "TRAINING"}
    driver.report("c3", "c4")
    driver.commit()
    assert driver.job.latest.version == 1


def test_the_same_seed_gives_the_same_sequence() -> None:
    def run() -> list[str]:
        driver = buffered(6, concurrency=2)
        said = [repr(command) for _ in range(20) for command in play(driver, *driver.attempt.assignments).commands]
        driver.do(ClientLeft("c0"), make_client("c9"))
        return said

    assert run() == run()


def test_reports_that_wait_have_different_numbers_also_after_a_restart() -> None:
    """The store has no ended assignments that were carried over, and one of them had been counted."""
    driver = buffered(6, concurrency=6, goal=2)
    first, second, rejected, *waiting = driver.attempt.assignments
    driver.report(first, second)
    driver.do(UpdateRejected(driver.key_of(rejected), rejected, Reason.REJECTED_NONFINITE, "text"))
    driver.report(waiting[0])
    driver.crash()
    driver.report(*waiting[1:])
    assert [each.client_id for each in driver.job.carried_over.reported] == waiting
    assert len({each.report_number for each in driver.job.carried_over.reported}) == len(waiting)
