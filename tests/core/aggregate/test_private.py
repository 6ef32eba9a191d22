"""The wrapper that makes releases: against NumPy, with drop-outs, uneven weights, and arbitrary updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from fedplat.aggregate import (
    Accumulator,
    AdaptiveClip,
    Contribution,
    FedAdam,
    FedAvg,
    Rule,
    clip_by_norm,
    clip_by_quantile,
    state_from_bytes,
    state_to_bytes,
)
from fedplat.aggregate.clipping import Release, privatize
from fedplat.model import WINDOW, Parameters, VectorBlocks
from fedplat.privacy import KEY_BYTES, Noise, PublishedMetrics, Tree

SIZE = 12
NOISE = Noise(bytes(KEY_BYTES))
FIXED = Release(noise_multiplier=0.5, clip=2.0, expected_weight=8.0, expected_reports=10)


def ruled(release: Release, noise: Noise | None = NOISE, inner: Rule | None = None) -> Rule:
    clip = clip_by_quantile(release.clip) if isinstance(release.clip, AdaptiveClip) else clip_by_norm(release.clip)
    return privatize(release, noise)(clip(inner or FedAvg().build()))


def step_of(rule: Rule, updates: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    model = Parameters.from_arrays({"w": np.zeros(updates[0].size if updates else SIZE, np.float32)})
    accumulator = Accumulator(model.schema, rule)
    for update, weight in zip(updates, weights, strict=True):
        accumulator.fold(Parameters.from_arrays({"w": update.astype(np.float32)}), Contribution(weight))
    return accumulator.finish(model, rule.init(model.schema.num_floating))[0]["w"]


def updates_of(count: int, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [scale * rng.normal(size=SIZE) for _ in range(count)]


def test_a_release_is_the_clipped_sum_and_noise_over_a_constant() -> None:
    updates, weights = updates_of(4), [1.0, 0.5, 0.25, 1.0]
    clipped = [update * min(1, 2.0 / np.linalg.norm(update)) for update in updates]
    expected = np.average(clipped, axis=0, weights=weights) * sum(weights) + NOISE.normal("sum", 0, SIZE)
    assert step_of(ruled(FIXED), updates, weights) == pytest.approx(expected / 8.0, rel=1e-5)


def test_without_reports_only_the_noise_is_left() -> None:
    assert step_of(ruled(FIXED), [], []) == pytest.approx(NOISE.normal("sum", 0, SIZE) / 8.0, rel=1e-6)


@pytest.mark.parametrize("sent", [0.0, 1.0, -1.0, 1e6])
def test_one_client_changes_the_release_by_the_norm_over_the_constant_at_most(sent: float) -> None:
    others, one = updates_of(3), np.eye(SIZE)[0] * 2.0 * sent
    with_it, without = (step_of(ruled(FIXED), updates, [1.0] * len(updates)) for updates in ([*others, one], others))
    assert np.linalg.norm(with_it - without) <= 2.0 / 8.0 * (1 + 1e-5)
    assert np.linalg.norm(with_it - without) == pytest.approx(min(abs(sent), 1.0) * 0.25, abs=1e-6)


def test_long_models_are_noised_column_by_column() -> None:
    size = WINDOW + 1000
    step = step_of(ruled(FIXED), [np.zeros(size)], [1.0])
    assert np.array_equal(step, (NOISE.normal("sum", 0, size).astype(np.float32) / np.float32(8.0)))


def test_a_server_optimizer_works_on_what_is_noised() -> None:
    rule = ruled(FIXED, inner=FedAdam(learning_rate=0.1).build())
    plain = FedAdam(learning_rate=0.1).build()
    partial = dataclasses.replace(
        plain.start(SIZE), total=NOISE.normal("sum", 0, SIZE).astype(np.float32), weight=8.0, num_updates=1
    )
    assert np.array_equal(step_of(rule, [], []), plain.apply(plain.init(SIZE), partial)[0])


def test_without_noise_nothing_is_released() -> None:
    with pytest.raises(ValueError, match="without noise"):
        step_of(ruled(FIXED, None), updates_of(2), [1.0, 1.0])
    with pytest.raises(ValueError, match="not calibrated"):
        step_of(ruled(dataclasses.replace(FIXED, noise_multiplier=None)), updates_of(2), [1.0, 1.0])


def test_no_update_weighs_more_than_one() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        step_of(ruled(FIXED), updates_of(1), [1.5])


def scalars_after(rule: Rule, updates: Sequence[np.ndarray], before: Mapping[str, float]) -> Mapping[str, float]:
    model = Parameters.from_arrays({"w": np.zeros(SIZE, np.float32)})
    accumulator = Accumulator(model.schema, rule, before)
    for update in updates:
        accumulator.fold(Parameters.from_arrays({"w": update.astype(np.float32)}), Contribution(1.0))
    _, state = accumulator.finish(model, rule.init(SIZE))
    return state_from_bytes(state_to_bytes(state, accumulator.scalars))[1]


def test_adaptive_clipping_follows_a_noised_count() -> None:
    """Andrew et al. 2021, Algorithm 1: b = (sum of (b_i - 1/2) + N(0, deviation^2)) / m + 1/2."""
    clip = AdaptiveClip(quantile=0.5, learning_rate=0.2, initial_norm=3.0)
    release = Release(noise_multiplier=0.5, clip=clip, expected_weight=10.0, expected_reports=10, count_deviation=0.6)
    updates = [np.eye(SIZE)[0] * norm for norm in (1.0, 2.0, 4.0)]
    share = (1.5 - 1.0 - 0.5 + 0.5 + 0.6 * NOISE.normal("count", 0, 1)[0]) / 10 + 0.5
    expected = 3.0 * np.exp(-0.2 * (share - 0.5))
    assert scalars_after(ruled(release), updates, {})["clip_norm"] == pytest.approx(expected)
    assert release.sum_multiplier == pytest.approx((0.5**-2 - 1.2**-2) ** -0.5)
    noised = 3.0 * release.sum_multiplier * NOISE.normal("sum", 0, SIZE) + np.eye(SIZE)[0] * 6.0
    assert step_of(ruled(release), updates, [1.0] * 3) == pytest.approx(noised / 10, rel=1e-5)
    with pytest.raises(ValueError, match=r"expected above 0\.25"):
        _ = dataclasses.replace(release, count_deviation=0.25).sum_multiplier


def test_metrics_are_released_with_noise_of_their_own() -> None:
    metrics = PublishedMetrics(noise_multiplier=0.1, bounds={"loss": (0.0, 4.0), "accuracy": (0.0, 1.0)})
    rule = ruled(dataclasses.replace(FIXED, metrics=metrics))
    accumulator = Accumulator(Parameters.from_arrays({"w": np.zeros(SIZE, np.float32)}).schema, rule)
    reports = [{"loss": 3.0, "accuracy": 1.0}, {"loss": 1e9}, {"loss": float("nan"), "secret": 4.0}]
    for report in reports:
        accumulator.fold(Parameters.from_arrays({"w": np.zeros(SIZE, np.float32)}), Contribution(1.0, 1.0, report))
    noise = 0.1 * np.sqrt(2) * NOISE.normal("metrics", 0, 2)
    assert accumulator.published == pytest.approx(
        {"accuracy": 0.5 + 0.5 * (1.0 + noise[0]) / 10, "loss": 2.0 + 2.0 * (0.5 + 1.0 + noise[1]) / 10}
    )


def test_a_job_without_metrics_shows_none() -> None:
    accumulator = Accumulator(Parameters.from_arrays({"w": np.zeros(SIZE, np.float32)}).schema, ruled(FIXED))
    accumulator.fold(Parameters.from_arrays({"w": np.zeros(SIZE, np.float32)}), Contribution(1.0, 1.0, {"loss": 1.0}))
    assert accumulator.published == {}


def test_blocks_of_an_update_may_be_read_twice() -> None:
    """Clipping reads an update for its norm first."""
    rule = ruled(FIXED)
    partial = rule.fold(rule.start(3), VectorBlocks(np.array([3.0, 0.0, 4.0], np.float32)), Contribution(1.0))
    assert partial.total == pytest.approx([1.2, 0.0, 1.6], rel=1e-6)


def test_the_noise_of_a_tree_s_sum_is_that_of_its_open_nodes() -> None:
    """After round t the sum of all steps has the noise of as many nodes as t has ones in binary."""
    tree, rounds = Tree(11), 11
    release = dataclasses.replace(FIXED, tree=tree)
    scalars: Mapping[str, float] = {}
    total = np.zeros(SIZE)
    nodes: dict[int, np.ndarray] = {}
    for round_ in range(1, rounds + 1):
        noise = Noise(bytes([round_]) * KEY_BYTES)
        rule = ruled(release, noise)
        model = Parameters.from_arrays({"w": np.zeros(SIZE, np.float32)})
        accumulator = Accumulator(model.schema, rule, scalars)
        found, state = accumulator.finish(model, {})
        total += found["w"].astype(np.float64) * 8.0
        scalars = state_from_bytes(state_to_bytes(state, accumulator.scalars))[1]
        level = (round_ & -round_).bit_length() - 1
        nodes = {each: node for each, node in nodes.items() if each > level}
        nodes[level] = Noise(noise.derive_key("node")).normal("node", 0, SIZE)
        assert len(nodes) == round_.bit_count()
        assert total == pytest.approx(np.sum(list(nodes.values()), axis=0), abs=1e-4)
    with pytest.raises(ValueError, match="this would be round 12"):
        tree.after(scalars, NOISE)


def test_a_model_whose_integer_entries_would_be_released_is_refused() -> None:
    arrays = {"w": np.zeros(SIZE, np.float32), "steps": np.zeros(1, np.int64)}
    misfit = ruled(FIXED).requirements.misfit
    assert misfit(Parameters.from_arrays(arrays).schema) == ""
    assert "released without noise" in misfit(Parameters.from_arrays(arrays, "max").schema)
