"""Rules that look at more of a report than its weight: FedNova, q-FedAvg, FedBuff."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.aggregate import Contribution, FedAvg, FedBuff, FedNova, QFedAvg, Rule, clip_by_norm
from fedplat.model import Vector, VectorBlocks

SIZE = 50


def step_of(rule: Rule, *updates: tuple[Vector, Contribution]) -> Vector:
    partial = rule.start(SIZE)
    for update, contribution in updates:
        partial = rule.fold(partial, VectorBlocks(update), contribution)
    return rule.apply(rule.init(SIZE), partial)[0]


def update(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def after(steps: float, weight: float = 1.0, **more: float) -> Contribution:
    return Contribution(weight, metrics={"local_steps": steps, **more})


def test_fednova_of_equal_steps_is_fedavg():
    updates = [(update(seed), after(5, seed + 1.0)) for seed in range(4)]
    np.testing.assert_allclose(step_of(FedNova().build(), *updates), step_of(FedAvg().build(), *updates), rtol=1e-5)


def test_fednova_ends_where_the_objective_is_least():
    """Section 3: with f_i = (x - e_i)²/2 and unequal steps FedAvg ends at a wrong point; FedNova at the mean of e_i."""
    steps, optima, rate = np.array([2, 20]), np.array([0.0, 1.0]), 0.01
    ends = dict[str, float]()
    for name, rule in {"fedavg": FedAvg().build(), "fednova": FedNova().build()}.items():
        x = 0.3
        for _ in range(400):
            moved = (optima - x) * (1 - (1 - rate) ** steps)
            folded = [(np.full(SIZE, m, np.float32), after(float(n))) for m, n in zip(moved, steps, strict=True)]
            x += float(step_of(rule, *folded)[0])
        ends[name] = x
    # Surrogate objectives are weighted by the steps (Theorem 1); what is left is of the order of the rate.
    assert ends["fedavg"] == pytest.approx(20 / 22, abs=0.02)
    assert ends["fednova"] == pytest.approx(0.5, abs=0.05)


def test_fednova_counts_effective_steps_where_they_are_reported():
    counted = step_of(FedNova().build(), (update(1), after(5)), (update(2), after(35)))
    reported = step_of(FedNova().build(), (update(1), after(5)), (update(2), after(7, effective_steps=35)))
    assert counted.tobytes() == reported.tobytes()


@pytest.mark.parametrize("claimed", [1e3, 1e5, 1e30])
def test_no_claim_of_steps_scales_the_updates_of_all_others(claimed: float):
    honest = [(update(seed), after(10)) for seed in range(9)]
    liar = (np.zeros(SIZE, np.float32), after(claimed))
    moved, believed = step_of(FedNova().build(), *honest, liar), step_of(FedNova().build(), *honest)
    factor = float(moved @ believed / (believed @ believed))
    # Nine of ten have 10 steps, and the tenth counts for at most 10 times the median: (9 x 10 + 100) / 10 of 10.
    assert factor == pytest.approx(0.9 * (9 + 10) / 10)


@pytest.mark.parametrize("claimed", [0.01, 1.0, 1e9])
def test_no_claim_of_steps_decides_the_model(claimed: float):
    """A claim counts as at least a tenth of the median, and at most ten times it; the order has no effect."""
    values, steps = np.array([0.1] * 9 + [-0.1]), np.array([100.0] * 9 + [min(max(claimed, 10.0), 1000.0)])
    expected = steps.mean() * np.mean(values / steps)
    assert expected > -0.01
    reports = [(np.full(SIZE, value, np.float32), after(100.0)) for value in values[:9]]
    liar = (np.full(SIZE, -0.1, np.float32), after(claimed))
    for updates in ([*reports, liar], [liar, *reports]):
        np.testing.assert_allclose(step_of(FedNova().build(), *updates), expected, rtol=1e-3)


def test_unequal_steps_within_the_limit_count_as_in_the_paper():
    steps = (1, 4, 10, 30, 70)
    updates = [(update(seed), after(number)) for seed, number in enumerate(steps)]
    expected = np.mean(steps) * np.mean(
        [each / number for (each, _), number in zip(updates, steps, strict=True)], axis=0
    )
    np.testing.assert_allclose(step_of(FedNova().build(), *updates), expected, rtol=1e-4)


@pytest.mark.parametrize(("claimed", "believed"), [(0.0, 1.0), (0.01, 1.0), (1e9, 50.0)])
def test_fednova_believes_possible_steps_only(claimed: float, believed: float):
    rule = FedNova(max_local_steps=50).build()
    other = (update(2), after(10))
    lying, honest = (step_of(rule, (update(1), after(steps)), other) for steps in (claimed, believed))
    assert lying.tobytes() == honest.tobytes()


def test_a_bound_on_the_norm_holds_for_what_the_client_sent():
    rule = clip_by_norm(1.0)(FedNova().build())
    assert rule.metrics == {"local_steps"}
    long = step_of(rule, (np.float32(1000) * update(1), after(5)), (update(2), after(50)))
    short = step_of(rule, (update(1) / np.float32(2), after(5)), (update(2), after(50)))
    np.testing.assert_allclose(long, short, rtol=1e-4)


def losing(loss: float, weight: float = 1.0) -> Contribution:
    return Contribution(weight, metrics={"loss_before": loss})


def test_q_fedavg_without_q_is_the_mean():
    updates = [(update(seed), losing(0.1 + seed, seed + 1.0)) for seed in range(4)]
    mean = step_of(FedAvg().build(), *updates)
    np.testing.assert_allclose(step_of(QFedAvg(q=0).build(), *updates), mean, rtol=1e-5, atol=1e-7)


def test_q_fedavg_turns_to_who_loses_more():
    up, down = np.ones(SIZE, np.float32), -np.ones(SIZE, np.float32)
    for q, sign in ((1.0, 1), (0.0, 0)):
        step = step_of(QFedAvg(q=q).build(), (up, losing(2.0)), (down, losing(0.5)))
        assert (np.sign(step) == sign).all()


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, 5.0])
def test_a_client_that_loses_nothing_is_no_error(q: float):
    step = step_of(QFedAvg(q=q).build(), (update(1), losing(0.0)), (update(2), losing(1.0)))
    assert np.isfinite(step).all()


def test_q_fedavg_believes_possible_losses_only():
    rule = QFedAvg(max_loss=10.0).build()
    lying, honest = (step_of(rule, (update(1), losing(loss)), (update(2), losing(1.0))) for loss in (1e20, 10.0))
    assert lying.tobytes() == honest.tobytes()


@pytest.mark.parametrize("q", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("claimed", [0.0, 0.01, 1000.0])
def test_no_claim_of_a_loss_decides_the_model(q: float, claimed: float):
    """Algorithm 2, with a claim of at least a tenth of the median, and at most ten times the weight of the others."""
    values = np.array([0.1] * 9 + [-0.1])
    losses = np.array([1.0] * 9 + [min(max(claimed, 0.1), 10 ** (1 / max(q, 1.0)))])
    norms = SIZE * values**2
    bounds = losses**q + q * losses ** (q - 1) * norms / 0.1
    expected = (losses**q * values).sum() / bounds.sum()
    reports = [(np.full(SIZE, value, np.float32), losing(1.0)) for value in values[:9]]
    liar = (np.full(SIZE, -0.1, np.float32), losing(claimed))
    for updates in ([*reports, liar], [liar, *reports]):
        np.testing.assert_allclose(step_of(QFedAvg(q=q).build(), *updates), expected, rtol=1e-4)


def test_a_buffer_of_stale_updates_moves_the_model_less():
    """Nguyen et al.: s(3) = 0.5, and the divisor stays K."""
    fresh = step_of(FedBuff().build(), *[(update(seed), Contribution(1.0)) for seed in range(4)])
    stale = step_of(FedBuff().build(), *[(update(seed), Contribution(0.5, staleness=3)) for seed in range(4)])
    np.testing.assert_array_equal(fresh, 2 * stale)
    np.testing.assert_allclose(fresh, np.mean([update(seed) for seed in range(4)], axis=0), rtol=1e-5, atol=1e-7)
