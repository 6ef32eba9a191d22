"""Privacy losses, by dp-accounting (extra "privacy"), which is not typed: the parts in use are described here."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from fedplat import errors, extras
from fedplat.privacy import noise
from fedplat.privacy.options import Mechanism

MIN_INTERVAL = 1e-6
"""The finest grid interval of privacy losses, in nats."""
MAX_INTERVAL = 1.0
"""The coarsest. Losses that need a coarser one are in the thousands, where amplification is irrelevant."""
RELEASE_POINTS = 200_000
TOTAL_POINTS = 500_000


class Precision(NamedTuple):
    """The precision of the arithmetic; less is faster, and errs upwards by slightly more.

    `points`: grid points per standard deviation of a release's loss; the error of epsilon grows with the square of the
    interval. `rare`: the part of delta that overflows may take without computing their cost. `near`: how much of a
    budget a search may leave unused, as a logarithm; 0: it finds the last step within the budget.
    """

    points: int
    rare: float
    near: float


FINE = Precision(points=50, rare=1e-3, near=0.0)
ROUGH = Precision(points=16, rare=1e-2, near=1e-3)
"""Epsilon is about 0.1 % larger on this grid, and may be smaller where overflows are counted as a part of delta."""


class Losses(Protocol):
    """A distribution of privacy losses (Koskela et al. 2020, arXiv 1906.03049), rounded upwards."""

    def compose(self, privacy_loss_distribution: Losses) -> Losses:
        """Return the losses of both releases."""
        ...

    def self_compose(self, num_times: int) -> Losses:
        """Return the losses of `num_times` such releases."""
        ...

    def compute_mixture(self, other: Losses, self_weight: float) -> Losses:
        """Return the losses of one of two releases; which one is known, and this one has probability `self_weight`."""
        ...

    def get_epsilon_for_delta(self, delta: float) -> float:
        """Return the least epsilon, which may be infinite."""
        ...


def load_library() -> None:
    """Import what the computations require, which takes a second. Raises `MissingExtraError`."""
    _distributions()
    _rdp()


def _silence(record: logging.LogRecord) -> bool:
    return False


def _library() -> Any:
    try:
        return cast(Any, importlib.import_module("dp_accounting"))
    except ModuleNotFoundError as exc:
        raise errors.MissingExtraError(
            f"the accounting of privacy needs dp-accounting; install it with: {extras.install_command('privacy')}"
        ) from exc


def _distributions() -> Any:
    _library()
    return cast(Any, importlib.import_module("dp_accounting.pld.privacy_loss_distribution"))


def _rdp() -> Any:
    _library()
    return cast(Any, importlib.import_module("dp_accounting.rdp"))


def gaussian_epsilon(deviation: float, delta: float) -> float:
    """Return epsilon of one Gaussian release of sensitivity 1, exactly.

    Balle and Wang 2018, arXiv 1805.06530, Theorem 8.
    """
    with np.errstate(divide="ignore"):  # the computation uses log 0
        return float(_library().get_epsilon_gaussian(deviation, delta))


def gaussian(deviation: float, interval: float) -> Losses:
    """Return the losses of one Gaussian release of sensitivity 1."""
    return cast(Losses, _distributions().from_gaussian_mechanism(deviation, value_discretization_interval=interval))


def compute_sampled_losses(release: Mechanism, interval: float) -> Losses:
    """Return the losses of one release with independent trials, for adding or removing one client.

    Let K be the number of other clients that are drawn. With K below the cap the client is added with probability q: a
    sensitivity of 1. Otherwise (`overflow`) the client may replace one of the others, a sensitivity of 2. If the cap
    depends on the number of clients, one of the others may be dropped even if the client is not drawn: there is no
    amplification. Both cases have the same probability with and without the client, but the output may reveal the
    case: many clients were drawn. So the case is taken as known, and the losses are the mixture of the losses of both
    cases. One mixture of Gaussians, with sensitivities 0, 1 and 2, would be smaller, and wrong: it assumes that the
    output reveals nothing about K.
    """
    return _compute_sampled(release.noise_multiplier, release.sampling_probability, release.overflow, interval)


@lru_cache(maxsize=16)
def _compute_sampled(deviation: float, probability: float, overflow: float, interval: float) -> Losses:
    make = _distributions().from_gaussian_mechanism
    if overflow == 1.0:
        return gaussian(deviation / 2, interval)
    losses = cast(Losses, make(deviation, value_discretization_interval=interval, sampling_prob=probability))
    if not overflow:
        return losses
    return losses.compute_mixture(gaussian(deviation / 2, interval), 1.0 - overflow)


def renyi_epsilon(releases: Sequence[tuple[Mechanism, int]], fixed: float, delta: float) -> float:
    """Return epsilon by Rényi divergences (Mironov 2017, arXiv 1702.07476); `fixed` is one more release's deviation."""
    library = _library()
    # It warns about every order that it leaves out, which only makes the result larger.
    logger = logging.getLogger("absl")
    logger.addFilter(_silence)
    try:
        return _renyi(library, releases, fixed, delta)
    finally:
        logger.removeFilter(_silence)


def _renyi(library: Any, releases: Sequence[tuple[Mechanism, int]], fixed: float, delta: float) -> float:
    accountant = _rdp().RdpAccountant()
    for release, count in releases:
        noise = library.GaussianDpEvent(release.noise_multiplier)
        accountant.compose(library.PoissonSampledDpEvent(release.sampling_probability, noise), count)
    if math.isfinite(fixed):
        accountant.compose(library.GaussianDpEvent(fixed))
    return float(accountant.get_epsilon(delta))


WHOLE_ORDERS = tuple(sorted({*range(2, 129), *(round(1.05**power) for power in range(100, 204))}))
"""The orders of divergences of noise on whole numbers, for which no others are known. The largest is about 20,000."""


def whole_renyi_epsilon(releases: Sequence[tuple[Mechanism, int]], fixed: float, delta: float) -> float:
    """Return epsilon by Rényi divergences of whole orders, of releases with noise on whole numbers among others."""
    orders = np.array(WHOLE_ORDERS, np.float64)
    total = orders / 2.0 * fixed**-2
    for release, count in releases:
        total = total + count * _whole_divergences(release)
    return float(_rdp().compute_epsilon(WHOLE_ORDERS, total, delta)[0])


@lru_cache(maxsize=4096)
def _whole_divergences(release: Mechanism) -> npt.NDArray[np.float64]:
    orders = np.array(WHOLE_ORDERS, np.float64)
    if release.kind == "skellam":
        # Whole numbers are at most their squares, so l1 is at most the square of l2.
        l2 = release.steps
        return noise.renyi_divergence(orders, l2**2, l2, (release.noise_multiplier * l2) ** 2)
    return np.array([_sampled_divergence(release, order) for order in WHOLE_ORDERS])


def _sampled_divergence(release: Mechanism, order: int) -> float:
    """Return the divergence of Gaussian noise with independent trials.

    Mironov, Talwar and Zhang 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", arXiv 1908.10530,
    Section 3.3.
    """
    special = cast(Any, importlib.import_module("scipy.special"))
    probability, drawn = release.sampling_probability, np.arange(order + 1)
    terms = -np.log(order + 1.0) - special.betaln(order - drawn + 1.0, drawn + 1.0)
    terms += special.xlogy(drawn, probability) + special.xlog1py(order - drawn, -probability)
    terms += drawn * (drawn - 1.0) / (2.0 * release.noise_multiplier**2)
    return float(special.logsumexp(terms)) / (order - 1)


def interval(releases: Sequence[tuple[Mechanism, int]], fixed: float, points: int = FINE.points) -> float:
    """Return a grid interval, a power of 2: small relative to the losses' deviation, and covering them with few points.

    Rounding to a grid adds at most a sixth of the interval's square to the variance of each release's loss (losses are
    split between both neighbours). With the points of `FINE` per deviation that is about 1e-4 of the variance.
    """
    counted = [(_divergence(release), count) for release, count in releases]
    if math.isfinite(fixed):
        counted.append((fixed**-2, 1))
    total = sum(divergence * count for divergence, count in counted)
    wanted = math.sqrt(total / sum(count for _, count in counted)) / points
    width = max([*(_width(release) for release, _ in releases), 2 * _greatest(fixed)])
    least = max(width / RELEASE_POINTS, (2 * total + 16 * math.sqrt(total) + width) / TOTAL_POINTS, MIN_INTERVAL)
    return 2.0 ** math.ceil(math.log2(max(wanted, least)))


def _divergence(release: Mechanism) -> float:
    """Return the Rényi divergence of order 2, about the variance of the loss if that is small."""
    exponent = release.noise_multiplier**-2
    if exponent > 500:
        return exponent
    return math.log1p(release.sampling_probability**2 * math.expm1(exponent))


def _width(release: Mechanism) -> float:
    """Return the distance from the least to the greatest loss of a release, except for 1e-22 of the probability."""
    if release.overflow:
        return 2 * _greatest(release.noise_multiplier / 2)
    greatest = _greatest(release.noise_multiplier)
    if greatest > 500:
        return 2 * greatest
    probability = release.sampling_probability
    least = greatest if probability == 1.0 else min(greatest, -math.log1p(-probability))
    return least + math.log1p(probability * math.expm1(greatest))


def _greatest(deviation: float) -> float:
    return deviation**-2 / 2 + 10 / deviation
