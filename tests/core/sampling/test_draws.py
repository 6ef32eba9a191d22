"""What uniform, Poisson, weighted and stratified draws look like, by chi-square tests with fixed seeds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from fedplat.sampling import Poisson, Policy, Stratified, Uniform, Weighted
from fedplat.sampling.policies import OVERFLOW, divide_equally, round_shares
from support.waiting import Waiting, heard

NUM_DRAWS = 4000
SIGNIFICANCE = 0.01


def counts(policy: Policy, waiting: Waiting, count: int, seed: int, num_draws: int = NUM_DRAWS) -> list[int]:
    """How often each client is drawn."""
    rng = np.random.default_rng(seed)
    found = Counter(index for _ in range(num_draws) for index in policy.draw(waiting, count, rng))
    return [found[index] for index in range(len(waiting))]


def fits(observed: Sequence[float], expected: Sequence[float]) -> bool:
    return stats.chisquare(observed, expected).pvalue > SIGNIFICANCE


def test_every_set_of_clients_is_equally_likely() -> None:
    rng, waiting = np.random.default_rng(1), Waiting.of(5)
    drawn = Counter(frozenset(Uniform().draw(waiting, 2, rng)) for _ in range(NUM_DRAWS))
    assert len(drawn) == 10  # 5 choose 2
    assert fits(list(drawn.values()), [NUM_DRAWS / 10] * 10)


# --- Poisson ---


def test_the_number_of_trials_that_succeed_is_binomial() -> None:
    rng, policy, waiting = np.random.default_rng(2), Poisson(rate=0.2), Waiting.of(30)
    sizes = Counter(len(policy.draw(waiting, 1, rng)) for _ in range(NUM_DRAWS))
    chances = stats.binom.pmf(range(31), 30, 0.2) * NUM_DRAWS
    common = [size for size in range(31) if chances[size] >= 5]
    observed = [sizes[size] for size in common]
    expected = [float(chances[size]) for size in common]
    assert fits([*observed, NUM_DRAWS - sum(observed)], [*expected, NUM_DRAWS - sum(expected)])


def test_the_trials_of_two_clients_are_independent() -> None:
    rng, policy, waiting = np.random.default_rng(3), Poisson(rate=0.3), Waiting.of(9)
    pairs: Counter[tuple[bool, bool]] = Counter()
    for _ in range(NUM_DRAWS):
        drawn = policy.draw(waiting, 1, rng)
        pairs[0 in drawn, 5 in drawn] += 1
    both = [(True, True), (True, False), (False, True), (False, False)]
    expected = [NUM_DRAWS * (0.3 if a else 0.7) * (0.3 if b else 0.7) for a, b in both]
    assert fits([pairs[pair] for pair in both], expected)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.25, 0.5, 0.99])
@pytest.mark.parametrize("total", [1, 3, 10, 100, 3383, 10**6])
def test_the_cap_bites_as_rarely_as_it_may(total: int, rate: float) -> None:
    cap = Poisson(rate=rate).cap(total)
    assert cap == total or stats.binom.sf(cap, total, rate) < OVERFLOW
    if total * rate >= 10 and cap < total:  # and it bounds what a round costs
        assert cap < total * rate + 12 * (total * rate) ** 0.5


@pytest.mark.parametrize(("total", "rate", "cap"), [(1000, 0.01, 45), (7, 1.0, 7), (0, 0.5, 0)])
def test_no_more_are_drawn_than_the_cap(total: int, rate: float, cap: int) -> None:
    assert Poisson(rate=rate).cap(total) == cap

    class Unlucky(np.random.Generator):
        """All trials succeed."""

        def binomial(self, n: int, p: float) -> int:  # pyright: ignore
            return n

    drawn = Poisson(rate=rate).draw(Waiting.of(total), 1, Unlucky(np.random.PCG64(0)))
    assert len(set(drawn)) == min(cap, total)


# --- weighted ---


def test_one_client_is_drawn_in_proportion_to_its_label() -> None:
    weights = [1.0, 2.0, 3.0, 10.0]
    waiting = Waiting([{"size": str(weight)} for weight in weights])
    observed = counts(Weighted(label="size"), waiting, 1, seed=4)
    assert fits(observed, [NUM_DRAWS * weight / sum(weights) for weight in weights])


def test_several_are_drawn_one_after_the_other_among_those_that_are_left() -> None:
    """The chance of each pair, from the definition: w_i/W * w_j/(W - w_i), and the other way round."""
    weights = [1.0, 2.0, 4.0, 8.0]
    waiting = Waiting([{"size": str(weight)} for weight in weights])
    rng, total = np.random.default_rng(5), sum(weights)
    drawn = Counter(frozenset(Weighted(label="size").draw(waiting, 2, rng)) for _ in range(NUM_DRAWS))
    pairs = list(itertools.combinations(range(4), 2))
    expected = [
        sum(weights[a] / total * weights[b] / (total - weights[a]) for a, b in (pair, pair[::-1])) for pair in pairs
    ]
    assert fits([drawn[frozenset(pair)] for pair in pairs], [NUM_DRAWS * chance for chance in expected])


def test_without_a_label_examples_count_and_a_newcomer_is_as_likely_as_the_mean() -> None:
    waiting = Waiting.of(4, {0: heard(1.0, num_examples=10), 2: heard(1.0, num_examples=30)})
    observed = counts(Weighted(), waiting, 1, seed=6)
    assert fits(observed, [NUM_DRAWS * weight / 80 for weight in (10, 20, 30, 20)])


def test_what_clients_say_of_their_weight_is_bounded() -> None:
    waiting = Waiting([{"size": "1e200"}, {"size": "1"}, {"size": "-1"}])
    observed = counts(Weighted(label="size", max_weight=3.0), waiting, 1, seed=7)
    assert fits(observed, [NUM_DRAWS * weight / 6 for weight in (3, 1, 2)])


# --- stratified ---


REGIONS = [{"region": "eu"}] * 50 + [{"region": "us"}] * 30 + [{"region": "in"}] * 18 + [{}] * 2


def by_region(policy: Stratified, count: int, seed: int) -> list[Counter[str]]:
    rng, waiting = np.random.default_rng(seed), Waiting(REGIONS)
    return [
        Counter(REGIONS[index].get("region", "") for index in policy.draw(waiting, count, rng)) for _ in range(1000)
    ]


def test_each_stratum_has_its_share_in_every_draw() -> None:
    for drawn in by_region(Stratified(label="region"), 10, seed=8):
        assert drawn["eu"] == 5
        assert drawn["us"] == 3
        assert drawn["in"] in (1, 2)  # 1.8
        assert drawn[""] in (0, 1)  # 0.2


def test_with_proportional_shares_all_clients_are_equally_likely() -> None:
    """Those of a stratum that has less than one client's share too, which largest remainders would never draw."""
    observed = counts(Stratified(label="region"), Waiting(REGIONS), 7, seed=9)
    assert fits(observed, [NUM_DRAWS * 7 / 100] * 100)


def test_equal_shares_give_what_a_small_stratum_lacks_to_the_others() -> None:
    for drawn in by_region(Stratified(label="region", shares="equal"), 20, seed=10):
        assert drawn == {"eu": 6, "us": 6, "in": 6, "": 2}
    for drawn in by_region(Stratified(label="region", shares="equal"), 79, seed=11):
        assert drawn["in"] == 18
        assert drawn[""] == 2
        assert {drawn["eu"], drawn["us"]} == {29, 30}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 29, 62])
def test_equal_shares_add_up(count: int) -> None:
    sizes = np.array([5, 1, 40, 3, 13])
    shares = divide_equally(sizes, count)
    assert shares.sum() == pytest.approx(count)
    assert (shares <= sizes).all()
    unfilled = shares[shares < sizes]
    assert np.allclose(unfilled, shares.max()) if len(unfilled) else count == sizes.sum()


def test_shares_are_rounded_to_whole_numbers_with_the_same_mean() -> None:
    rng, shares = np.random.default_rng(12), np.array([0.25, 2.5, 3.0, 0.1, 1.15])
    found = np.array([round_shares(shares, 7, rng) for _ in range(NUM_DRAWS)])
    assert (found.sum(axis=1) == 7).all()
    assert ((found == np.floor(shares)) | (found == np.ceil(shares))).all()
    chances = shares - np.floor(shares)
    deviations = np.sqrt(chances * (1 - chances) / NUM_DRAWS)
    assert (np.abs(found.mean(axis=0) - shares) <= 4 * deviations).all()
