from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.aggregate import RULES, Contribution, Rule, clip_by_norm, l2_norm, weighted_mean
from fedplat.model import BLOCK, Vector, VectorBlocks
from support.rules import make_rule


def folded(rule: Rule, update: Vector, weight: float = 1.0) -> Vector:
    partial = rule.fold(rule.start(update.size), VectorBlocks(update), Contribution(weight))
    return rule.apply(rule.init(update.size), partial)[0]


@pytest.mark.parametrize("size", [1, 1000, BLOCK, 2 * BLOCK + 9])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_the_norm_is_numpys_in_float64(size: int, scale: float):
    vector = (np.random.default_rng(size).normal(size=size) * scale).astype(np.float32)
    assert l2_norm(VectorBlocks(vector)) == pytest.approx(float(np.linalg.norm(vector.astype(np.float64))), rel=1e-12)


def test_the_norm_of_nothing_is_zero():
    assert l2_norm(VectorBlocks(np.zeros(0, np.float32))) == 0


def test_a_long_update_is_scaled_to_the_bound():
    update = np.array([3, 4], np.float32)
    np.testing.assert_allclose(folded(clip_by_norm(1.0)(weighted_mean()), update), [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("update", [[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]])
def test_an_update_within_the_bound_is_kept_bit_for_bit(update: list[float]):
    vector = np.array(update, np.float32)
    assert folded(clip_by_norm(5.0)(weighted_mean()), vector).tobytes() == vector.tobytes()


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 500),
    scale=st.floats(1e-10, 1e20),
    max_norm=st.floats(1e-6, 1e6),
)
def test_nothing_is_folded_beyond_the_bound(seed: int, size: int, scale: float, max_norm: float):
    update = (np.random.default_rng(seed).normal(size=size) * scale).astype(np.float32)
    step = folded(clip_by_norm(max_norm)(weighted_mean()), update)
    assert l2_norm(VectorBlocks(step)) <= max_norm
    assert l2_norm(VectorBlocks(step)) == pytest.approx(min(max_norm, l2_norm(VectorBlocks(update))), rel=1e-5)


def test_the_callers_update_is_not_changed():
    update = np.full(BLOCK + 1, 7, np.float32)
    update.flags.writeable = False
    folded(clip_by_norm(0.1)(weighted_mean()), update)
    assert (update == 7).all()


def test_the_weight_counts_in_full_for_a_clipped_update():
    rule = clip_by_norm(1.0)(weighted_mean())
    partial = rule.fold(rule.start(1), VectorBlocks(np.array([100], np.float32)), Contribution(3.0))
    partial = rule.fold(partial, VectorBlocks(np.array([0], np.float32)), Contribution(1.0))
    assert partial.weight == 4
    np.testing.assert_allclose(rule.apply({}, partial)[0], [0.75], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_without_a_norm_is_refused(value: float):
    with pytest.raises(ValueError, match="NaN or infinite"):
        folded(clip_by_norm(1.0)(weighted_mean()), np.array([0, value], np.float32))


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_bound_is_refused(max_norm: float):
    with pytest.raises(ValueError, match="max_norm"):
        clip_by_norm(max_norm)


@pytest.mark.parametrize(
    "name", sorted(RULES.keys() - {"fednova", "qfedavg"})
)  # they look at the update as it was sent
def test_clipping_inside_and_outside_a_server_optimizer_is_the_same(name: str):
    updates = [np.random.default_rng(seed).normal(size=50).astype(np.float32) for seed in range(3)]
    outside = clip_by_norm(0.5)(make_rule(name))
    inside = make_rule(name)
    partials = outside.start(50), inside.start(50)
    for update in updates:
        # A clipped update that is folded again is within the bound, so the second clip does nothing.
        once = folded(clip_by_norm(0.5)(weighted_mean()), update)
        partials = (
            outside.fold(partials[0], VectorBlocks(update), Contribution(1.0)),
            inside.fold(partials[1], VectorBlocks(once), Contribution(1.0)),
        )
    left = outside.apply(outside.init(50), partials[0])[0]
    right = inside.apply(inside.init(50), partials[1])[0]
    assert left.tobytes() == right.tobytes()
