"""Rounds of jobs with `[privacy]`: no minimum, releases of noise alone, metrics withheld, and a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fedplat.rounds.commands import Commit, Fold
from fedplat.rounds.events import JobAction
from fedplat.rounds.states import AttemptPhase, JobStatus
from support.rounds.driver import Driver, commands_of, make_aggregated, make_client
from support.rounds.private_jobs import private


def poisson(rate: float, wait_for: int, **sections: Any) -> Driver:
    return private("poisson", {"sampling": {"policy": "poisson", "rate": rate}, "wait_for": wait_for}, **sections)


def test_an_attempt_commits_at_its_deadline_with_whatever_came() -> None:
    driver = private().start(2)
    driver.report("c0")
    proposals = driver.wait(200.0)
    assert [each.num_updates for proposal in proposals for each in commands_of(proposal, Commit)] == [1]


def test_an_attempt_of_which_nothing_came_is_a_release_all_the_same() -> None:
    driver = private().start(2)
    (commit,) = commands_of(driver.give_up("c0", "c1"), Commit)
    assert commit.num_updates == 0
    driver.commit()
    assert driver.job.round == 1
    assert driver.job.latest.num_updates == 0


def test_an_attempt_that_drew_no_client_is_still_a_release() -> None:
    driver = poisson(1e-9, 3)
    driver.start(3)
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    assert not driver.attempt.assignments
    (proposal,) = driver.wait(WHOLE_S)
    assert [each.num_updates for each in commands_of(proposal, Commit)] == [0]
    driver.commit()
    assert driver.job.round == 1


# How long every attempt takes, and what its drawn clients may do meanwhile.
WHOLE_S = 130.0
BEHAVIOURS: dict[str, Callable[[Driver, list[str]], None]] = {
    "all report at once": lambda driver, drawn: note(driver.report(*drawn)),
    "all fail": lambda driver, drawn: note(driver.give_up(*drawn)),
    "all are lost": lambda driver, drawn: None,
    "one is slow": lambda driver, drawn: slow(driver, drawn[-1], drawn[:-1], 50.0),
    "an upload begins at the last moment": lambda driver, drawn: slow(driver, drawn[-1], drawn[:-1], 99.0, upload=29.0),
    "the server dies at once": lambda driver, drawn: note(driver.crash()),
}


def note(_: object) -> None:
    """Ignores a proposal."""


def slow(driver: Driver, last: str, others: list[str], after_s: float, upload: float = 0.0) -> None:
    driver.report(*others)
    driver.wait(after_s)
    driver.upload(last)
    driver.wait(upload)
    driver.report(last)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_version_comes_at_one_moment_whatever_was_drawn_and_whatever_they_do(behaviour: str) -> None:
    driver = poisson(1.0, 4, rounds=4).start(4)
    begun, drawn = driver.now, sorted(driver.attempt.assignments)
    assert drawn == ["c0", "c1", "c2", "c3"]
    BEHAVIOURS[behaviour](driver, drawn)
    if behaviour == "the server dies at once":
        begun = driver.now  # the new server has another clock
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    driver.wait(begun + WHOLE_S - driver.now - 1e-6)
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    driver.wait(1e-6)
    assert driver.attempt.phase is AttemptPhase.COMMITTING


@pytest.mark.parametrize("rate", [1e-9, 1.0])
def test_after_a_crash_an_attempt_has_its_whole_time_for_any_draw(rate: float) -> None:
    """Only an attempt that drew clients knows its remaining time, so that time must not matter."""
    driver = poisson(rate, 4).start(4)
    assert bool(driver.attempt.assignments) == (rate == 1.0)
    driver.wait(70.0)
    driver.crash(down_s=3.0)
    back = driver.now
    driver.wait(WHOLE_S - 1e-6)
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    driver.wait(1e-6)
    assert (driver.attempt.phase, driver.now) == (AttemptPhase.COMMITTING, back + WHOLE_S)


def test_gaps_between_versions_do_not_tell_who_was_drawn() -> None:
    """One client takes longer than the others: an observer of the versions cannot guess which rounds have it."""
    driver = poisson(0.5, 6, rounds=40, deadlines={"training_s": 60.0, "upload_s": 30.0}).start(6)
    gaps, has_slow = list[float](), list[bool]()
    for _ in range(40):
        begun, drawn = driver.now, sorted(driver.attempt.assignments)
        driver.report(*(client for client in drawn if client != "c0"))
        if "c0" in drawn:
            driver.wait(1.0)
            driver.report("c0")
        driver.check_in(*drawn)
        while driver.attempt.phase is AttemptPhase.COLLECTING:
            driver.wait(1.0)
        gaps.append(driver.now - begun)
        has_slow.append("c0" in drawn)
        driver.commit()
    assert 10 < sum(has_slow) < 30
    assert len(set(gaps)) == 1, f"{sum(has_slow)} of 40 rounds have the slow client, gaps: {sorted(set(gaps))}"


def test_no_client_is_drawn_before_enough_wait() -> None:
    """The number of waiting clients is public; how many of them were drawn is secret."""
    driver = poisson(1.0, 3).start(2)
    driver.wait(61.0)
    assert driver.job.round == 0
    (reason,) = [row.reason for row in driver.ledger.history["j"] if row.to_state == "ABANDONED"]
    assert "2 of at least 3 needed clients" in reason
    assert not [row for row in driver.ledger.history["j"] if row.entity == "assignment"]
    driver.check_in("c2")
    assert set(driver.attempt.assignments) == {"c0", "c1", "c2"}


def test_without_trials_the_selection_needs_as_many_as_ever() -> None:
    driver = private(selection={"min_fraction": 1.0}).start(1)
    driver.wait(61.0)
    assert [row.entity for row in driver.ledger.history["j"] if row.to_state == "ABANDONED"] == ["attempt"]


def test_a_client_s_metrics_are_not_kept_unless_they_are_released_with_noise() -> None:
    metrics = {"noise_multiplier": 2.0, "bounds": {"loss": (0.0, 5.0)}}
    for options, kept in (({}, {}), ({"metrics": metrics}, {"loss": 2.0})):
        driver = private(privacy=options).start(2)
        (fold,) = commands_of(driver.report("c0", loss=2.0, accuracy=0.5), Fold)
        assert fold.contribution.metrics == kept
        assert driver.attempt.assignments["c0"].metrics == kept
        driver.report("c1")
        driver.do(dataclasses.replace(make_aggregated(driver.job), metrics={"loss": 2.5}))
        rows = [row for row in driver.ledger.history["j"] if row.to_state == "COMMITTED"]
        assert [row.metrics for row in rows] == [{"loss": 2.5}]


def test_a_job_pauses_before_the_round_that_would_exceed_its_budget() -> None:
    driver = private(rounds=5, privacy={"max_releases": 1, "epsilon": 2.0}).start(2)
    driver.play_round()
    assert driver.job.status is JobStatus.PAUSED
    assert "epsilon = 2" in driver.job.reason
    assert "round 2 would exceed it" in driver.job.reason
    refused = driver.operate(JobAction.RESUME)
    assert not refused.accepted
    assert "cannot resume: its privacy budget" in refused.text
    assert driver.job.round == 1


def test_abandoned_attempts_cost_nothing() -> None:
    driver = private(rounds=5, privacy={"max_releases": 1}).start(2)
    driver.operate(JobAction.PAUSE)
    driver.operate(JobAction.RESUME)
    driver.do(*(make_client(name) for name in ("c0", "c1")))
    assert driver.attempt.key.number == 2
    driver.play_round()
    assert driver.job.round == 1


def test_a_private_attempt_continues_after_a_crash() -> None:
    driver = private().start(2)
    driver.report("c0")
    driver.crash()
    driver.wait(200.0)
    driver.commit()
    assert driver.job.latest.num_updates == 1
