"""The settings of a job file for the weights and bounds of updates."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat import aggregate, model
from fedplat.errors import JobFileError
from fedplat.job import build_rule, parse_job
from support.jobs import SMALL


def test_clip_norm_bounds_each_update():
    text = f"{SMALL}[updates]\nclip_norm = 1.0\n[aggregation]\nrule = 'fedavg'\n"
    update = model.VectorBlocks(np.array([3.0, 4.0], np.float32))
    for file, norm in ((SMALL, 5.0), (text, 1.0)):
        rule = build_rule(parse_job(file))
        step, _ = rule.apply(rule.init(2), rule.fold(rule.start(2), update, aggregate.Contribution(1.0)))
        assert np.linalg.norm(step) == pytest.approx(norm)


def test_a_bound_may_follow_the_norms():
    rule = build_rule(parse_job(f"{SMALL}[updates.adaptive_clip]\ninitial_norm = 1.0\n"))
    assert rule.start(2).scalars == {"clip_norm": 1.0}


def test_there_is_one_bound():
    with pytest.raises(JobFileError, match=r"updates.clip_norm = 1.0: expected 0 with adaptive_clip"):
        parse_job(f"{SMALL}[updates]\nclip_norm = 1.0\nadaptive_clip = {{}}\n")


def test_a_rule_that_takes_weights_for_what_they_are_needs_equal_ones():
    with pytest.raises(JobFileError, match=r'aggregation.rule = "fedbuff": it needs \[updates\] weighting = "uniform"'):
        parse_job(f'{SMALL}[aggregation]\nrule = "fedbuff"\n')


PRIVATE = """
[selection]
goal = 100
close = "deadline"
[updates]
clip_norm = 1.0
weighting = "uniform"
{}
[privacy]
participation = "fixed"
noise_multiplier = 1.0
delta = 1e-5
"""
MEDIAN = "[robust]\nbyzantine = 1\nrule = { name = 'median' }\n"


@pytest.mark.parametrize(
    ("tables", "outlier", "weight"),
    [
        ("", 1000.0, 10.0),
        ("[updates]\noutlier_factor = 5\nmax_weight_factor = 2", 5.0, 2.0),
        ("[updates]\noutlier_factor = 0\nmax_weight_factor = 0", 0.0, 0.0),
        ("[updates]\nclip_norm = 1", 0.0, 10.0),
        ("[updates]\nclip_norm = 1\noutlier_factor = 5", 5.0, 10.0),
        ("[updates.adaptive_clip]", 0.0, 10.0),
        (MEDIAN, 0.0, 10.0),
        ("[updates]\nweighting = 'uniform'", 1000.0, 0.0),
    ],
)
def test_what_bounds_a_single_client_by_default(tables: str, outlier: float, weight: float):
    spec = parse_job(SMALL + tables)
    assert (spec.outlier_factor, spec.max_weight_factor) == (outlier, weight)
    assert spec.weight(100.0, 0, 30.0) == (30.0 if spec.updates.weighting == "examples" else 1.0)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ("[updates]\noutlier_factor = 0.5", "expected at least 1, or 0 to turn it off"),
        ("[updates]\nmax_weight_factor = -1", "max_weight_factor = -1"),
        ("[updates]\nweighting = 'uniform'\nmax_weight_factor = 2", "all updates weigh the same"),
        ("[updates]\nmax_norm = -1", "max_norm = -1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(tables: str, words: str):
    with pytest.raises(JobFileError, match=words):
        parse_job(SMALL + tables)


@pytest.mark.parametrize("setting", ["max_norm = 1.0", "outlier_factor = 10.0"])
def test_private_jobs_clip_and_judge_no_client_by_the_others(setting: str):
    base = SMALL[: SMALL.index("[selection]")] if "[selection]" in SMALL else SMALL.replace("selection.goal = 4\n", "")
    assert parse_job(base + PRIVATE.format("")).outlier_factor == 0.0
    with pytest.raises(JobFileError, match=f"updates.{setting.split(maxsplit=1)[0]} = .*clipping bounds each update"):
        parse_job(base + PRIVATE.format(setting))
