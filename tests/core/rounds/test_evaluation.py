"""Federated evaluation: clients score committed models and report metrics only."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.rounds import Verdict
from fedplat.rounds.commands import Assign
from fedplat.rounds.events import UpdateReported, UploadStarted
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus, Reason
from support.rounds.driver import Driver, aborted, assigned, commands_of, make_client, make_job, make_spec, names

EVERYBODY = ("c0", "c1", "c2", "c3")


def make_driver(rounds: int = 2, every: int = 1, **clients: Any) -> Driver:
    clients = {"evaluator": "digits-eval", "goal": 2} | clients
    spec = make_spec(2, rounds, evaluation={"every": every, "clients": clients})
    return Driver(make_job(spec=spec)).start(2)


def report_scores(driver: Driver, **scores: float) -> None:
    key = driver.key
    driver.do(*(UpdateReported(key, name, "", 10.0, {"accuracy": score}) for name, score in scores.items()))


def test_a_committed_model_is_evaluated_by_clients() -> None:
    driver = make_driver()
    driver.play_round()
    assert driver.attempt.kind is AttemptKind.EVALUATE
    assert driver.key == ("j", 1, 2)
    proposal = driver.check_in("c0", "c1")
    commands = commands_of(proposal, Assign)
    assert [(c.kind, c.base_version, c.training_timeout_s, c.upload_timeout_s) for c in commands] == [
        (AttemptKind.EVALUATE, 1, 60.0, 0.0)
    ] * 2
    driver.wait(1)
    key, durations = driver.key, driver.job.durations
    proposal = driver.do(*(UpdateReported(key, name, "", 10.0, {"accuracy": 0.5}) for name in ("c0", "c1")))
    assert names(proposal) == []  # nothing to fold, nothing to commit
    row = driver.ledger.attempts[key]
    assert (row.phase, row.metrics) == (AttemptPhase.COMMITTED, {"accuracy": 0.5})
    assert driver.job.durations == durations  # the durations of evaluations are not those of training
    assert (driver.job.round, driver.job.latest.version) == (1, 1)
    assert driver.key == ("j", 2, 1)


@pytest.mark.parametrize(
    ("rounds", "every", "expected"), [(3, 1, [1, 2, 3]), (5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 9, [3])]
)
def test_which_rounds_are_evaluated(rounds: int, every: int, expected: list[int]) -> None:
    driver = make_driver(rounds, every)
    evaluated: list[int] = []
    while driver.is_running:
        if driver.attempt.kind is AttemptKind.EVALUATE:
            evaluated.append(driver.key.round)
            driver.check_in("c0", "c1")
            report_scores(driver, c0=1.0, c1=0.0)
        else:
            if not driver.attempt.assignments:
                driver.check_in("c0", "c1")
            driver.play_round()
    assert evaluated == expected
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.job.latest.version == rounds


@pytest.mark.parametrize("how", ["nobody came", "everybody failed", "too late"])
def test_an_evaluation_that_fails_is_not_tried_again(how: str) -> None:
    driver = make_driver(rounds=1)
    driver.play_round()
    key = driver.key
    if how == "nobody came":
        driver.wait(60)
    else:
        driver.check_in("c0", "c1")
        if how == "everybody failed":
            driver.give_up("c0", "c1")
        else:
            (proposal,) = driver.wait(60)
            assert aborted(proposal) == {"c0": "TRAIN_TIMEOUT", "c1": "TRAIN_TIMEOUT"}
    assert driver.ledger.attempts[key].phase is AttemptPhase.ABANDONED
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.job.failures == 0


def test_half_of_the_evaluators_are_enough_at_the_deadline() -> None:
    driver = make_driver(goal=4)
    driver.play_round()
    key = driver.key
    driver.check_in(*EVERYBODY)
    report_scores(driver, c0=1.0, c1=0.5)
    driver.wait(60)
    assert driver.ledger.attempts[key].metrics == {"accuracy": 0.75}


def test_an_evaluation_wants_evaluators_and_training_wants_trainers() -> None:
    driver = make_driver()
    driver.play_round()
    trainers = [make_client(f"t{i}", evaluators=frozenset[str]()) for i in range(2)]
    evaluators = [make_client(f"e{i}", trainers=frozenset[str]()) for i in range(2)]
    proposal = driver.do(*trainers, *evaluators)
    assert assigned(proposal) == ["e0", "e1"]
    key = driver.key
    proposal = driver.do(*(UpdateReported(key, name, "", 1.0) for name in ("e0", "e1")))
    assert assigned(proposal) == ["t0", "t1"]


def test_an_evaluation_has_no_update_to_upload() -> None:
    driver = make_driver()
    driver.play_round()
    driver.check_in("c0", "c1")
    deadline = driver.attempt.assignments["c0"].deadline_at
    verdict = driver.verdict(UploadStarted(driver.key, "c0"))
    assert verdict == Verdict(Reason.REJECTED_DIGEST, "an evaluation has no update")
    assert driver.attempt.assignments["c0"].deadline_at == deadline


def test_over_selection_is_for_training_only() -> None:
    driver = make_driver(goal=3)
    driver.play_round()
    assert (driver.attempt.target, driver.attempt.goal, driver.attempt.minimum) == (3, 3, 2)
