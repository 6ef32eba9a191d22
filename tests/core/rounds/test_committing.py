"""How an attempt becomes a version: aggregation, weights and metrics."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fedplat.rounds import Verdict
from fedplat.rounds.commands import Fold
from fedplat.rounds.events import (
    AggregationFailed,
    AttemptAggregated,
)
from fedplat.rounds.states import AttemptPhase, Reason
from support.rounds.driver import Driver, assigned, collecting, commands_of, make_aggregated, make_job, make_spec

# --- committing ---


@pytest.mark.parametrize("when", ["collecting", "committing"])
def test_an_aggregation_that_fails_is_an_attempt_that_failed(when: str) -> None:
    driver = collecting(2)
    driver.report("c0", *(["c1"] if when == "committing" else []))
    proposal = driver.do(AggregationFailed(driver.key, "disk full"))
    assert proposal.verdicts[0].accepted
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert driver.attempt.reason == "aggregation failed: disk full"
    assert driver.states()["c0"] == "DROPPED"
    assert driver.job.failures == 1
    assert driver.job.latest.version == 0
    again = driver.do(AggregationFailed(driver.key, "disk full"))
    assert again.verdicts == [Verdict(Reason.STALE)]


def test_a_version_of_fewer_updates_than_were_accepted_is_not_committed() -> None:
    driver = collecting(2)
    driver.report("c0", "c1")
    driver.do(make_aggregated(driver.job, num_updates=1))
    assert driver.attempt.reason == "1 of 2 accepted updates were aggregated"
    assert (driver.job.latest.version, driver.job.failures) == (0, 1)


def test_a_version_that_comes_too_late_or_too_early_is_refused() -> None:
    driver = collecting(2)
    early = make_aggregated(driver.job)
    assert driver.verdict(early) == Verdict(Reason.STALE)
    driver.report("c0", "c1")
    done = driver.aggregated()
    driver.commit()
    assert driver.verdict(done) == Verdict(Reason.STALE)
    other = AttemptAggregated(done.key._replace(number=9), done.version)
    assert driver.verdict(other) == Verdict(Reason.STALE)
    assert driver.job.latest.version == 1


def test_a_version_of_an_earlier_attempt_is_refused_while_the_next_one_commits() -> None:
    driver = collecting(2)
    driver.report("c0", "c1")
    late = driver.aggregated()
    driver.do(AggregationFailed(driver.key, "disk full"))
    assert driver.job.resume_at is not None
    driver.wait(driver.job.resume_at - driver.now)
    driver.check_in("c2", "c3")
    driver.report("c2", "c3")
    assert (driver.key.number, driver.attempt.phase) == (2, AttemptPhase.COMMITTING)
    assert driver.verdict(late) == Verdict(Reason.STALE)
    assert driver.job.latest.version == 0
    driver.commit()
    assert driver.job.latest.attempt == 2


# --- weights and metrics ---


@pytest.mark.parametrize(
    ("updates", "examples", "weights"),
    [
        ({"max_weight_factor": 0.0}, (3.0, 2_000_000.0), (3.0, 1_000_000.0)),
        ({"max_examples": 10.0}, (3.0, 11.0), (3.0, 10.0)),
        ({"weighting": "uniform", "max_examples": 10.0}, (3.0, 11.0), (1.0, 1.0)),
    ],
)
@pytest.mark.fault("F26")
def test_weights(updates: object, examples: tuple[float, float], weights: tuple[float, float]) -> None:
    driver = collecting(2, updates=updates)
    proposals = [driver.report(name, num_examples=n) for name, n in zip(("c0", "c1"), examples, strict=True)]
    assert tuple(commands_of(proposal, Fold)[0].contribution.weight for proposal in proposals) == weights
    assert tuple(a.num_examples for a in driver.attempt.assignments.values()) == examples


def test_metrics_are_weighted_means_over_those_who_have_them() -> None:
    driver = collecting(3, goal=3)
    reports: dict[str, tuple[float, dict[str, float]]] = {
        "c0": (10, {"loss": 1.0, "accuracy": 0.5}),
        "c1": (30, {"loss": 2.0}),
        "c2": (60, {"loss": -4.0, "accuracy": 0.75}),
    }
    for client_id, (num_examples, metrics) in reports.items():
        driver.report(client_id, num_examples=num_examples, **metrics)
    key = driver.key
    driver.commit()
    for name in ("loss", "accuracy"):
        pairs = [(metrics[name], weight) for weight, metrics in reports.values() if name in metrics]
        values, weights = np.array(pairs).T
        assert driver.ledger.attempts[key].metrics[name] == pytest.approx(np.average(values, weights=weights))


@pytest.mark.fault("F46")
def test_an_attempt_has_the_metrics_that_most_reports_have() -> None:
    driver = collecting(4, goal=4)
    driver.report("c0", "c1", loss=1.0)
    driver.report("c2", loss=1.0, of_half=1.0)
    driver.report("c3", loss=1.0, of_half=1.0, **{f"mine-{n}": 1.0 for n in range(64)})
    key = driver.key
    driver.commit()
    assert driver.ledger.attempts[key].metrics == {"loss": 1.0}


@pytest.mark.fault("F46")
def test_an_attempt_has_a_bounded_number_of_metrics() -> None:
    driver = collecting(3, goal=3)
    common = {f"common-{n}": 1.0 for n in range(40)}
    driver.report("c0", **common)
    driver.report("c1", **{f"x-{n}": 1.0 for n in range(40)}, **common)
    driver.report("c2", **{f"x-{n}": 1.0 for n in range(40)}, **common)
    key = driver.key
    driver.commit()
    found = driver.ledger.attempts[key].metrics
    assert len(found) == 64
    assert found.keys() > common.keys()


def test_no_report_makes_a_mean_infinite() -> None:
    driver = collecting(2, updates={"max_weight_factor": 0.0})
    driver.report("c0", num_examples=1e6, loss=sys.float_info.max)
    driver.report("c1", num_examples=3.0, loss=sys.float_info.max)
    key = driver.key
    driver.commit()
    assert driver.ledger.attempts[key].metrics == {"loss": pytest.approx(sys.float_info.max)}


def test_over_selection_and_the_minimum_are_rounded_up() -> None:
    driver = Driver(make_job(spec=make_spec(10, selection={"over_selection": 1.1, "min_fraction": 0.31}))).start(20)
    assert (driver.attempt.target, driver.attempt.goal, driver.attempt.minimum) == (11, 10, 4)
    assert driver.counts() == {"TRAINING": 11}
    assert len(assigned(driver.check_in("late"))) == 0
