"""The server is killed in each phase of a secure aggregation: it continues with the same sets, or tries again."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.rounds.commands import Commit, Fold
from fedplat.rounds.protocols import secure_phases
from fedplat.rounds.states import AttemptPhase, Reason
from support.rounds.driver import commands_of, names
from support.rounds.secure_driver import SecureDriver, advertising, answer_event, keys_event, shares_event

ADVERTISING, SHARING, COLLECTING = AttemptPhase.ADVERTISING, AttemptPhase.SHARING, AttemptPhase.COLLECTING
CONFIRMING, UNMASKING, COMMITTING = AttemptPhase.CONFIRMING, AttemptPhase.UNMASKING, AttemptPhase.COMMITTING
PHASES = [ADVERTISING, SHARING, COLLECTING, CONFIRMING, UNMASKING, COMMITTING]
OPTIONS = {"confirm": True, "threshold": 0.6, "step_s": 20.0}


def begin(phase: AttemptPhase, **sections: Any) -> SecureDriver:
    """One of six clients has dropped out after it had shared, and two have taken the step of the phase."""
    driver = advertising(6, 6, options=OPTIONS, **sections)
    if phase in PHASES[3:]:
        driver.reach(COLLECTING)
        driver.give_up("c5")
    driver.reach(phase)
    steps = {
        ADVERTISING: driver.advertise,
        SHARING: driver.share,
        COLLECTING: driver.report_masked,
        CONFIRMING: driver.confirm,
        UNMASKING: driver.answer,
    }
    if phase in steps:
        steps[phase]("c1", "c0")
    return driver


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("down_s", [0.0, 19.0, 5000.0])
def test_an_attempt_continues_with_the_same_sets(phase: AttemptPhase, down_s: float) -> None:
    driver = begin(phase, deadlines={"training_s": 10_000.0})
    key, groups, survivors = driver.key, driver.groups(), driver.survivors()
    messages = {name: each.secure for name, each in driver.attempt.assignments.items()}
    proposal = driver.crash(down_s)
    assert (driver.key, driver.attempt.phase) == (key, phase)
    assert (driver.groups(), driver.survivors()) == (groups, survivors)
    assert {name: each.secure for name, each in driver.attempt.assignments.items()} == messages
    folded = ["c1", "c0"] if phase is COLLECTING else driver.names("REPORTED")
    assert sorted(each.assignment.client_id for each in commands_of(proposal, Fold)) == sorted(folded)
    assert commands_of(proposal, Commit) == ([Commit(key, 0, 5)] if phase is COMMITTING else [])
    driver.reach(COMMITTING)
    driver.commit()
    assert driver.job.latest.num_updates == (5 if phase in PHASES[3:] else 6)


@pytest.mark.parametrize(
    ("phase", "left_s"),
    [(ADVERTISING, 93.0), (SHARING, 20.0), (COLLECTING, 30.0), (CONFIRMING, 20.0), (UNMASKING, 20.0)],
)
def test_a_step_gets_its_whole_time_again_but_not_the_training(phase: AttemptPhase, left_s: float) -> None:
    driver = begin(phase)
    driver.crash(down_s=7.0)
    assert driver.timers == {"j": driver.now + left_s}
    if phase in (CONFIRMING, UNMASKING):
        assert driver.attempt.step_ends_at == driver.now + left_s
    driver.wait(left_s - 0.1)
    assert driver.attempt.phase is phase


@pytest.mark.parametrize("phase", PHASES[:5])
@pytest.mark.parametrize("clock_s", [-86_400.0, 86_400.0])
def test_a_clock_that_was_set_leaves_the_steps_their_time(phase: AttemptPhase, clock_s: float) -> None:
    driver = begin(phase)
    driver.crash(clock_s=clock_s)
    if phase is ADVERTISING and clock_s > 0.0:  # the deadline of the training has passed
        assert driver.attempt.reason.startswith("2 of at least 3 needed clients sent their keys (2 advertised, 4 late)")
        return
    assert driver.attempt.phase is phase
    longest = 100.0 if phase is ADVERTISING else 30.0 if phase is COLLECTING else 20.0
    assert driver.now < driver.timers["j"] <= driver.now + longest
    driver.reach(COMMITTING)


@pytest.mark.parametrize("phase", PHASES)
def test_in_memory_the_attempt_is_abandoned(phase: AttemptPhase) -> None:
    driver = begin(phase, durability="memory")
    key, unmasked = driver.key, driver.attempt.num_survivors
    driver.crash()
    abandoned = driver.ledger.attempts[key]
    assert (abandoned.phase, abandoned.reason) == (AttemptPhase.ABANDONED, "the server was restarted")
    assert abandoned.num_survivors == unmasked
    assert (driver.key, driver.job.failures) == (("j", 1, 2), 0)
    assert driver.coordinator.num_busy == 0
    assert driver.verdict(answer_event(key, "c0")).reason is Reason.STALE


@pytest.mark.parametrize("phase", [CONFIRMING, UNMASKING])
def test_what_is_still_missing_is_counted_again(phase: AttemptPhase) -> None:
    driver = begin(phase)
    awaited = driver.attempt.num_awaited
    assert awaited > 0
    driver.crash()
    assert driver.attempt.num_awaited == awaited
    driver.reach(COMMITTING)


def test_a_message_that_comes_again_after_a_restart_is_accepted_and_another_is_refused() -> None:
    driver = begin(COLLECTING)
    driver.crash()
    for make in (keys_event, shares_event):
        proposal = driver.do(make(driver.key, "c2"), make(driver.key, "c2", "other"))
        assert [each.reason for each in proposal.verdicts] == [None, Reason.REJECTED_CONFLICT]
        assert proposal.changes == []


def test_crashes_after_every_step_lose_nothing() -> None:
    driver = advertising(5, 5, options=OPTIONS)
    key = driver.key
    steps = (driver.advertise, driver.share, driver.report_masked, driver.confirm, driver.answer)
    for phase, step in zip(PHASES, steps, strict=False):
        for client_id in [f"c{n}" for n in range(5)]:
            if driver.attempt.phase is phase:  # the last phase ends before all have answered
                step(client_id)
                driver.crash(down_s=1.0)
    driver.commit()
    assert driver.job.latest.num_updates == 5
    assert driver.job.latest.attempt == key.number == 1


def test_a_server_that_was_killed_while_a_client_was_revoked_folds_only_the_survivors() -> None:
    driver = begin(COLLECTING)
    driver.report_masked("c2", "c3", "c4")
    driver.crash()
    proposal = driver.report_masked("c5")
    assert names(proposal) == ["Fold", "NextStep"]
    assert [
        len(found.survivors) for found in map(secure_phases.find_survivors, secure_phases.list_groups(driver.attempt))
    ] == [6]
