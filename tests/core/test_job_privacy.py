"""The table `[privacy]` of a job file."""

from __future__ import annotations

import pytest

from fedplat.errors import JobFileError
from fedplat.job import JobSpec, build_rule, calibrate, find_mechanism, parse_job
from fedplat.privacy import Charge, Mechanism, accounting

BASE = """
name = "a"
population = "p"
trainer = "t"
rounds = 20
[model]
initial = "m:f"
"""
SELECTIONS = {
    "poisson": """[selection]
goal = 100
close = "deadline"
wait_for = 1000
sampling = { policy = "poisson", rate = 0.1 }
""",
    "fixed": '[selection]\ngoal = 100\nclose = "deadline"\n',
    "min_separation": '[selection]\ngoal = 100\nclose = "deadline"\nmin_separation = 4\n',
}


def job(participation: str = "poisson", privacy: str = "noise_multiplier = 1.5", more: str = "") -> JobSpec:
    updates = "" if "[updates" in more else '[updates]\nweighting = "uniform"\nclip_norm = 0.5\n'
    table = f'[privacy]\nparticipation = "{participation}"\ndelta = 1e-6\n{privacy}\n'
    return parse_job(BASE + SELECTIONS[participation] + updates + more + table)


def refusal(*arguments: str, **keywords: str) -> str:
    with pytest.raises(JobFileError) as caught:
        job(*arguments, **keywords)
    return str(caught.value)


def test_what_an_accountant_is_told() -> None:
    assert find_mechanism(job()) == Mechanism("poisson", 1.5, sampling_probability=0.1, overflow=1e-15 / 0.1)
    assert find_mechanism(job("fixed")) == Mechanism("fixed", 1.5)
    spec = job("min_separation", "noise_multiplier = 3\nmax_participations = 2")
    assert find_mechanism(spec) == Mechanism("tree", 3.0, separation=5, max_participations=2)
    assert find_mechanism(job(privacy="epsilon = 2.0")) is None


def test_a_round_with_metrics_is_one_release_with_more_noise_to_account_for() -> None:
    spec = job(privacy="noise_multiplier = 3\nmetrics = { noise_multiplier = 4, bounds = { loss = [0, 10] } }")
    assert spec.privacy is not None
    mechanism = find_mechanism(spec)
    assert mechanism is not None
    assert mechanism.noise_multiplier == pytest.approx(2.4)  # 1/9 + 1/16 = 25/144
    assert spec.privacy.model_multiplier(2.4) == pytest.approx(3.0, abs=2e-6)
    with pytest.raises(ValueError, match="expected more than 5"):
        spec.privacy.model_multiplier(5.0)


def test_examples_weigh_one_at_most() -> None:
    spec = job(more='[updates]\nweighting = "examples"\nmax_examples = 50\nclip_norm = 1\n')
    assert [spec.weight(count) for count in (10, 50, 1e9)] == [0.2, 1.0, 1.0]


def test_a_rule_of_a_private_job_releases_nothing_by_itself() -> None:
    for privacy in ("noise_multiplier = 1", "epsilon = 1"):
        rule = build_rule(job(privacy=privacy))
        with pytest.raises(ValueError, match="none of its results can be released"):
            rule.apply(rule.init(3), rule.start(3))


ADAPTIVE = '[updates]\nweighting = "uniform"\n[updates.adaptive_clip]\n'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("expected epsilon", {"privacy": ""}),
        ("needs a bound", {"more": '[updates]\nweighting = "uniform"\n'}),
        ("max_examples = 1e+06", {"more": "[updates]\nclip_norm = 1\n"}),
        ('aggregation.rule = "fednova"', {"more": '[aggregation]\nrule = "fednova"\n'}),
        ("robust", {"more": '[robust]\nbyzantine = 1\nrule = { name = "median" }\n'}),
        ("deadlines.adaptive", {"more": "[deadlines.adaptive]\npercentile = 80\n"}),
        ("evaluation.clients", {"more": '[evaluation.clients]\nevaluator = "e"\ngoal = 2\n'}),
        (
            "expected selection.goal above 120",
            {"privacy": "noise_multiplier = 12", "more": ADAPTIVE + "quantile = 0.2\n"},
        ),
        ("needs one bound", {"participation": "min_separation", "more": ADAPTIVE + "quantile = 0.2\n"}),
        (
            "whose noise spans all rounds",
            {
                "participation": "min_separation",
                "privacy": "noise_multiplier = 1\nmetrics = { noise_multiplier = 4, bounds = { loss = [0, 10] } }",
            },
        ),
        (
            "lowest value",
            {"privacy": "noise_multiplier = 1\nmetrics = { noise_multiplier = 4, bounds = { a = [1, 1] } }"},
        ),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, arguments: dict[str, str]) -> None:
    assert text in refusal(**arguments)


@pytest.mark.parametrize(
    ("participation", "old", "new", "text"),
    [
        ("poisson", 'close = "deadline"\n', "", 'expected "deadline"'),
        ("poisson", "wait_for = 1000\n", "", "selection.wait_for"),
        ("poisson", '{ policy = "poisson", rate = 0.1 }', '{ policy = "uniform" }', 'expected "poisson"'),
        ("poisson", "wait_for = 1000", "wait_for = 1000\nmin_separation = 2", "not drawn by a trial"),
        ("fixed", "goal = 100\n", 'goal = 100\nsampling = { policy = "poisson", rate = 0.5 }\n', 'expected "uniform"'),
        ("min_separation", "min_separation = 4", "min_separation = 0", "expected rounds above 0"),
    ],
)
def test_participation_is_that_of_the_selection(
    participation: str, old: str, new: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in SELECTIONS[participation]
    monkeypatch.setitem(SELECTIONS, participation, SELECTIONS[participation].replace(old, new))
    assert text in refusal(participation)


def test_buffered_jobs_are_not_private() -> None:
    text = refusal("fixed", more='[mode]\nkind = "buffered"\nconcurrency = 200\n')
    assert 'expected "sync"' in text or 'mode.kind = "sync"' in text


def test_a_settled_job_has_the_noise_that_its_budget_needs() -> None:
    spec = calibrate(job(privacy="epsilon = 2.0"))
    assert spec.privacy is not None
    mechanism = find_mechanism(spec)
    assert mechanism is not None
    assert spec.privacy.max_releases == 20
    cost = [accounting.epsilon([Charge(mechanism, count)], 1e-6) for count in (20, 21)]
    assert cost[0] <= 2.0 < cost[1] + 0.1
    assert calibrate(spec) == spec
    assert calibrate(job("fixed")).privacy is not None


def test_a_budget_that_is_given_beside_the_noise_bounds_the_releases() -> None:
    spec = calibrate(job("fixed", "noise_multiplier = 1.5\nepsilon = 6.0"))
    assert spec.privacy is not None
    mechanism = find_mechanism(spec)
    assert mechanism is not None
    most = spec.privacy.max_releases
    assert most is not None
    assert 0 < most < 20
    cost = [accounting.epsilon([Charge(mechanism, count)], 1e-6) for count in (most, most + 1)]
    assert cost[0] <= 6.0 < cost[1]
    fewer = calibrate(job("fixed", "noise_multiplier = 1.5\nepsilon = 1000.0\nmax_releases = 3")).privacy
    assert fewer is not None
    assert fewer.max_releases == 3


def test_a_budget_that_no_noise_keeps_is_refused_with_words() -> None:
    metrics = "metrics = { noise_multiplier = 0.1, bounds = { loss = [0, 10] } }"
    with pytest.raises(JobFileError, match=r"privacy\.metrics\.noise_multiplier = 0\.1: expected more than"):
        calibrate(job(privacy=f"epsilon = 0.5\n{metrics}"))
