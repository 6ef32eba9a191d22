"""What releases cost: epsilon at a given delta, the noise that a budget needs, the releases that it allows.

`poisson` is accounted for one client more or less; `fixed` and `tree` for one client whose reports count for nothing.
All that one client can change in a job of these two is one Gaussian release: a vector of length participations^(1/2)
and `tree_sensitivity`. Numbers err upwards.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from fedplat.privacy import losses
from fedplat.privacy.releases import Charge, Mechanism, tree_sensitivity

_SMALLEST, _LARGEST = -4, 6
"""Decimal exponents of the multipliers between which the noise is sought."""
_NUMBERS = 9000
"""Numbers of 4 significant digits in a decade."""
_FLOAT_ERROR = 1e-12
_FLOAT_ERROR_PER_RELEASE = 1e-16
"""What Fourier transforms of 64-bit floats may lose of delta; 2e-17 a release was seen."""

_COARSER, _NEAR = 16, 16
"""How much coarser the grid is on which the noise is sought first, and how many steps the result is off."""
_RARE = 1e-3
"""The part of delta that overflows may take without a look at what they cost."""

_Sampled = list[tuple[Mechanism, int]]


def epsilon(charges: Sequence[Charge], delta: float) -> float:
    """Epsilon by privacy loss distributions; `inf` where delta is too small for that arithmetic.

    Raises `ValueError` for a delta that is no probability between 0 and 1, and `MissingExtraError`.
    """
    return _epsilon(charges, delta)


def _epsilon(charges: Sequence[Charge], delta: float, coarser: int = 1) -> float:
    """Epsilon with losses on a grid that is so many times coarser: faster, and larger by little."""
    _check(delta)
    sampled, deviation = _grouped(charges)
    if not sampled:
        return losses.gaussian_epsilon(deviation, delta) if math.isfinite(deviation) else 0.0
    sampled, usable = _without_rare(sampled, delta)
    usable -= _FLOAT_ERROR + _FLOAT_ERROR_PER_RELEASE * sum(count for _, count in sampled)
    interval = losses.interval(sampled, deviation)
    if interval > losses.WIDEST:
        return losses.gaussian_epsilon(_without_amplification(sampled, deviation), delta)
    if usable <= 0.0:
        return math.inf
    interval *= coarser
    parts = [losses.sampled(mechanism, interval).self_compose(count) for mechanism, count in sampled]
    if math.isfinite(deviation):
        parts.append(losses.gaussian(deviation, interval))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(usable))


def epsilon_rdp(charges: Sequence[Charge], delta: float) -> float:
    """Epsilon by Rényi divergences, a cross-check: larger, but for jobs with an `overflow`, which it leaves out."""
    _check(delta)
    sampled, deviation = _grouped(charges)
    if not sampled and not math.isfinite(deviation):
        return 0.0
    return losses.renyi_epsilon(sampled, deviation, delta)


def epsilons(mechanism: Mechanism, counts: Sequence[int], delta: float) -> list[float]:
    """Epsilon after each of so many releases."""
    return [epsilon([Charge(mechanism, count)], delta) for count in counts]


def calibrate(mechanism: Mechanism, releases: int, budget: float, delta: float) -> Mechanism:
    """The mechanism with the least noise whose epsilon is within `budget`; the multiplier is rounded up to 4 digits.

    The multiplier of `mechanism` itself does not matter. Raises `ValueError` where no noise is enough.
    """

    def quieter(step: int, coarser: int = 1) -> float:
        return _epsilon([Charge(_with_noise(mechanism, _multiplier(-step)), releases)], delta, coarser)

    def scale(step: int) -> float:
        return -math.log(_multiplier(-step))

    if not budget > 0.0:
        raise ValueError(f"epsilon is {budget:g}; expected a number above 0")
    loudest, quietest = -_LARGEST * _NUMBERS, -_SMALLEST * _NUMBERS
    if quieter(loudest) > budget:
        raise ValueError(
            f"no noise multiplier up to {_multiplier(-loudest):g} keeps {releases} releases within epsilon {budget:g} "
            f"at delta {delta:g}; allow a larger epsilon or delta, or fewer rounds"
        )
    low = _last(lambda step: quieter(step, _COARSER), budget, (loudest, quietest), scale)
    width = _NEAR
    while quieter(low) > budget:
        low, width = max(loudest, low - width), 4 * width
    high = min(quietest, low + width)
    while high < quietest and quieter(high) <= budget:
        low, high, width = high, min(quietest, high + 4 * width), 4 * width
    return _with_noise(mechanism, _multiplier(-_last(quieter, budget, (low, high), scale)))


def max_releases(mechanism: Mechanism, budget: float, delta: float, limit: int, before: Sequence[Charge] = ()) -> int:
    """The most releases, `limit` at most, whose epsilon with what was charged `before` is within `budget`."""

    def after(count: int) -> float:
        return epsilon([*before, Charge(mechanism, count)], delta)

    _check(delta)
    if limit <= 0 or after(1) > budget:
        return 0
    return _last(after, budget, (1, limit), math.log)


def _check(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta is {delta:g}; expected a number between 0 and 1, such as 1e-5")


def _grouped(charges: Sequence[Charge]) -> tuple[_Sampled, float]:
    """Equal mechanisms with independent trials once, with their releases; all others as one Gaussian's deviation."""
    counts: Counter[Mechanism] = Counter()
    for charge in charges:
        if charge.releases:
            counts[charge.mechanism] += charge.releases
    sampled = [(mechanism, count) for mechanism, count in counts.items() if mechanism.kind == "poisson"]
    others = [_length(charge) / charge.mechanism.noise_multiplier for charge in charges]
    length = math.hypot(*others)
    return sampled, 1.0 / length if length else math.inf


def _without_rare(sampled: _Sampled, delta: float) -> tuple[_Sampled, float]:
    """The mechanisms without overflows that are so rare that all of them may be a part of delta, and what is left."""
    kept: _Sampled = []
    for mechanism, count in sampled:
        chance = mechanism.overflow * count
        rare = 0.0 < chance <= _RARE * delta / len(sampled)
        kept.append((msgspec.structs.replace(mechanism, overflow=0.0) if rare else mechanism, count))
        delta -= chance if rare else 0.0
    return kept, delta


def _length(charge: Charge) -> float:
    """What one client can change in all releases together (L2), in units of what it can change in one."""
    mechanism, releases = charge.mechanism, charge.releases
    match mechanism.kind:
        case "poisson":
            return 0.0
        case "fixed":
            return math.sqrt(mechanism.participations(releases))
        case "tree":
            return tree_sensitivity(releases, mechanism.separation, mechanism.participations(releases))


def _without_amplification(sampled: _Sampled, deviation: float) -> float:
    """The deviation of one Gaussian release that costs no less, as if every client took part in every round."""
    parts = [
        count * ((2 if mechanism.overflow else 1) / mechanism.noise_multiplier) ** 2 for mechanism, count in sampled
    ]
    return (sum(parts) + deviation**-2) ** -0.5


def _with_noise(mechanism: Mechanism, multiplier: float) -> Mechanism:
    return msgspec.structs.replace(mechanism, noise_multiplier=multiplier)


def _multiplier(step: int) -> float:
    """All decimal numbers of 4 significant digits in order; step 0 is 1."""
    exponent, rest = divmod(step, _NUMBERS)
    return float(f"{1000 + rest}e{exponent - 3}")


def _last(cost: Callable[[int], float], budget: float, bounds: tuple[int, int], scale: Callable[[int], float]) -> int:
    """The last step whose cost is within the budget. Costs grow; that of the first step is within it.

    By false position on logarithms of costs over `scale` (Illinois: the end that stays counts half), for a cost may
    take a second to compute; where a cost is 0 or infinite, by bisection.
    """

    def excess(step: int) -> float:
        value = cost(step)
        return math.log(value / budget) if value else -math.inf

    low, high = bounds
    above = excess(high)
    if above <= 0.0:
        return high
    below = excess(low)
    while high - low > 1:
        share = below / (below - above) if math.isfinite(below) and math.isfinite(above) else 0.5
        place = scale(low) + share * (scale(high) - scale(low))
        middle = _first(scale, place, (low + 1, high - 1))
        value = excess(middle)
        if value <= 0.0:
            low, below, above = middle, value, above / 2
        else:
            high, above, below = middle, value, below / 2
    return low


def _first(scale: Callable[[int], float], place: float, bounds: tuple[int, int]) -> int:
    """The first step between the bounds whose scale is no less than `place`; the last where there is none."""
    return bounds[0] + bisect_left(range(*bounds), place, key=scale)
