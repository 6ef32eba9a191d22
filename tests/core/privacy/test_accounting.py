from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.special import log_ndtr, ndtr

from fedplat.privacy import losses
from fedplat.privacy.accounting import calibrate, epsilon, epsilon_rdp, epsilons, max_releases
from fedplat.privacy.options import Charge, Mechanism, tree_sensitivity

FEW = settings(max_examples=2, deadline=None)
LEARNED = Mechanism("poisson", 1.2, 120 / 3383)
FIXED = Mechanism("fixed", 3.0, separation=4)
TREE = Mechanism("tree", 5.0, separation=7, max_participations=3)
ALL = [LEARNED, replace(LEARNED, overflow=1e-5), FIXED, TREE]


def gaussian_delta(deviation: float, epsilon: float) -> float:
    """Balle and Wang 2018, arXiv 1805.06530, Theorem 8, for sensitivity 1."""
    half, shift = 0.5 / deviation, epsilon * deviation
    return float(ndtr(half - shift) - math.exp(epsilon + log_ndtr(-half - shift)))


def test_the_published_values() -> None:
    assert epsilon([Charge(LEARNED, 100)], 1e-5) == pytest.approx(1.7075, abs=1e-4)
    assert epsilon_rdp([Charge(LEARNED, 100)], 1e-5) == pytest.approx(1.9861, abs=1e-4)
    assert epsilon([Charge(Mechanism("poisson", 1.0, 0.01), 1000)], 1e-6) == pytest.approx(2.12, abs=0.005)


@pytest.mark.parametrize(
    ("mechanism", "releases", "length"), [(FIXED, 10, 3**0.5), (TREE, 20, (3 * (1 + 1 + 1 + 2 + 3)) ** 0.5)]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_fixed_and_tree_are_one_gaussian(mechanism: Mechanism, releases: int, length: float, delta: float) -> None:
    spent = epsilon([Charge(mechanism, releases)], delta)
    assert gaussian_delta(mechanism.noise_multiplier / length, spent) == pytest.approx(delta, rel=1e-6)
    assert spent <= epsilon_rdp([Charge(mechanism, releases)], delta)


@pytest.mark.parametrize(
    ("multiplier", "releases", "delta"),
    [(1.0, 1, 1e-5), (0.5, 3, 1e-3), (10.0, 100, 1e-9), pytest.param(1000.0, 1_000_000, 1e-9, marks=pytest.mark.slow)],
)
def test_rounding_and_floats_err_upwards_and_little(multiplier: float, releases: int, delta: float) -> None:
    """Trials that always succeed are a Gaussian release without amplification, of which the truth is known."""
    spent = epsilon([Charge(Mechanism("poisson", multiplier, 1.0), releases)], delta)
    truth = epsilon([Charge(Mechanism("fixed", multiplier), releases)], delta)
    assert truth <= spent <= truth * 1.005


@pytest.mark.parametrize(
    "charge",
    [
        pytest.param(Charge(LEARNED, 3000), marks=pytest.mark.slow),
        pytest.param(Charge(Mechanism("poisson", 1.0, 0.004), 5_000), marks=pytest.mark.slow),
        Charge(Mechanism("poisson", 0.3, 0.2), 5),
    ],
)
def test_a_finer_grid_gives_no_more_and_little_less(charge: Charge) -> None:
    delta = 1e-6
    spent = epsilon([charge], delta)
    finer = losses.compute_sampled_losses(
        charge.mechanism, losses.interval([(charge.mechanism, charge.releases)], math.inf) / 2
    )
    assert 0.99 * spent <= finer.self_compose(charge.releases).get_epsilon_for_delta(delta) <= spent


@pytest.mark.parametrize(
    "charge",
    [
        Charge(LEARNED, 300),
        Charge(replace(LEARNED, overflow=1e-12), 1500),  # a part of delta where precision is rough
        pytest.param(Charge(Mechanism("poisson", 0.7, 0.001, 1e-12), 1500), marks=pytest.mark.slow),
        Charge(Mechanism("poisson", 0.3, 0.2), 5),
    ],
)
@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_less_precision_gives_no_less_and_little_more(charge: Charge, delta: float) -> None:
    fine = epsilon([charge], delta)
    assert fine <= epsilon([charge], delta, losses.ROUGH) <= 1.001 * fine


def test_an_overflow_costs_what_the_worst_cap_would() -> None:
    """Others show whether the cap is reached; then, with p, one client decides who is let go: a sensitivity of 2."""
    multiplier, probability, overflow, spent = 1.5, 0.3, 0.2, 0.8
    # (1 - q) N(0) + q N(1) against N(0): where the ratio of likelihoods is above e^epsilon
    cut = multiplier**2 * math.log(1.0 + math.expm1(spent) / probability) + 0.5
    absent, present = ndtr(-cut / multiplier), ndtr((1.0 - cut) / multiplier)
    usual = (1 - probability) * absent + probability * present - math.exp(spent) * absent
    delta = float((1 - overflow) * usual + overflow * gaussian_delta(multiplier / 2, spent))
    mechanism = Mechanism("poisson", multiplier, probability, overflow)
    assert spent <= epsilon([Charge(mechanism, 1)], delta) <= spent * 1.001
    assert epsilon([Charge(replace(mechanism, overflow=1.0), 3)], delta) == pytest.approx(
        epsilon([Charge(Mechanism("fixed", multiplier / 2), 3)], delta), rel=1e-3
    )


def test_an_overflow_that_is_too_rare_to_compute_takes_its_part_of_delta() -> None:
    mechanism, delta, overflow = Mechanism("poisson", 1.0, 0.01), 1e-5, 5e-10
    spent = epsilon([Charge(replace(mechanism, overflow=overflow), 10)], delta)
    assert spent == epsilon([Charge(mechanism, 10)], delta - 10 * overflow) > epsilon([Charge(mechanism, 10)], delta)


def test_no_releases_cost_nothing() -> None:
    assert epsilon([], 1e-5) == epsilon_rdp([], 1e-5) == 0.0
    assert epsilon([Charge(mechanism, 0) for mechanism in ALL], 1e-5) == 0.0


def test_charges_of_several_jobs_compose() -> None:
    several = [Charge(LEARNED, 60), Charge(FIXED, 10), Charge(LEARNED, 40), Charge(TREE, 20)]
    spent = epsilon(several, 1e-5)
    assert spent == pytest.approx(epsilon([several[3], Charge(LEARNED, 100), several[1]], 1e-5), rel=1e-9)
    assert max(epsilon([charge], 1e-5) for charge in several) < spent < epsilon_rdp(several, 1e-5)
    two = [Charge(FIXED, 4), Charge(replace(FIXED, noise_multiplier=4.0), 4)]
    assert gaussian_delta((3**-2 + 4**-2) ** -0.5, epsilon(two, 1e-5)) == pytest.approx(1e-5, rel=1e-6)


def test_what_cannot_be_kept_private_is_infinite_or_huge_and_no_error() -> None:
    assert epsilon([Charge(LEARNED, 100)], 1e-14) == math.inf
    for kind in ("poisson", "fixed", "tree"):
        assert epsilon([Charge(Mechanism(kind, 1e-5, 0.5), 1000)], 1e-5) > 1e9


@pytest.mark.parametrize("mechanism", ALL, ids=["poisson", "capped", "fixed", "tree"])
def test_more_rounds_cost_more_and_more_noise_less(mechanism: Mechanism) -> None:
    @FEW
    @given(st.integers(1, 5000), st.integers(1, 5000), st.floats(1.0, 3.0), st.floats(1e-8, 1e-3))
    def check(releases: int, more: int, louder: float, delta: float) -> None:
        spent, later = epsilons(mechanism, [releases, releases + more], delta)
        assert spent <= later * 1.0001
        noisier = replace(mechanism, noise_multiplier=mechanism.noise_multiplier * louder)
        assert epsilon([Charge(noisier, releases)], delta) <= spent * 1.0001

    check()


@pytest.mark.parametrize(
    ("mechanism", "budget"), [*itertools.product((LEARNED, FIXED, TREE), (0.3, 4.0, 300.0)), (ALL[1], 4.0)]
)
def test_the_calibrated_noise_is_just_enough(mechanism: Mechanism, budget: float) -> None:
    calibrated = calibrate(mechanism, 50, budget, 1e-5)
    multiplier = calibrated.noise_multiplier
    assert float(f"{multiplier:.4g}") == multiplier
    assert epsilon([Charge(calibrated, 50)], 1e-5) <= budget
    less = multiplier - 10.0 ** (math.floor(math.log10(multiplier)) - 3)
    assert epsilon([Charge(replace(mechanism, noise_multiplier=less), 50)], 1e-5) > budget
    assert replace(calibrated, noise_multiplier=mechanism.noise_multiplier) == mechanism


@pytest.mark.parametrize("start", [0.01, 1.0, 1000.0])
def test_the_calibrated_noise_does_not_depend_on_where_the_search_begins(start: float) -> None:
    mechanism = replace(LEARNED, noise_multiplier=start)
    assert calibrate(mechanism, 50, 4.0, 1e-5).noise_multiplier == 0.7483


def test_a_search_looks_at_few_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, intervals = Mechanism("poisson", 1.0, 0.0123), list[float]()
    sampled = losses.compute_sampled_losses

    def counted(release: Mechanism, interval: float) -> losses.Losses:
        intervals.append(interval)
        return sampled(release, interval)

    monkeypatch.setattr(losses, "compute_sampled_losses", counted)
    calibrated = calibrate(mechanism, 70, 1.5, 1e-5)
    fine = losses.interval([(calibrated, 70)], math.inf)
    assert len(intervals) <= 15
    assert sum(interval <= fine for interval in intervals) <= 5
    intervals.clear()
    assert calibrate(mechanism, 70, 1.5, 1e-5) == calibrated
    assert intervals == []
    # The coarsest grid errs upwards: what is within the budget on it needs no finer one.
    assert max_releases(calibrated, 100.0, 1e-5, 70) == 70
    assert intervals
    assert min(intervals) == 16 * fine


def test_what_no_noise_can_do_is_said() -> None:
    with pytest.raises(ValueError, match=r"no noise multiplier up to 1e\+06 keeps 1000 releases within epsilon 1e-09"):
        calibrate(FIXED, 1000, 1e-9, 1e-9)
    with pytest.raises(ValueError, match="epsilon is 0; expected a number above 0"):
        calibrate(FIXED, 1000, 0.0, 1e-5)
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="expected a number between 0 and 1"):
            epsilon([], delta)
        with pytest.raises(ValueError, match="expected a number between 0 and 1"):
            epsilon_rdp([], delta)
        with pytest.raises(ValueError, match="expected a number between 0 and 1"):
            max_releases(FIXED, 1.0, delta, 0)
        with pytest.raises(ValueError, match="expected a number between 0 and 1"):
            calibrate(FIXED, 10, 1.0, delta)


def test_the_most_releases_within_a_budget() -> None:
    most = max_releases(LEARNED, 1.7076, 1e-5, 10_000)
    assert most == 100
    assert max_releases(LEARNED, 1.7076, 1e-5, 30) == 30
    assert max_releases(LEARNED, 1.7076, 1e-5, 0) == 0
    assert max_releases(LEARNED, 1.7076, 1e-5, 10_000, [Charge(LEARNED, 60)]) == 40
    assert max_releases(LEARNED, 1.7076, 1e-5, 10_000, [Charge(LEARNED, 100)]) == 0
    assert max_releases(FIXED, 1.7076, 1e-5, 10_000) == 4
    assert max_releases(replace(FIXED, noise_multiplier=10.0), 1.0, 1e-5, 10_000, [Charge(LEARNED, 10)]) < max_releases(
        replace(FIXED, noise_multiplier=10.0), 1.0, 1e-5, 10_000
    )


@pytest.mark.parametrize(
    "mechanism", [LEARNED, replace(FIXED, noise_multiplier=10.0), replace(TREE, noise_multiplier=9.0)]
)
def test_one_release_more_than_the_most_is_too_much(mechanism: Mechanism) -> None:
    before = [Charge(LEARNED, 10)]
    most = max_releases(mechanism, 2.0, 1e-6, 300, before)
    assert epsilon([*before, Charge(mechanism, most)], 1e-6) <= 2.0
    assert most == 300 or epsilon([*before, Charge(mechanism, most + 1)], 1e-6) > 2.0


def farthest(rounds: int, separation: int, participations: int) -> float:
    """The tree's sensitivity by trying every pattern of participation."""
    most = 0
    nodes = [
        range(start, start + 2**level) for level in range(rounds.bit_length()) for start in range(0, rounds, 2**level)
    ]
    complete = [node for node in nodes if node.stop <= rounds]
    for count in range(participations + 1):
        for pattern in itertools.combinations(range(rounds), count):
            if all(later - earlier >= separation for earlier, later in itertools.pairwise(pattern)):
                most = max(most, sum(sum(place in node for place in pattern) ** 2 for node in complete))
    return math.sqrt(most)


@pytest.mark.parametrize("rounds", range(10))
@pytest.mark.parametrize("separation", [1, 2, 3, 5])
def test_no_pattern_of_participation_exceeds_the_trees_sensitivity(rounds: int, separation: int) -> None:
    for limit in (1, 2, math.ceil(rounds / separation)):
        participations = min(limit, math.ceil(rounds / separation))
        assert (
            farthest(rounds, separation, participations) <= tree_sensitivity(rounds, separation, participations) + 1e-12
        )


@pytest.mark.parametrize("rounds", [1, 2, 7, 8, 12])
def test_the_trees_sensitivity_is_tight_where_each_client_takes_part_once(rounds: int) -> None:
    assert tree_sensitivity(rounds, rounds, 1) == pytest.approx(farthest(rounds, rounds, 1))


def test_the_rest_of_fedplat_does_without_dp_accounting() -> None:
    program = """
import sys
sys.modules["dp_accounting"] = None
from fedplat.errors import MissingExtraError
from fedplat.privacy.accounting import epsilon
from fedplat.privacy.options import Charge, Mechanism
try:
    epsilon([Charge(Mechanism("fixed", 1.0), 1)], 1e-5)
except MissingExtraError as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "'dp-accounting>=" in done.stdout
