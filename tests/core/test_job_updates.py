"""How a job says that updates are weighted and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat import aggregate, model
from fedplat.errors import JobFileError
from fedplat.job import parse_job

SMALL = """
name = "a"
population = "p"
trainer = "t"
rounds = 3
[model]
initial = "m:f"
[selection]
goal = 4
"""


def test_clip_norm_bounds_each_update():
    text = f"{SMALL}[updates]\nclip_norm = 1.0\n[aggregation]\nrule = 'fedavg'\n"
    update = model.VectorBlocks(np.array([3.0, 4.0], np.float32))
    for file, norm in ((SMALL, 5.0), (text, 1.0)):
        rule = parse_job(file).rule()
        step, _ = rule.apply(rule.init(2), rule.fold(rule.start(2), update, aggregate.Contribution(1.0)))
        assert np.linalg.norm(step) == pytest.approx(norm)


def test_a_bound_may_follow_the_norms():
    rule = parse_job(f"{SMALL}[updates.adaptive_clip]\ninitial_norm = 1.0\n").rule()
    assert rule.start(2).scalars == {"clip_norm": 1.0}


def test_there_is_one_bound():
    with pytest.raises(JobFileError, match=r"updates.clip_norm = 1.0: expected 0 beside adaptive_clip"):
        parse_job(f"{SMALL}[updates]\nclip_norm = 1.0\nadaptive_clip = {{}}\n")


def test_a_rule_that_takes_weights_for_what_they_are_needs_equal_ones():
    with pytest.raises(JobFileError, match=r'aggregation.rule = "fedbuff": it needs \[updates\] weighting = "uniform"'):
        parse_job(f'{SMALL}[aggregation]\nrule = "fedbuff"\n')
