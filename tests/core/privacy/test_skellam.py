"""Skellam noise: its divergences, the figures of the literature, and the draws."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import stats

from fedplat.privacy import accounting, noise
from fedplat.privacy.accounting import epsilon, epsilon_rdp
from fedplat.privacy.noise import BETA, KeyStream, fit_norm, least_sensitivity, renyi_divergence, rounded_sensitivity
from fedplat.privacy.options import Charge, Mechanism

SIZE, CLIENTS, MULTIPLIER, RELEASES, DELTA = 2**20, 100, 8.0, 100, 1e-5
"""The setting in which the figures were computed."""
ORDERS = np.arange(2.0, 200.0)


def stream(number: int) -> KeyStream:
    return KeyStream(number.to_bytes(32, "big"))


def total_epsilon(divergences: npt.NDArray[np.float64], releases: int = RELEASES) -> float:
    return float(compute_epsilon(ORDERS.tolist(), (releases * divergences).tolist(), DELTA)[0])


def norm_within(modulus: int) -> float:
    """The clip norm in steps: TFF's scale, 2^b = 2k sqrt(rho / d (c n)^2 + (1/4 + sigma^2) n), with k = 4, rho = 1."""
    room = (2.0**modulus / 8.0) ** 2 - CLIENTS / 4
    return math.sqrt(room / (CLIENTS**2 / SIZE + MULTIPLIER**2))


def discrete_gaussian(l1: float, l2: float, deviation: float) -> npt.NDArray[np.float64]:
    """Kairouz, Liu and Steinke 2021, arXiv 2102.06387, Proposition 14; `deviation` is that of the sum."""
    k = np.arange(1, CLIENTS)
    tau = 10.0 * np.exp(-2.0 * math.pi**2 * deviation**2 / CLIENTS * k / (k + 1)).sum()
    first = ORDERS / 2 * (l2 / deviation) ** 2 + tau * SIZE
    second = ORDERS / 2 * ((l2 / deviation) ** 2 + 2 * l1 / deviation * tau + tau**2 * SIZE)
    third = ORDERS / 2 * (l2 / deviation + math.sqrt(SIZE) * tau) ** 2
    return np.minimum(np.minimum(first, second), third)


@pytest.mark.parametrize(
    ("modulus", "conditional", "unconditional"),
    [(16, 7.00, 14.2), (18, 6.22, 7.97), (20, 6.163, 6.62), (22, 6.159, 6.28)],
)
@pytest.mark.parametrize("noise", ["skellam", "discrete gaussian"])
def test_the_figures_of_bits_and_rounding(modulus: int, conditional: float, unconditional: float, noise: str) -> None:
    norm = norm_within(modulus)
    for beta, figure in ((BETA, conditional), (0.0, unconditional)):
        l2 = rounded_sensitivity(norm, SIZE, beta)
        l1 = min(math.sqrt(SIZE) * l2, l2**2)
        if noise == "skellam":
            found = renyi_divergence(ORDERS, l1, l2, (MULTIPLIER * norm) ** 2)
        else:
            found = discrete_gaussian(l1, l2, MULTIPLIER * norm)
        assert total_epsilon(found) == pytest.approx(
            figure, abs=0.05 if figure > 10 else 0.005 if figure > 6.17 else 5e-4
        )


def test_the_figures_of_the_central_mechanism_and_of_drop_outs() -> None:
    assert total_epsilon(ORDERS / (2 * MULTIPLIER**2)) == pytest.approx(6.159, abs=5e-4)  # of whole orders
    whole = Mechanism("skellam", MULTIPLIER, steps=2.0**19 - 1)
    assert epsilon([Charge(whole, RELEASES)], DELTA) == pytest.approx(6.159, abs=5e-4)
    with_drop_outs = replace(whole, noise_multiplier=MULTIPLIER * math.sqrt(0.7))
    assert epsilon([Charge(with_drop_outs, RELEASES)], DELTA) == pytest.approx(7.55, abs=0.005)


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("variance", [2.0, 20.0, 200.0])
def test_the_divergence_is_a_bound_on_the_true_one(shift: int, variance: float) -> None:
    points = np.arange(-400, 401)
    there = stats.skellam.logpmf(points - shift, variance / 2, variance / 2)
    here = stats.skellam.logpmf(points, variance / 2, variance / 2)
    likely = (there > -300) & (here > -300)
    for order in (2.0, 5.0, 16.0):
        true = np.log(np.exp(order * there[likely] + (1 - order) * here[likely]).sum()) / (order - 1)
        bound = float(renyi_divergence(np.array(order), shift, shift, variance))
        assert true <= bound
        if variance == 200.0:
            assert true > 0.9 * bound


@pytest.mark.parametrize("variance", [0.5, 30.0, 1999.0, 2001.0, 1e6, 1e12, 1e17])
def test_the_moments_of_the_draws(variance: float) -> None:
    count = 200_000
    drawn = noise.draw_skellam(stream(int(variance)), variance, count) / math.sqrt(variance)
    assert abs(drawn.mean()) < 5 / math.sqrt(count)
    fourth = 3 + 1 / variance
    assert np.square(drawn).mean() == pytest.approx(1.0, abs=5 * math.sqrt((fourth - 1) / count))
    assert (drawn**3).mean() == pytest.approx(
        0.0, abs=5 * math.sqrt(15 + 25 / variance + 1 / variance**2) / math.sqrt(count)
    )
    assert (drawn**4).mean() == pytest.approx(
        fourth, abs=5 * math.sqrt(96 + 200 / variance + 400 / variance**3) / math.sqrt(count)
    )


@pytest.mark.parametrize("variance", [0.5, 30.0, 2100.0, 40_000.0])
def test_the_draws_have_the_distribution(variance: float) -> None:
    drawn = noise.draw_skellam(stream(3), variance, 200_000)
    edges = np.unique(np.round(np.linspace(-3.0, 3.0, 61) * math.sqrt(variance))) + 0.5
    expected = np.diff(stats.skellam.cdf(edges, variance / 2, variance / 2), prepend=0.0, append=1.0) * drawn.size
    found = np.bincount(np.searchsorted(edges, drawn), minlength=edges.size + 1)
    assert stats.chisquare(found, expected).pvalue > 1e-6


def test_draws_follow_from_the_key_alone() -> None:
    first, second = (noise.draw_skellam(stream(1), 1e10, 1000) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, noise.draw_skellam(stream(2), 1e10, 1000))
    with pytest.raises(ValueError, match="expected 32"):
        KeyStream(b"short")
    assert repr(stream(7)) == "KeyStream(...)"


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 10**9),
    st.integers(8, 32),
    st.integers(2, 1000),
    st.floats(1e-3, 1e6),
    st.integers(1, 2**23 - 1),
)
def test_what_fits_a_modulus(size: int, modulus: int, num_clients: int, factor: float, most: int) -> None:
    norm = fit_norm(most, size, modulus, num_clients, factor)
    assert 0.0 <= norm <= most
    if norm == 0.0:
        return
    l2 = rounded_sensitivity(norm, size)
    mean_square = num_clients**2 * norm**2 / 2 ** (size.bit_length() - 1)
    variance = mean_square + num_clients / 4 + factor * l2**2
    assert 4.0 * math.sqrt(variance) <= 2.0 ** (modulus - 1) * (1 + 1e-9)
    assert least_sensitivity(most, modulus, num_clients, factor) <= l2 * (1 + 1e-9)
    if norm < most:
        assert 4.0 * math.sqrt(
            mean_square + num_clients / 4 + factor * rounded_sensitivity(norm, size) ** 2
        ) >= 2.0 ** (modulus - 1) * (1 - 1e-6)


def test_charges_compose_exactly() -> None:
    """Releases with different noise, and those of other jobs: the sum of their divergences."""
    first, second = Mechanism("skellam", 4.0, steps=1e4), Mechanism("skellam", 6.0, steps=1e4)
    both = [Charge(first, 30), Charge(second, 20)]
    divergences = 30 * renyi_divergence(ORDERS, 1e8, 1e4, 16e8) + 20 * renyi_divergence(ORDERS, 1e8, 1e4, 36e8)
    assert epsilon(both, DELTA) == pytest.approx(total_epsilon(divergences, 1), rel=1e-9)
    assert epsilon(both, DELTA) == epsilon_rdp(both, DELTA)
    assert epsilon([*both, Charge(first, 0)], DELTA) == epsilon(both, DELTA)

    others = [Charge(Mechanism("fixed", 5.0), 10), Charge(Mechanism("poisson", 1.1, 0.02), 200)]
    accountant = RdpAccountant(list(range(2, 65)))
    accountant.compose(GaussianDpEvent(5.0), 10)
    accountant.compose(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1)), 200)
    negligible = Charge(Mechanism("skellam", 1e6, steps=1e4), 1)
    assert epsilon([*others, negligible], DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)
    assert epsilon([*others, *both], DELTA) > epsilon(both, DELTA)


def test_an_overflow_of_another_job_counts() -> None:
    local, sampled = Charge(Mechanism("skellam", 4.0, steps=1e4), 5), Mechanism("poisson", 2.0, 0.01)
    alone = epsilon([local, Charge(sampled, 10)], DELTA)
    rare = epsilon([local, Charge(replace(sampled, overflow=1e-12), 10)], DELTA)
    often = epsilon([local, Charge(replace(sampled, overflow=1e-3), 10)], DELTA)
    assert alone < rare < 1.0001 * alone
    assert often == pytest.approx(epsilon([local, Charge(Mechanism("fixed", 1.0), 10)], DELTA), rel=1e-9)
    assert epsilon([local, Charge(replace(sampled, overflow=1e-12), 10)], 1e-16) < math.inf


def test_noise_and_releases_for_a_budget() -> None:
    found = accounting.calibrate(Mechanism("skellam", 1.0, steps=5e5), 100, 2.0, DELTA)
    assert epsilon([Charge(found, 100)], DELTA) <= 2.0
    less = replace(found, noise_multiplier=found.noise_multiplier * 0.999)
    assert epsilon([Charge(less, 100)], DELTA) > 2.0
    assert accounting.max_releases(found, 2.0, DELTA, 1000) == 100
    assert accounting.max_releases(found, 2.0, DELTA, 1000, [Charge(found, 60)]) == 40
