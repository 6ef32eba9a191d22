"""How much one client may change a job: outliers, weights, and what a revoked client has reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedplat.rounds import Proposal
from fedplat.rounds.commands import Commit, Fold
from fedplat.rounds.events import ClientRevoked, UpdateReported
from fedplat.rounds.states import AttemptPhase, Reason
from support.rounds.driver import Driver, collecting, commands_of, make_job, make_spec, names

WIDE = {"over_selection": 2.0, "min_fraction": 0.5}


def report(driver: Driver, client_id: str, norm: float = 1.0, num_examples: float = 10.0) -> Proposal:
    return driver.do(UpdateReported(driver.key_of(client_id), client_id, f"of-{client_id}", num_examples, norm=norm))


def lower_median(values: Sequence[float]) -> float:
    """The reference: NumPy's order statistic."""
    return float(np.percentile(values, 50, method="lower"))


def folded(proposal: Proposal) -> list[str]:
    return [command.assignment.client_id for command in commands_of(proposal, Fold)]


def weights(proposal: Proposal) -> dict[str, float]:
    """The weights of a proposal's folds; after a restart, of those that are folded again."""
    return {command.assignment.client_id: command.contribution.weight for command in commands_of(proposal, Fold)}


@pytest.mark.fault("F43")
@pytest.mark.parametrize(
    ("norms", "factor", "dropped"),
    [
        ((1.0, 2.0, 3.0, 3e3), 1000.0, ()),  # 1,500 times the median, 2; the reference finds it
        ((1.0, 2.0, 3.0, 2001.0), 1000.0, (3,)),
        ((2001.0, 1.0, 2.0, 3.0), 1000.0, (0,)),
        ((1.0, 1.0, 11.0, 12.0), 10.0, (2, 3)),
        ((0.0, 0.0, 0.0, 1e20), 1000.0, ()),  # no positive median
        ((1.0, 1.0, 1.0, 1e9), 0.0, ()),
    ],
)
def test_outliers_are_dropped_and_the_rest_is_folded_again(
    norms: tuple[float, ...], factor: float, dropped: tuple[int, ...]
) -> None:
    median = lower_median(norms)
    expected = [i for i, norm in enumerate(norms) if factor and median and norm > factor * median]
    if dropped:
        assert expected == list(dropped)
    driver = collecting(4, goal=4, selection={"min_fraction": 0.5}, updates={"outlier_factor": factor})
    last = [report(driver, f"c{i}", norm) for i, norm in enumerate(norms)][-1]
    assert driver.attempt.phase is AttemptPhase.COMMITTING
    left = [f"c{i}" for i in range(4) if i not in expected]
    assert [each.client_id for each in driver.attempt.reported] == left
    (commit,) = commands_of(last, Commit)
    assert commit.num_updates == len(left)
    if expected:
        kinds = names(last)
        assert kinds[kinds.index("Restart") + 1 : kinds.index("Commit")] == ["Fold"] * len(left)
        for i in expected:
            row = driver.attempt.assignments[f"c{i}"]
            assert (str(row.state), row.reason) == ("REJECTED", Reason.REJECTED_OUTLIER)
            for number in (norms[i], factor, median):
                assert f"{number:.6g}" in row.text
    else:
        assert "Restart" not in names(last)
    driver.commit()
    assert driver.job.latest.num_updates == len(left)


@pytest.mark.fault("F43")
def test_an_outlier_that_closes_the_attempt_gets_no_receipt() -> None:
    driver = collecting(4, goal=4, selection={"min_fraction": 0.5})
    for i in range(3):
        report(driver, f"c{i}")
    verdict = report(driver, "c3", 1e9).verdicts[0]
    assert verdict.reason is Reason.REJECTED_OUTLIER
    assert "its norm is 1e+09, more than 1000 times 1, the median of the attempt's updates" in verdict.text
    again = report(driver, "c3", 1e9).verdicts[0]
    assert again == verdict


@pytest.mark.fault("F43")
def test_without_the_outlier_the_attempt_waits_for_others_as_if_it_had_failed() -> None:
    driver = collecting(6, goal=3, selection={"over_selection": 2.0, "min_fraction": 1.0})
    for client_id, norm in (("c0", 1e9), ("c1", 1.0), ("c2", 1.0)):
        report(driver, client_id, norm)
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    assert driver.states()["c0"] == "REJECTED"
    last = report(driver, "c3")
    assert driver.attempt.phase is AttemptPhase.COMMITTING
    assert folded(last) == ["c3", "c1", "c2", "c3"], "expected the last report, and then all reports again"
    driver.commit()
    assert driver.job.round == 1


@pytest.mark.fault("F43")
def test_too_few_without_the_outlier_is_an_attempt_that_failed_and_names_it() -> None:
    driver = collecting(3, goal=3, selection={"min_fraction": 1.0})
    for client_id, norm in (("c0", 1e9), ("c1", 1.0), ("c2", 1.0)):
        report(driver, client_id, norm)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert "2 of at least 3 needed clients reported" in driver.attempt.reason
    assert "dropped as outliers: c0: its norm is 1e+09, more than 1000 times 1" in driver.attempt.reason


@pytest.mark.fault("F44")
@pytest.mark.parametrize("factor", [0.0, 1.0, 10.0])
@pytest.mark.parametrize(
    "claims",
    [
        (100.0, 100.0, 100.0, 1e15),
        (1e15, 100.0, 90.0, 110.0),
        (3.0, 700.0, 10.0, 20.0, 5.0),
        (1e-6, 1e-6, 5.0),
    ],
)
def test_a_weight_counts_a_multiple_of_the_median_at_most(claims: tuple[float, ...], factor: float) -> None:
    num = len(claims)
    updates = {"max_weight_factor": factor}
    driver = collecting(num, goal=num, selection={"min_fraction": 0.5}, updates=updates)
    last = [report(driver, f"c{i}", num_examples=claim) for i, claim in enumerate(claims)][-1]
    claimed = np.minimum(claims, driver.job.spec.updates.max_examples)
    expected = np.minimum(claimed, factor * lower_median(claimed.tolist())) if factor else claimed
    assert [each.weight for each in driver.attempt.reported] == expected.tolist()
    assert ("Restart" in names(last)) == (expected != claimed).any()
    assert [each.num_examples for each in driver.attempt.reported] == list(claims), "the claims must stay as they are"


@pytest.mark.fault("F44")
def test_metrics_are_weighed_by_what_counts_and_so_are_those_of_evaluations() -> None:
    evaluation: dict[str, Any] = {"clients": {"evaluator": "digits-eval", "goal": 3, "timeout_s": 20.0}}
    driver = collecting(3, goal=3, evaluation=evaluation)

    def play(values: Sequence[tuple[float, float]]) -> float:
        key = driver.key
        for client_id, (examples, loss) in zip(list(driver.attempt.assignments), values, strict=True):
            driver.report(client_id, num_examples=examples, loss=loss)
        if driver.attempt.phase is AttemptPhase.COMMITTING:
            driver.commit()
        return driver.ledger.attempts[key].metrics["loss"]

    reports = ((100.0, 1.0), (100.0, 1.0), (1e15, 7.0))
    expected = np.average([1.0, 1.0, 7.0], weights=[100.0, 100.0, 1000.0])
    assert play(reports) == pytest.approx(expected)
    driver.check_in("c0", "c1", "c2")
    assert str(driver.attempt.kind) == "EVALUATE"
    assert play(reports) == pytest.approx(expected)


# --- attempts with too few reports to judge by themselves ---


@pytest.mark.fault("F43")
def test_a_job_in_memory_abandons_the_attempt_once_and_refuses_the_culprit_then() -> None:
    spec = make_spec(4, durability="memory", selection={"over_selection": 1.25, "min_fraction": 0.75})
    driver = Driver(make_job(spec=spec)).start(5)
    for client_id, norm in (("c0", 1e9), ("c1", 1.0), ("c2", 1.0), ("c3", 1.0)):
        report(driver, client_id, norm)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert "an update in memory cannot be removed from the sum: c0: its norm is 1e+09" in driver.attempt.reason
    assert "c0: its norm is 1e+09" in driver.job.reason
    driver.check_in(*(f"c{i}" for i in range(5)))
    driver.wait(30.0)
    driver.check_in(*(f"c{i}" for i in range(5)))
    verdict = report(driver, "c0", 1e9).verdicts[0]
    assert verdict.reason is Reason.REJECTED_OUTLIER
    assert "of the job's latest updates" in verdict.text
    for i in range(1, 5):
        report(driver, f"c{i}")
    driver.commit()
    assert driver.job.round == 1


@pytest.mark.fault("F44")
def test_a_job_in_memory_caps_weights_by_what_its_clients_claimed() -> None:
    spec = make_spec(3, durability="memory", selection={"over_selection": 1.0})
    driver = Driver(make_job(spec=spec)).start(3)
    each = [weights(report(driver, f"c{i}", num_examples=n)) for i, n in enumerate((100.0, 100.0, 1e9))]
    assert each == [{"c0": 100.0}, {"c1": 100.0}, {"c2": 1000.0}]
    driver.commit()
    assert driver.job.round == 1


@pytest.mark.fault("F44")
def test_a_job_in_memory_whose_first_report_claims_too_much_tries_again() -> None:
    spec = make_spec(3, durability="memory", selection={"over_selection": 1.0})
    driver = Driver(make_job(spec=spec)).start(3)
    for i, n in enumerate((1e9, 100.0, 100.0)):
        report(driver, f"c{i}", num_examples=n)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert "cannot be changed: c0 (weight 1e+06, of at most 1000)" in driver.attempt.reason
    driver.check_in("c0", "c1", "c2")
    driver.wait(30.0)
    driver.check_in("c0", "c1", "c2")
    for i, n in enumerate((1e9, 100.0, 100.0)):
        report(driver, f"c{i}", num_examples=n)
    driver.commit()
    assert driver.job.round == 1


def fedasync(**updates: Any) -> Driver:
    mode = {"kind": "buffered", "concurrency": 5}
    driver = Driver(make_job(spec=make_spec(1, 50, mode=mode, updates=updates))).start(5)
    for i in range(3):
        report(driver, f"c{i}")
        driver.commit()
        driver.check_in(f"c{i}")
    return driver


@pytest.mark.fault("F43")
def test_a_buffer_of_one_refuses_an_outlier_by_the_latest_reports() -> None:
    driver = fedasync()
    version = driver.job.latest.version
    verdict = report(driver, "c4", 1e9).verdicts[0]
    assert verdict.reason is Reason.REJECTED_OUTLIER
    assert driver.job.latest.version == version
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    report(driver, "c3")
    driver.commit()
    assert driver.job.latest.version == version + 1


def test_one_client_has_one_voice_and_most_of_them_may_move_the_measure() -> None:
    driver = fedasync()
    for _ in range(30):  # a client that always returns
        assert not report(driver, "c4", 1e9).verdicts[0].accepted
        driver.check_in("c4")
    refused = [not report(driver, f"c{i}", 1e9).verdicts[0].accepted for i in (0, 1)]
    assert refused == [True, False], "with c1 most of the five clients have such norms"


# --- norms that no job takes ---


@pytest.mark.fault("F43")
@pytest.mark.parametrize(
    ("updates", "norm", "examples", "text"),
    [
        ({"max_norm": 5.0}, 5.1, 1.0, "the update's norm is 5.1; the job accepts at most updates.max_norm = 5"),
        ({}, 3e38, 1.0, "the update's norm is 3e+38 and its weight 1; their product may be 2.5e+29 at most"),
        ({"outlier_factor": 0.0}, 1e27, 1e6, "the update's norm is 1e+27 and its weight 1e+06"),
    ],
)
def test_a_norm_is_refused_at_the_report(updates: dict[str, float], norm: float, examples: float, text: str) -> None:
    driver = collecting(4, goal=3, selection=WIDE | {"over_selection": 1.3}, updates=updates)
    verdict = report(driver, "c0", norm, examples).verdicts[0]
    assert verdict.reason is Reason.REJECTED_NORM
    assert text in verdict.text
    assert (driver.states()["c0"], driver.attempt.assignments["c0"].norm) == ("REJECTED", norm)
    assert not driver.ledger.folded


def test_a_private_job_keeps_no_norm_and_judges_none() -> None:
    updates = {"clip_norm": 1.0, "weighting": "uniform"}
    privacy = {"noise_multiplier": 1.0, "delta": 1e-5, "participation": "fixed"}
    selection = {"close": "deadline"}
    driver = collecting(3, goal=3, updates=updates, privacy=privacy, selection=selection)
    for i, norm in enumerate((1.0, 1.0, 3e38)):
        assert report(driver, f"c{i}", norm).verdicts[0].accepted
    assert {each.norm for each in driver.attempt.assignments.values()} == {None}
    assert driver.attempt.num_reported == 3


# --- revocation ---


@pytest.mark.fault("F45")
def test_a_revoked_client_takes_its_report_with_it() -> None:
    driver = collecting(4, goal=3, selection={"over_selection": 1.3, "min_fraction": 0.5})
    report(driver, "c0")
    report(driver, "c1")
    driver.do(ClientRevoked("c1"))
    row = driver.attempt.assignments["c1"]
    assert (str(row.state), row.reason) == ("DROPPED", Reason.REVOKED)
    report(driver, "c2")
    last = report(driver, "c3")
    assert folded(last) == ["c3", "c0", "c2", "c3"]
    driver.commit()
    assert driver.job.latest.num_updates == 3


@pytest.mark.fault("F45")
def test_a_revoked_client_that_waits_or_works_is_out_as_well() -> None:
    driver = collecting(4, goal=3, selection={"over_selection": 1.3})
    driver.check_in("late")
    driver.do(ClientRevoked("late"), ClientRevoked("c0"), ClientRevoked("stranger"))
    assert "late" not in driver.coordinator.room.clients
    assert (driver.states()["c0"], driver.reasons()["c0"]) == ("FAILED", "REVOKED")


@pytest.mark.fault("F45")
def test_a_version_that_is_being_made_keeps_the_report_of_a_client_that_is_revoked_now() -> None:
    driver = collecting(3, goal=3)
    for i in range(3):
        report(driver, f"c{i}")
    driver.do(ClientRevoked("c1"))
    assert driver.states()["c1"] == "REPORTED"
    driver.commit()
    assert driver.job.latest.num_updates == 3


@pytest.mark.fault("F45")
def test_in_memory_a_revocation_abandons_the_attempt() -> None:
    driver = collecting(4, goal=3, durability="memory", selection={"over_selection": 1.3})
    report(driver, "c0")
    driver.do(ClientRevoked("c0"))
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert "c0 was revoked" in driver.attempt.reason


# --- crashes ---


@pytest.mark.fault("F43")
@pytest.mark.parametrize("when", ["collecting", "committing"])
def test_after_a_crash_exactly_the_remaining_updates_are_folded_in_the_same_order(when: str) -> None:
    goal = 4 if when == "committing" else 5
    driver = collecting(6, goal=goal, selection={"over_selection": 6 / goal, "min_fraction": 0.5})
    for i, (norm, examples) in enumerate(((1.0, 10.0), (1e9, 10.0), (1.0, 1e6), (1.0, 20.0))):
        report(driver, f"c{i}", norm, examples)
    if when == "committing":
        report(driver, "c4", 1.0, 30.0)
    before = driver.attempt
    again = driver.crash()
    assert driver.attempt.phase is before.phase
    assert [(each.client_id, each.weight) for each in before.reported] == list(weights(again).items())
    if when == "committing":
        assert list(weights(again).items()) == [("c0", 10.0), ("c2", 200.0), ("c3", 20.0), ("c4", 30.0)]
