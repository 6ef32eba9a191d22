"""Robust rules beside byzfl and Flower on the same updates; benchmarks/peers/robust_references.py makes the numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.aggregate import Contribution, Robust, weighted_mean
from fedplat.aggregate.robust import (
    Bulyan,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NearestNeighbours,
    RobustRule,
    TrimmedMean,
)
from fedplat.model import VectorBlocks

REFERENCES: Mapping[str, Any] = json.loads(Path(__file__).with_name("robust_references.json").read_text())
F: int = REFERENCES["byzantine"]
NUM_UPDATES = 15
NEAREST = (NearestNeighbours(),)
RULES: Mapping[str, Robust] = {
    "byzfl median": Robust(Median(), F),
    "byzfl trimmed mean": Robust(TrimmedMean(), F),
    "byzfl krum": Robust(Krum(), F),
    "byzfl multi-krum, one less": Robust(MultiKrum(keep=NUM_UPDATES - F - 1), F),
    "byzfl geometric median, 3 iterations": Robust(GeometricMedian(smoothing=0.1, iterations=3), F),
    "byzfl geometric median": Robust(GeometricMedian(), F),
    "byzfl centered clipping": Robust(CenteredClipping(radius=0.5, iterations=2), F),
    "byzfl nearest, median": Robust(Median(), F, NEAREST),
    "byzfl nearest, geometric median": Robust(GeometricMedian(smoothing=0.1, iterations=3), F, NEAREST),
    "flower median": Robust(Median(), F),
    "flower trimmed mean": Robust(TrimmedMean(), F),
    "flower krum": Robust(Krum(), F),
    "flower multi-krum": Robust(MultiKrum(), F),
    "flower bulyan": Robust(Bulyan(), F),
}


@pytest.mark.parametrize("attack", REFERENCES["cohorts"])
@pytest.mark.parametrize("name", RULES)
def test_equal_to_the_others(name: str, attack: str) -> None:
    found = REFERENCES["cohorts"][attack]
    assert found["results"].keys() == RULES.keys()
    updates, expected = np.array(found["updates"], np.float32), np.array(found["results"][name])
    rule = RULES[name].build(0)(weighted_mean())
    state = rule.init(updates.shape[1])
    for one in expected.reshape(-1, updates.shape[1]):  # of a rule that remembers, some rounds
        partial = rule.start(updates.shape[1])
        for update in updates:
            partial = rule.fold(partial, VectorBlocks(update), Contribution(1.0))
        assert rule.gather is not None
        remembered = {each: VectorBlocks(vector) for each, vector in state.items()}
        step, state = rule.apply(state, rule.gather(remembered, partial))
        np.testing.assert_allclose(step, one, rtol=0, atol=2e-6)


def test_every_rule_that_they_have_is_compared() -> None:
    compared: set[type[RobustRule]] = {type(robust.rule) for robust in RULES.values()}
    assert compared == {Median, TrimmedMean, Krum, MultiKrum, GeometricMedian, CenteredClipping, Bulyan}
