"""The phases of an attempt with secure aggregation: who takes part, who drops out, and when it fails."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.rounds.commands import Abandon, Commit, Fold, NextStep, Restart
from fedplat.rounds.events import AggregationFailed, AssignmentFailed, ClientRevoked, JobAction, UpdateRejected
from fedplat.rounds.protocols import secure_phases
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from fedplat.secure_aggregation.setup import FEATURE
from support.rounds.driver import aborted, assigned, commands_of, make_client, make_job, names
from support.rounds.secure_driver import SecureDriver, advertising, make_secure_client, make_secure_spec
from support.rounds.stored import list_messages

ADVERTISING, SHARING, COLLECTING = AttemptPhase.ADVERTISING, AttemptPhase.SHARING, AttemptPhase.COLLECTING
CONFIRMING, UNMASKING, COMMITTING = AttemptPhase.CONFIRMING, AttemptPhase.UNMASKING, AttemptPhase.COMMITTING
PHASES = [ADVERTISING, SHARING, COLLECTING, CONFIRMING, UNMASKING]
CONFIRM = {"confirm": True, "threshold": 0.6, "step_s": 20.0}
DISTRIBUTED: dict[str, Any] = {
    "privacy": {"trust": "none", "participation": "fixed", "noise_multiplier": 1.0, "max_releases": 9, "delta": 1e-5},
    "updates": {"weighting": "uniform", "clip_norm": 1.0},
}


# --- whole rounds ---


def test_a_round_runs_through_its_phases() -> None:
    driver = advertising(5, selection={"over_selection": 1.25})
    key = driver.key
    proposal = driver.advertise("c0", "c1", "c2", "c4")
    assert commands_of(proposal, NextStep) == [NextStep(key, SHARING)]
    assert aborted(proposal) == {"c3": "SURPLUS"}
    assert sorted(driver.groups()[0]) == ["c0", "c1", "c2", "c4"]
    assert names(driver.share("c0", "c1", "c2")) == []
    assert names(driver.share("c4")) == ["NextStep"]
    driver.upload_masked("c1")
    assert names(driver.report_masked("c2", "c1", "c0")) == ["Fold"] * 3
    assert driver.attempt.phase is COLLECTING, "it waits for every client that has shared"
    proposal = driver.report_masked("c4")
    assert names(proposal) == ["Fold", "NextStep"]
    assert [each.contribution.weight for each in commands_of(proposal, Fold)] == [1.0]
    assert (driver.attempt.phase, driver.attempt.num_survivors) == (UNMASKING, 4)
    assert names(driver.answer("c0", "c1", "c2")) == []
    assert commands_of(driver.answer("c4"), Commit) == [Commit(key, 0, 4)]
    driver.commit()
    assert driver.job.latest.num_updates == 4
    assert driver.job.unmasked == (), "only noise of clients makes it a release"
    assert [each.to_state for each in driver.ledger.steps[key] if each.entity == "attempt"] == [
        "SELECTING",
        "ADVERTISING",
        "SHARING",
        "COLLECTING",
        "UNMASKING",
        "COMMITTING",
        "COMMITTED",
    ]
    assert not any(map(list_messages, driver.ledger.cohorts[key].values())), "the messages of an ended attempt remain"


def test_with_confirm_the_survivors_confirm_before_they_are_asked() -> None:
    driver = advertising(options=CONFIRM).reach(CONFIRMING)
    assert names(driver.confirm("c0", "c1", "c2")) == []
    assert names(driver.confirm("c3")) == ["NextStep"]
    assert driver.attempt.phase is UNMASKING
    driver.reach(COMMITTING)
    driver.commit()
    assert driver.job.round == 1


def test_a_job_runs_to_its_end() -> None:
    driver = advertising(rounds=3)
    for _ in range(3):
        driver.reach(COMMITTING)
        driver.commit()
        driver.check_in("c0", "c1", "c2", "c3")
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.timers == {}


# --- selection ---


def test_a_client_without_the_feature_is_not_drawn() -> None:
    driver = SecureDriver(make_job(spec=make_secure_spec())).start()
    driver.do(*(make_client(f"old{n}") for n in range(4)))
    assert driver.attempt.phase is AttemptPhase.SELECTING
    assert driver.leave("old0").reason is Reason.NOT_ELIGIBLE
    driver.wait(60.0)
    assert driver.attempt.reason == (
        "0 of at least 3 needed clients were available for selection; "
        f"3 more do not have {FEATURE} (upgrade the client)"
    )
    driver.wait(2.0)
    assert assigned(driver.check_in("c0", "c1", "c2", "c3")) == ["c0", "c1", "c2", "c3"]


# --- the roster ---


def test_without_a_goal_the_roster_closes_when_no_client_is_left_in_training() -> None:
    driver = advertising(selection={"min_fraction": 0.75})
    driver.advertise("c0", "c1", "c2")
    assert driver.attempt.phase is ADVERTISING
    driver.give_up("c3")
    assert (driver.attempt.phase, len(driver.groups()[0])) == (SHARING, 3)


def test_at_the_training_deadline_the_roster_closes_and_those_with_keys_are_not_late() -> None:
    driver = advertising(selection={"min_fraction": 0.75})
    driver.advertise("c0", "c1", "c2")
    driver.now = 500.0  # the server was suspended: all deadlines have passed
    driver.fire()
    assert driver.states() == {"c0": "ADVERTISED", "c1": "ADVERTISED", "c2": "ADVERTISED", "c3": "LATE"}
    assert driver.attempt.phase is SHARING
    assert driver.timers == {"j": 520.0}


def test_a_roster_below_the_minimum_fails_and_says_what_to_change() -> None:
    driver = advertising(selection={"min_fraction": 0.75})
    driver.advertise("c0")
    driver.give_up("c1")
    assert driver.attempt.phase is ADVERTISING
    driver.give_up("c2")
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert driver.attempt.reason == (
        "1 of at least 3 needed clients sent their keys (1 advertised, 2 failed, 1 training); client c1: "
        "TRAINER_ERROR: boom, and 1 more; raise selection.over_selection or deadlines.training_s"
    )
    assert driver.job.failures == 1


def test_with_a_deadline_all_clients_are_waited_for_and_the_goal_is_drawn_from_them() -> None:
    drawn: set[str] = set()
    for seed in range(8):
        spec = make_secure_spec(4, selection={"over_selection": 1.5, "close": "deadline"})
        driver = SecureDriver(make_job(spec=spec), seed=seed)
        driver.start(6)
        driver.advertise("c0", "c1", "c2", "c3", "c4")
        assert driver.attempt.phase is ADVERTISING
        driver.advertise("c5")
        assert driver.counts() == {"ADVERTISED": 4, "SURPLUS": 2}
        drawn |= set(driver.groups()[0])
    assert drawn == {f"c{n}" for n in range(6)}, "the fastest are not preferred"


def test_the_positions_are_a_random_order_and_the_same_for_the_same_seed() -> None:
    orders: list[list[str]] = []
    for seed in (1, 2, 3, 1):
        driver = SecureDriver(make_job(spec=make_secure_spec(8)), seed=seed)
        driver.start(8)
        orders.append(driver.reach(SHARING).groups()[0])
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3


def test_a_large_cohort_is_divided_into_groups_of_nearly_equal_size() -> None:
    driver = advertising(10, 10, options={"group": 4, "threshold": 0.6}, selection={"min_fraction": 1.0})
    driver.reach(SHARING)
    assert sorted(map(len, driver.groups())) == [3, 3, 4]
    assert sorted(name for members in driver.groups() for name in members) == [f"c{n}" for n in range(10)]
    driver.reach(UNMASKING)
    assert driver.attempt.num_survivors == 3
    for number, members in enumerate(driver.groups()):
        assert driver.attempt.phase is UNMASKING, "every group has to be recovered"
        driver.answer(*members)
        assert (driver.attempt.phase is COMMITTING) == (number == 2)


def test_no_group_may_have_too_few_even_if_all_together_are_enough() -> None:
    driver = advertising(12, 12, options={"group": 6, "threshold": 0.51}, selection={"min_fraction": 0.7})
    driver.reach(COLLECTING)
    small, large = driver.groups()
    driver.report_masked(*small[2:], *large)
    driver.give_up(*small[:2])
    assert driver.attempt.reason.startswith("4 of 6 clients of group 0 reported their masked updates, and at least 5")


# --- drop-outs ---


def test_a_client_that_drops_out_before_it_shares_is_in_no_set() -> None:
    driver = advertising(5, 5).reach(SHARING)
    driver.share("c0", "c1", "c2", "c3")
    driver.wait(20.0)
    assert driver.reasons()["c4"] == "STEP_TIMEOUT"
    driver.reach(UNMASKING)
    assert driver.survivors() == [(["c0", "c1", "c2", "c3"], [])]
    assert commands_of(driver.answer(), Commit) == [Commit(driver.key, 0, 4)]


@pytest.mark.parametrize("how", ["fail", "late", "reject", "lost", "revoke"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_drops_out_after_it_has_shared_is_dropped(how: str, begun: bool) -> None:
    driver = advertising(5, 5).reach(COLLECTING)
    if begun:
        driver.upload_masked("c4")
    driver.report_masked("c0", "c1", "c2", "c3")
    if how == "fail":
        driver.do(AssignmentFailed(driver.key, "c4", Reason.UNSAFE_AGGREGATION, "unsafe"))
    elif how == "late":
        driver.wait(30.0)
        assert driver.reasons()["c4"] == ("UPLOAD_TIMEOUT" if begun else "STEP_TIMEOUT")
    elif how == "reject":
        driver.do(UpdateRejected(driver.key, "c4", Reason.REJECTED_DIGEST))
    elif how == "lost":
        driver.check_in("c4")
        assert driver.reasons()["c4"] == "KEYS_LOST"
        assert "c4" in driver.coordinator.room.clients, "it is free for other work"
    else:
        driver.do(ClientRevoked("c4"))
    assert driver.attempt.phase is UNMASKING
    assert driver.survivors() == [(["c0", "c1", "c2", "c3"], ["c4"])]
    assert driver.attempt.num_survivors == 4
    assert names(driver.answer("c0", "c1")) == []
    assert names(driver.answer("c2")) == []
    assert names(*driver.wait(1.0)) == ["Commit"]  # 3 of 5 holders


def test_a_client_that_shares_and_is_gone_before_the_others_have_shared_is_dropped() -> None:
    driver = advertising(5, 5).reach(SHARING)
    driver.share("c4")
    driver.give_up("c4")
    driver.reach(UNMASKING)
    assert driver.survivors() == [(["c0", "c1", "c2", "c3"], ["c4"])]


def test_a_survivor_that_does_not_answer_is_still_one() -> None:
    driver = advertising(5, 5).reach(UNMASKING)
    driver.answer("c0", "c1")
    driver.wait(2.0)
    assert driver.verdict(AssignmentFailed(driver.key, "c4", Reason.CLIENT_STOPPED)).reason is Reason.STALE
    driver.check_in("c4")  # it was restarted, and is free
    assert names(driver.answer("c2")) == [], "some of the answers could be wrong"
    assert driver.timers["j"] == driver.now + 2.0, "3 of 5 holders are enough, so it waits as long again for the others"
    driver.wait(1.0)
    driver.answer("c3")
    (proposal,) = driver.wait(1.0)
    assert commands_of(proposal, Commit) == [Commit(driver.key, 0, 5)]


def test_a_client_whose_messages_made_an_attempt_fail_is_not_drawn_again() -> None:
    driver = advertising(5, 4, selection={"over_selection": 1.25, "min_fraction": 0.75}).reach(COMMITTING)
    culprit = driver.names("REPORTED")[0]
    driver.do(AggregationFailed(driver.key, "the masks cannot be removed", (culprit, "another")))
    assert driver.reasons()[culprit] == "REJECTED_MESSAGE"
    driver.wait(5.0)
    assert driver.job.barred == (culprit,)
    driver.check_in("c0", "c1", "c2", "c3", "c4")
    assert driver.attempt.phase is AttemptPhase.SELECTING, "4 of 5 can be drawn, and it waits for 5"
    assert driver.leave(culprit).reason is not None
    assert culprit not in assigned(driver.check_in("c5"))
    assert len(driver.names("TRAINING")) == 5
    assert driver.job.barred == (culprit,)


def test_a_client_that_dealt_wrong_shares_and_dropped_out_is_not_drawn_again() -> None:
    driver = advertising(5, 5, selection={"min_fraction": 0.6}).reach(COLLECTING)
    culprit = driver.names("SHARED")[0]
    driver.do(AssignmentFailed(driver.key, culprit, Reason.TRAINER_ERROR, ""))
    driver.reach(COMMITTING)
    driver.do(AggregationFailed(driver.key, "the masks cannot be removed", (culprit,)))
    assert driver.states()[culprit] == "FAILED"
    driver.wait(5.0)
    assert driver.job.barred == (culprit,)
    assert culprit not in assigned(driver.check_in("c0", "c1", "c2", "c3", "c4", "c5"))


def test_a_client_restarted_in_training_gets_its_work_again_later_its_keys_are_lost() -> None:
    driver = advertising(5, 5, selection={"min_fraction": 0.6})
    assert assigned(driver.check_in("c0")) == ["c0"]
    driver.advertise("c0")
    proposal = driver.check_in("c0")
    assert assigned(proposal) == []
    assert (driver.states()["c0"], driver.reasons()["c0"]) == ("FAILED", "KEYS_LOST")
    driver.reach(SHARING)
    driver.share("c1")
    driver.check_in("c1")
    assert driver.reasons()["c1"] == "KEYS_LOST"
    driver.reach(UNMASKING)
    assert driver.survivors() == [(["c2", "c3", "c4"], ["c1"])]


# --- too few ---


def test_too_few_that_share() -> None:
    driver = advertising(5, 5, selection={"min_fraction": 0.8}).reach(SHARING)
    driver.share("c0", "c1", "c2")
    driver.wait(20.0)
    assert driver.attempt.reason == (
        "3 of at least 4 needed clients sent the shares of their secrets (2 late, 3 shared); client c3: "
        "STEP_TIMEOUT: the deadline passed before the client sent its message of a step of secure aggregation, and 1 "
        "more; raise secure_aggregation.step_s, or lower selection.min_fraction"
    )


def test_too_few_that_report() -> None:
    driver = advertising(5, 5, selection={"min_fraction": 0.8}).reach(COLLECTING)
    driver.report_masked("c0")
    proposal = driver.give_up("c1", "c2")
    assert driver.attempt.reason == (
        "1 of at least 4 needed clients reported their masked updates (2 failed, 1 reported, 2 shared); client "
        "c1: TRAINER_ERROR: boom, and 1 more; raise deadlines.upload_s, or lower selection.min_fraction"
    )
    assert names(proposal)[-1] == "Abandon"


@pytest.mark.parametrize("phase", [SHARING, COLLECTING])
def test_fewer_than_the_threshold(phase: AttemptPhase) -> None:
    driver = advertising(5, 5, options={"threshold": 0.9}, selection={"min_fraction": 0.4}).reach(phase)
    driver.give_up("c0")
    (driver.share if phase is SHARING else driver.report_masked)()
    did = "sent the shares of their secrets" if phase is SHARING else "reported their masked updates"
    assert driver.attempt.reason.startswith(
        f"4 of 5 clients of group 0 {did}; to remove the masks of each, 5 of the 5 clients that hold its shares are "
    )
    assert driver.attempt.reason.endswith("; lower secure_aggregation.threshold")


@pytest.mark.parametrize("phase", [SHARING, COLLECTING])
@pytest.mark.parametrize("near", [True, False])
def test_a_client_whose_neighbours_are_gone_fails_the_attempt(phase: AttemptPhase, near: bool) -> None:
    options = {"neighbours": 2, "threshold": 0.6, "step_s": 20.0}
    driver = advertising(8, 8, options=options, selection={"min_fraction": 0.5}).reach(phase)
    (circle,) = driver.groups()
    driver.give_up(circle[0], circle[2] if near else circle[4])  # of the 3 holders of `circle[1]` one is left
    (driver.share if phase is SHARING else driver.report_masked)()
    assert (driver.attempt.phase is AttemptPhase.ABANDONED) == near
    if near:
        assert "2 of the 3 clients that hold its shares are needed" in driver.attempt.reason


def test_too_few_that_confirm() -> None:
    driver = advertising(5, 5, options=CONFIRM).reach(CONFIRMING)
    driver.confirm("c0", "c1")
    (proposal,) = driver.wait(20.0)
    assert commands_of(proposal, Abandon) == [Abandon(driver.key)]
    assert driver.attempt.reason == (
        "2 of 5 survivors of group 0 confirmed the survivors, and 3 of the 5 clients that hold shares of each are "
        "needed (5 reported); raise secure_aggregation.step_s, or lower secure_aggregation.threshold"
    )


def test_at_the_deadline_enough_confirmations_are_enough() -> None:
    driver = advertising(5, 5, options=CONFIRM).reach(CONFIRMING)
    driver.confirm("c0", "c1", "c2")
    assert driver.attempt.phase is CONFIRMING
    driver.wait(20.0)
    assert (driver.attempt.phase, driver.attempt.num_survivors) == (UNMASKING, 5)


def test_too_few_that_answer() -> None:
    driver = advertising(5, 5, selection={"close": "deadline"}, **DISTRIBUTED).reach(UNMASKING)
    driver.answer("c0", "c1")
    driver.wait(19.9)
    assert driver.attempt.phase is UNMASKING
    driver.wait(0.1)
    assert driver.attempt.reason.startswith("2 of 5 survivors of group 0 answered with their shares, and 3 of the 5")
    assert (driver.job.failures, driver.job.unmasked) == (1, (5,)), "what may have been learned is charged"


def test_each_attempt_that_was_unmasked_counts_once_with_its_survivors() -> None:
    driver = advertising(5, 5, selection={"close": "deadline"}, **DISTRIBUTED).reach(COLLECTING)
    driver.give_up("c0")
    assert driver.job.unmasked == ()
    driver.reach(UNMASKING)
    assert driver.job.unmasked == (4,)
    driver.crash()
    driver.reach(COMMITTING)
    driver.commit()
    assert driver.job.unmasked == (4,)
    assert not driver.attempt.num_survivors


def test_a_failed_attempt_is_tried_again_with_other_keys() -> None:
    driver = advertising(retry={"base_s": 1.0}).reach(UNMASKING)
    old = driver.key
    driver.wait(20.0)
    driver.wait(1.0)
    driver.check_in("c0", "c1", "c2", "c3")
    assert (driver.key, driver.attempt.phase) == (("j", 1, old.number + 1), ADVERTISING)
    driver.reach(COMMITTING)
    driver.commit()
    assert driver.job.round == 1


# --- deadlines ---


def test_each_step_has_its_time() -> None:
    driver = advertising(5, 5, options=CONFIRM)
    assert driver.timers == {"j": 100.0}
    driver.wait(10.0)
    driver.reach(SHARING)
    assert driver.timers == {"j": 30.0}
    driver.wait(19.0)
    driver.reach(COLLECTING)
    assert driver.wait(1.0) == [], "the deadline of the step before is over"
    assert driver.timers == {"j": 29.0 + 30.0}
    driver.upload_masked("c0")
    driver.wait(28.0)
    driver.reach(CONFIRMING)
    assert driver.timers == {"j": 58.0 + 20.0}
    driver.wait(19.0)
    driver.reach(UNMASKING)
    assert driver.timers == {"j": 77.0 + 20.0}
    driver.reach(COMMITTING)
    assert driver.timers == {}
    assert driver.attempt.step_ends_at is None


def test_an_adaptive_deadline_follows_the_training_alone() -> None:
    driver = advertising(deadlines={"adaptive": {"after": 4, "min_s": 1.0, "margin": 2.0, "percentile": 100.0}})
    driver.wait(3.0)
    driver.advertise("c0", "c1")
    driver.wait(2.0)
    driver.advertise()
    assert driver.job.durations == (3.0, 3.0, 5.0, 5.0)
    driver.wait(9.0)
    driver.reach(COMMITTING)
    driver.commit()
    driver.check_in("c0", "c1", "c2", "c3")
    assert {each.deadline_at - driver.now for each in driver.attempt.busy} == {10.0}


# --- operators and revocation ---


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("action", [JobAction.PAUSE, JobAction.CANCEL])
def test_an_operator_ends_the_attempt_in_each_phase(phase: AttemptPhase, action: JobAction) -> None:
    driver = advertising(options=CONFIRM).reach(phase)
    key = driver.key
    assert driver.operate(action).accepted
    assert driver.ledger.attempts[key].phase is AttemptPhase.ABANDONED
    assert driver.coordinator.num_busy == 0
    assert driver.timers == {}
    assert not any(map(list_messages, driver.attempt.assignments.values()))
    assert not any(map(list_messages, driver.ledger.cohorts[key].values()))


@pytest.mark.parametrize("phase", PHASES)
def test_a_revoked_client_drops_out_until_the_survivors_are_fixed(phase: AttemptPhase) -> None:
    driver = advertising(5, 5, options=CONFIRM).reach(phase)
    driver.do(ClientRevoked("c4"))
    fixed = phase in (CONFIRMING, UNMASKING)
    assert driver.states()["c4"] == ("REPORTED" if fixed else "FAILED")
    driver.reach(UNMASKING)
    everyone = [f"c{n}" for n in range(5)]
    expected = {ADVERTISING: (everyone[:4], []), SHARING: (everyone[:4], []), COLLECTING: (everyone[:4], ["c4"])}
    assert driver.survivors() == [expected.get(phase, (everyone, []))]
    driver.reach(COMMITTING)
    driver.commit()
    assert driver.job.latest.num_updates == (5 if fixed else 4)


def test_the_update_of_a_revoked_client_is_taken_out_of_the_sum() -> None:
    driver = advertising(5, 5).reach(COLLECTING)
    driver.report_masked("c4", "c0", "c1", "c2")
    driver.do(ClientRevoked("c4"))
    assert driver.states()["c4"] == "DROPPED"
    proposal = driver.report_masked("c3")
    assert names(proposal) == ["Fold", "Restart", "Fold", "Fold", "Fold", "Fold", "NextStep"]
    assert commands_of(proposal, Restart) == [Restart(driver.key)]
    assert [each.assignment.client_id for each in commands_of(proposal, Fold)[1:]] == ["c0", "c1", "c2", "c3"]
    assert driver.survivors() == [(["c0", "c1", "c2", "c3"], ["c4"])]


def test_in_memory_the_update_of_a_revoked_client_fails_the_attempt() -> None:
    driver = advertising(5, 5, durability="memory").reach(COLLECTING)
    driver.report_masked("c4")
    driver.do(ClientRevoked("c4"))
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert "an update in memory cannot be removed" in driver.attempt.reason


# --- two attempts and two jobs ---


def test_two_jobs_do_not_mix_their_clients() -> None:
    jobs = [make_job(name, make_secure_spec(3)) for name in ("a", "j")]
    driver = SecureDriver(*jobs)
    driver.operate(JobAction.START, "a")
    driver.do(*map(make_secure_client, ("c0", "c1", "c2")))
    driver.operate(JobAction.START, "j")
    driver.do(*map(make_secure_client, ("d0", "d1", "d2")))
    driver.reach(COMMITTING)
    driver.commit()
    first = driver.coordinator.jobs["a"].attempt
    assert first is not None
    assert (first.phase, len(first.busy)) == (ADVERTISING, 3)
    assert secure_phases.list_groups(first) == []
