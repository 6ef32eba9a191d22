"""Batches, lost batches, check-ins and answers: where several events and several jobs meet."""

from __future__ import annotations

import pytest

from fedplat.rounds.commands import Assign, Refuse
from fedplat.rounds.events import (
    ClientLeft,
    JobAction,
    OperatorCommand,
    TimerFired,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from support.rounds.driver import Driver, aborted, assigned, commands_of, make_client, make_job, make_spec, names


def two_jobs() -> Driver:
    return Driver(make_job("a", make_spec(goal=2)), make_job("b", make_spec(goal=2)))


# --- check-in ---


@pytest.mark.fault("F15")
def test_a_client_that_lost_its_assignment_gets_it_again() -> None:
    driver = Driver().start(2)
    (first,) = (c for c in driver.ledger.tokens if driver.attempt.assignments["c0"].token_hash == c.encode())
    driver.wait(40)
    proposal = driver.check_in("c0")
    (again,) = commands_of(proposal, Assign)
    assert (again.client_id, again.key, again.base_version) == ("c0", driver.key, 0)
    assert again.token != first
    assert (again.training_timeout_s, again.upload_timeout_s) == (60.0, 30.0)
    assert driver.attempt.assignments["c0"].token_hash == again.token.encode()  # the old token is fenced
    assert proposal.changes[0].history == ()  # no change that people would look for
    assert "c0" not in driver.coordinator.room.clients
    (late,) = driver.wait(60)
    assert aborted(late) == {"c0": "TRAIN_TIMEOUT", "c1": "TRAIN_TIMEOUT"}


@pytest.mark.fault("F15")
def test_a_client_that_comes_back_while_it_uploads_has_the_rest_of_that_time() -> None:
    driver = Driver().start(2)
    driver.wait(50)
    driver.upload("c0")
    driver.wait(20)
    (again,) = commands_of(driver.check_in("c0"), Assign)
    assert again.training_timeout_s == 10.0
    assert driver.states()["c0"] == "UPLOADING"


@pytest.mark.fault("F15")
def test_an_overdue_assignment_is_not_handed_out_again() -> None:
    driver = Driver().start(2)
    driver.now = 100.0  # the timer is about to fire
    proposal = driver.check_in("c0")
    assert assigned(proposal) == []
    assert driver.reasons() == {"c0": "TRAIN_TIMEOUT", "c1": "TRAIN_TIMEOUT"}
    assert list(driver.coordinator.room.clients) == ["c0"]


def test_a_check_in_in_the_batch_that_ends_the_assignment_waits_for_new_work() -> None:
    driver = Driver().start(2)
    key = driver.key
    driver.do(UpdateReported(key, "c0", "d", 1.0), make_client("c0"))
    assert list(driver.coordinator.room.clients) == ["c0"]
    assert driver.states()["c0"] == "REPORTED"


def test_a_check_in_in_the_batch_that_assigned_is_answered_once() -> None:
    """Otherwise one client would wait and work at the same time, and a second job could draw it."""
    driver = two_jobs()
    driver.check_in("c0")
    for job_id in ("a", "b"):
        driver.operate(JobAction.START, job_id)
    driver.now = 60.0
    proposal = driver.do(TimerFired("a"), make_client("c0"))
    (command,) = commands_of(proposal, Assign)
    assert command.key.job_id == "a"
    found = driver.coordinator.find(command.key, "c0")
    assert found is not None
    assert found.token_hash == command.token.encode()
    assert driver.coordinator.room.clients == {}
    assert driver.coordinator.num_busy == 1


def test_two_check_ins_of_a_busy_client_are_answered_once() -> None:
    driver = Driver().start(2)
    (command,) = commands_of(driver.do(make_client("c0"), make_client("c0")), Assign)
    assert driver.attempt.assignments["c0"].token_hash == command.token.encode()


def test_a_client_that_leaves_and_comes_back_in_one_batch_waits() -> None:
    """A refusal would reach the new call, while the room still counted the client."""
    driver = Driver().start()
    driver.check_in("c0")
    proposal = driver.do(ClientLeft("c0"), make_client("c0"))
    assert commands_of(proposal, Refuse) == []
    assert list(driver.coordinator.room.clients) == ["c0"]
    proposal = driver.do(ClientLeft("c0"), make_client("c0"), make_client("c1"))
    assert sorted(assigned(proposal)) == ["c0", "c1"]
    assert commands_of(proposal, Refuse) == []


def test_a_client_that_leaves_in_the_batch_that_draws_it_is_assigned() -> None:
    driver = Driver().start()
    driver.check_in("c0")
    driver.now = 60.0
    proposal = driver.do(TimerFired("j"), ClientLeft("c0"))
    assert assigned(proposal) == ["c0"]
    assert commands_of(proposal, Refuse) == []
    # It left before it was drawn:
    other = Driver().start()
    other.check_in("c0")
    other.now = 60.0
    proposal = other.do(ClientLeft("c0"), TimerFired("j"))
    assert names(proposal) == ["Refuse", "Abandon"]
    assert other.attempt.phase is AttemptPhase.ABANDONED


def test_who_leaves_without_waiting_is_not_answered() -> None:
    driver = Driver().start(2)
    proposal = driver.do(ClientLeft("c0"), ClientLeft("nobody"))
    assert (proposal.commands, proposal.changes) == ([], [])
    assert driver.states()["c0"] == "TRAINING"


def test_a_second_check_in_replaces_the_first() -> None:
    driver = Driver(make_job(spec=make_spec(goal=1, selection={"where": "region == 'eu'"}))).start()
    driver.do(make_client("c0", labels={"region": "us"}))
    assert assigned(driver.do(make_client("c0", labels={"region": "eu"}))) == ["c0"]
    driver = Driver(make_job(spec=make_spec(goal=2, selection={"where": "region == 'eu'"}))).start()
    driver.do(make_client("c0", labels={"region": "eu"}))
    driver.do(make_client("c0", labels={"region": "us"}))
    assert assigned(driver.do(make_client("c1", labels={"region": "eu"}))) == []


@pytest.mark.fault("F32")
def test_the_waiting_room_is_bounded() -> None:
    driver = Driver(make_job(spec=make_spec(goal=5)), max_waiting=2).start(2)
    (refusal,) = commands_of(driver.check_in("c2"), Refuse)
    assert refusal.reason is Reason.OVERLOADED
    assert refusal.retry.min_s > 0
    assert driver.check_in("c1").commands == []  # it is already waiting
    proposal = driver.do(make_client("c2"), ClientLeft("c0"), make_client("c2"))
    assert [c.client_id for c in commands_of(proposal, Refuse)] == ["c0"]
    assert list(driver.coordinator.room.clients) == ["c1", "c2"]


# --- batches ---


def test_verdicts_stand_in_the_order_of_their_events() -> None:
    driver = Driver().start(2)
    key = driver.key
    driver.check_in("w")
    proposal = driver.do(
        UpdateReported(key, "c0", "d", 1.0),
        make_client("c1"),  # gets its work again
        OperatorCommand("j", JobAction.START),
        make_client("c0"),  # has reported: waits
        OperatorCommand("x", JobAction.START),
        ClientLeft("w"),
        TimerFired("j"),
        OperatorCommand("j", JobAction.RESUME),
        UploadStarted(key, "nobody"),
    )
    stale = Reason.STALE
    assert [v.reason for v in proposal.verdicts] == [None, None, None, None, stale, None, None, None, stale]
    assert all(v.accepted is (v.reason is None) for v in proposal.verdicts)


def test_several_timers_in_one_batch_end_a_selection_once() -> None:
    driver = Driver().start()
    driver.now = 60.0
    proposal = driver.do(TimerFired("j"), TimerFired("j"), TimerFired("j"), TimerFired("x"))
    assert names(proposal) == ["Abandon"]
    assert driver.job.failures == 1
    assert driver.job.resume_at is not None
    assert proposal.timers == {"j": driver.job.resume_at}


def test_an_attempt_may_open_select_and_close_in_one_batch() -> None:
    driver = Driver()
    proposal = driver.do(
        make_client("c0"),
        make_client("c1"),
        OperatorCommand("j", JobAction.START),
        OperatorCommand("j", JobAction.CANCEL),
    )
    assert driver.job.status is JobStatus.CANCELLED
    assert names(proposal) == ["Abandon"]
    assert sorted(driver.coordinator.room.clients) == ["c0", "c1"]
    assert [(r.entity, r.from_state, r.to_state) for r in driver.ledger.history["j"]] == [
        ("job", "DRAFT", "RUNNING"),
        ("attempt", "", "SELECTING"),
        ("attempt", "SELECTING", "ABANDONED"),
        ("job", "RUNNING", "CANCELLED"),
    ]


def test_work_that_is_taken_back_in_the_batch_that_gave_it() -> None:
    driver = Driver().start()
    driver.check_in("c0")
    driver.now = 60.0
    proposal = driver.do(TimerFired("j"), OperatorCommand("j", JobAction.CANCEL), make_client("c0"))
    assert commands_of(proposal, Assign) == []
    assert aborted(proposal) == {"c0": "JOB_CANCELLED"}
    assert list(driver.coordinator.room.clients) == ["c0"]


# --- lost batches ---


def test_a_lost_draw_leaves_everybody_waiting_and_is_drawn_again() -> None:
    driver = Driver(make_job(spec=make_spec(goal=2, selection={"over_selection": 1.5}))).start(2)
    third = make_client("c2")
    driver.do(third, stored=False)
    assert list(driver.coordinator.room.clients) == ["c0", "c1"]
    assert sorted(assigned(driver.do(third))) == ["c0", "c1", "c2"]


def test_a_lost_batch_forgets_who_came_and_remembers_who_left() -> None:
    driver = Driver().start(2)
    key = driver.key
    driver.check_in("w")
    lost = (
        UpdateReported(key, "c0", "d", 1.0),
        make_client("c0"),  # waits now; it is busy again when the batch is undone
        ClientLeft("w"),
        make_client("n"),
    )
    driver.do(*lost, stored=False)
    assert list(driver.coordinator.room.clients) == ["w"]
    proposal = driver.do(*lost)
    assert sorted(driver.coordinator.room.clients) == ["c0", "n"]
    assert [c.client_id for c in commands_of(proposal, Refuse)] == ["w"]


def test_a_lost_timer_may_fire_again() -> None:
    driver = Driver().start(2)
    driver.now = 100.0
    driver.fire(stored=False)
    assert driver.states() == {"c0": "TRAINING", "c1": "TRAINING"}
    driver.fire()
    assert driver.states() == {"c0": "LATE", "c1": "LATE"}


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_final_draw_selects_no_client_twice(times: int) -> None:
    driver = Driver(make_job(spec=make_spec(goal=2))).start(1)
    driver.now = 60.0
    for _ in range(times):
        driver.fire(stored=False)
    assert assigned(driver.fire()) == ["c0"]


# --- several jobs ---


def test_no_client_works_for_two_jobs() -> None:
    driver = two_jobs()
    for job_id in ("a", "b"):
        driver.operate(JobAction.START, job_id)
    proposal = driver.check_in("c0", "c1", "c2")
    assert [c.key.job_id for c in commands_of(proposal, Assign)] == ["a", "a"]
    (left,) = driver.coordinator.room.clients
    proposal = driver.check_in("c3")
    assert {c.client_id: c.key.job_id for c in commands_of(proposal, Assign)} == {left: "b", "c3": "b"}


def test_jobs_of_other_populations_take_no_client() -> None:
    driver = Driver(make_job(spec=make_spec(1, population="other"))).start(1)
    assert driver.coordinator.num_busy == 0
    assert driver.leave("c0").reason is Reason.NO_WORK


def test_a_job_may_be_added_later_and_forgets_what_a_crash_left() -> None:
    driver = Driver().start(2)
    left = driver.job
    other = Driver(left)
    assert other.coordinator.num_busy == 2
    assert other.coordinator.assignment_of("c0") == driver.key
    fresh = Driver()
    fresh.coordinator.add(make_job("late", make_spec(population="elsewhere")))
    with pytest.raises(AssertionError):
        fresh.coordinator.add(make_job("late"))
