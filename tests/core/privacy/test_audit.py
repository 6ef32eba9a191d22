from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from fedplat.simulation.privacy_audit import Guesses, bound_of, lower_bound, p_value


def of_the_paper(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The algorithm of Appendix D, step by step."""
    q = 1 / (1 + math.exp(-epsilon))
    beta = binom.sf(v - 1, r, q)
    alpha = total = 0.0
    for i in range(1, v + 1):
        total += binom.pmf(v - i, r, q)
        if total > i * alpha:
            alpha = total / i
    return float(min(beta + alpha * delta * 2 * m, 1.0))


@pytest.mark.parametrize(
    "found", [Guesses(100, 100, 75), Guesses(1000, 50, 49), Guesses(10, 10, 0), Guesses(40, 20, 11)]
)
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_the_p_value_is_the_papers(found: Guesses, epsilon: float, delta: float) -> None:
    expected = of_the_paper(found.canaries, found.guesses, found.right, epsilon, delta)
    assert p_value(found, epsilon, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("found", "delta", "published"),
    [(Guesses(1000, 100, 75), 1e-4, 0.673), (Guesses(100_000, 1510, 1439), 1e-5, 2.675)],
    ids=["Appendix D", "Section 7"],
)
def test_the_published_bounds(found: Guesses, delta: float, published: float) -> None:
    assert lower_bound(found, delta) == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize("delta", [0.0, 0.003])
def test_no_randomized_response_is_right_more_often(delta: float) -> None:
    """Each answer is the truth with delta, else right as epsilon allows: the tail is known."""
    epsilon, canaries = 1.1, 60
    rate = delta + (1 - delta) / (1 + math.exp(-epsilon))
    for right in range(canaries + 1):
        tail = float(binom.sf(right - 1, canaries, rate))
        value = p_value(Guesses(canaries, canaries, right), epsilon, delta)
        assert value >= tail - 1e-12
        assert delta or value == pytest.approx(tail)


def test_a_bound_is_where_the_p_value_is_the_level() -> None:
    all_right = lower_bound(Guesses(100, 100, 100), 0.0)
    assert all_right == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)), abs=1e-9)
    found = Guesses(500, 200, 170)
    assert p_value(found, lower_bound(found, 1e-5, 0.99), 1e-5) == pytest.approx(0.01)
    assert lower_bound(found, 1e-5, 0.99) < lower_bound(found, 1e-5, 0.9) < lower_bound(found, 0.0, 0.9)
    assert lower_bound(Guesses(100, 100, 50), 0.0) == lower_bound(Guesses(2, 2, 2), 1e-5) == 0.0


def test_bounds_of_randomized_response_are_near_the_truth_and_seldom_above() -> None:
    rng = np.random.default_rng(1)
    truth, canaries = 2.0, 2000
    above, found = 0, 0.0
    for _ in range(8):
        included = rng.random(canaries) < 0.5
        told = included ^ (rng.random(canaries) < 1 / (1 + math.exp(truth)))
        found = bound_of(told + 0.1 * rng.random(canaries), included, 1e-6).epsilon
        above += found > truth
        assert found > truth - 0.4
    assert above <= 1


def test_guesses_are_the_highest_and_the_lowest_scores() -> None:
    included = np.arange(20) >= 9  # the middle is guessed wrong
    bound = bound_of(np.arange(20.0), included, 0.0, 0.9, shares=(0.9,))
    assert bound.best == Guesses(20, 18, 18)
    assert bound_of(np.arange(20.0), included, 0.0, 0.9, shares=(1.0,)).best == Guesses(20, 20, 19)
    # Several numbers of guesses share the chance of an error.
    assert bound_of(np.arange(20.0), included, 0.0, 0.9).epsilon < bound.epsilon
