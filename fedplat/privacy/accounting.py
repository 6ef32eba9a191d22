"""The cost of releases: epsilon at a given delta, the noise that a budget needs, the releases that it allows.

`poisson` is accounted for adding or removing one client; `fixed` and `tree` for replacing one client's reports by
zeros. For these two, all that one client can change in a job is one Gaussian release: a vector of length
participations^(1/2), or `tree_sensitivity`. Results err upwards.

No distribution of privacy losses is known for `skellam`, that is, noise on whole numbers, so that charges among which
there is one are accounted by Rényi divergences alone. For replacing one client's reports by zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
from msgspec import Struct

from fedplat.privacy import losses
from fedplat.privacy.losses import FINE, Precision
from fedplat.privacy.options import Charge, Mechanism, Privacy, describe_adjacency, tree_sensitivity

CACHED = 4096
"""Number of cached results of each kind; a private job of a server needs two per release, and two for its plan."""
_SMALLEST, _LARGEST = -4, 6
"""Decimal exponents of the smallest and the largest multiplier in a search."""
_NUMBERS = 9000
"""Numbers of 4 significant digits in a decade."""
_FLOAT_ERROR = 1e-12
_FLOAT_ERROR_PER_RELEASE = 1e-16
"""Bound on the error of delta from Fourier transforms of 64-bit floats; 2e-17 per release was measured."""

_COARSE_GRIDS = ((16, 5e-3), (4, 3e-4))
"""Grids on which noise and releases are searched first.

The factor by which each is coarser, and the distance of its answer from the budget, as a logarithm.
"""
_COARSEST = _COARSE_GRIDS[0][0]
_SECANTS = 8
"""Number of evaluations after which a search continues by bisection."""

_Sampled = list[tuple[Mechanism, int]]


def epsilon(charges: Sequence[Charge], delta: float, precision: Precision = FINE) -> float:
    """Return epsilon by privacy loss distributions; `inf` if delta is too small for that arithmetic.

    With noise on whole numbers it is by Rényi divergences, as `epsilon_rdp`.

    It errs upwards, by little with the default precision. Raises `ValueError` unless delta is between 0 and 1, and
    `MissingExtraError`.
    """
    return _epsilon(tuple(charges), delta, precision)


@lru_cache(maxsize=CACHED)
def _epsilon(charges: tuple[Charge, ...], delta: float, precision: Precision, coarser: int = 1) -> float:
    """Return epsilon on a grid of losses that is coarser by a factor: faster, and slightly larger."""
    if _has_whole_numbers(charges):
        return _epsilon_rdp(charges, delta)
    _check(delta)
    sampled, deviation = _group_charges(charges)
    if not sampled:
        return losses.gaussian_epsilon(deviation, delta) if math.isfinite(deviation) else 0.0
    sampled, usable = _without_rare(sampled, delta, precision.rare)
    usable -= _FLOAT_ERROR + _FLOAT_ERROR_PER_RELEASE * sum(count for _, count in sampled)
    interval = losses.interval(sampled, deviation, precision.points)
    if interval > losses.MAX_INTERVAL:
        return losses.gaussian_epsilon(_without_amplification(sampled, deviation), delta)
    if usable <= 0.0:
        return math.inf
    interval *= coarser
    parts = [losses.compute_sampled_losses(mechanism, interval).self_compose(count) for mechanism, count in sampled]
    if math.isfinite(deviation):
        parts.append(losses.gaussian(deviation, interval))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(usable))


def epsilon_rdp(charges: Sequence[Charge], delta: float) -> float:
    """Return epsilon by Rényi divergences, a cross-check: larger, except with an `overflow`, which it ignores."""
    return _epsilon_rdp(tuple(charges), delta)


@lru_cache(maxsize=CACHED)
def _epsilon_rdp(charges: tuple[Charge, ...], delta: float) -> float:
    _check(delta)
    if _has_whole_numbers(charges):
        return _whole_epsilon(charges, delta)
    sampled, deviation = _group_charges(charges)
    if not sampled and not math.isfinite(deviation):
        return 0.0
    return losses.renyi_epsilon(sampled, deviation, delta)


def _whole_epsilon(charges: tuple[Charge, ...], delta: float) -> float:
    """Return epsilon of charges with noise on whole numbers among them. An overflow counts here, too."""
    sampled, deviation = _group_charges(charges)
    sampled, usable = _without_rare(sampled, delta, FINE.rare)
    if usable <= 0.0:
        return math.inf
    amplified = [(mechanism, count) for mechanism, count in sampled if not mechanism.overflow]
    overflowing = [(mechanism, count) for mechanism, count in sampled if mechanism.overflow]
    whole = [(each.mechanism, each.releases) for each in charges if each.mechanism.kind == "skellam"]
    return losses.whole_renyi_epsilon([*amplified, *whole], _without_amplification(overflowing, deviation), usable)


def _has_whole_numbers(charges: Sequence[Charge]) -> bool:
    return any(charge.mechanism.kind == "skellam" and charge.releases for charge in charges)


def epsilons(mechanism: Mechanism, counts: Sequence[int], delta: float, precision: Precision = FINE) -> list[float]:
    """Return epsilon after each number of releases."""
    return [epsilon([Charge(mechanism, count)], delta, precision) for count in counts]


def calibrate(
    mechanism: Mechanism, releases: int, budget: float, delta: float, precision: Precision = FINE
) -> Mechanism:
    """Return the mechanism with the least noise whose epsilon is within `budget`; its multiplier has 4 digits.

    The search begins at the multiplier of `mechanism`. Raises `ValueError` if no noise is enough.
    """

    def quieter(step: int, coarser: int = 1) -> float:
        return _epsilon((Charge(_with_noise(mechanism, _multiplier(-step)), releases),), delta, precision, coarser)

    def scale(step: int) -> float:
        return -math.log(_multiplier(-step))

    if not budget > 0.0:
        raise ValueError(f"epsilon is {budget:g}; expected a number above 0")
    loudest, quietest = -_LARGEST * _NUMBERS, -_SMALLEST * _NUMBERS
    if quieter(loudest, _COARSEST) > budget and quieter(loudest) > budget:
        raise ValueError(
            f"no noise multiplier up to {_multiplier(-loudest):g} keeps {releases} releases within epsilon {budget:g} "
            f"at delta {delta:g}; allow a larger epsilon or delta, or fewer rounds"
        )
    start = bisect_left(range(loudest, quietest), -math.log(mechanism.noise_multiplier), key=scale) + loudest
    step = _last_on_grids(quieter, budget, _Search((loudest, quietest), scale, start, 1.0), precision.near)
    return _with_noise(mechanism, _multiplier(-step))


def max_releases(
    mechanism: Mechanism,
    budget: float,
    delta: float,
    limit: int,
    before: Sequence[Charge] = (),
    precision: Precision = FINE,
) -> int:
    """Return the number of releases, at most `limit`, whose epsilon with the charges `before` is within `budget`."""

    def after(count: int, coarser: int = 1) -> float:
        return _epsilon((*before, Charge(mechanism, count)), delta, precision, coarser)

    _check(delta)
    if limit <= 0 or (after(1, _COARSEST) > budget and after(1) > budget):
        return 0
    return _last_on_grids(after, budget, _Search((1, limit), math.log, limit, 0.5), precision.near)


def _check(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta is {delta:g}; expected a number between 0 and 1, such as 1e-5")


def _group_charges(charges: Sequence[Charge]) -> tuple[_Sampled, float]:
    """Group equal mechanisms with independent trials; combine all others into the deviation of one Gaussian release."""
    counts: Counter[Mechanism] = Counter()
    for charge in charges:
        if charge.releases:
            counts[charge.mechanism] += charge.releases
    sampled = [(mechanism, count) for mechanism, count in counts.items() if mechanism.kind == "poisson"]
    others = [_length(charge) / charge.mechanism.noise_multiplier for charge in charges]
    length = math.hypot(*others)
    return sampled, 1.0 / length if length else math.inf


def _without_rare(sampled: _Sampled, delta: float, part: float) -> tuple[_Sampled, float]:
    """Ignore overflows so rare that all of them take at most `part` of delta; return the remaining delta, too."""
    kept: _Sampled = []
    for mechanism, count in sampled:
        chance = mechanism.overflow * count
        rare = 0.0 < chance <= part * delta / len(sampled)
        kept.append((msgspec.structs.replace(mechanism, overflow=0.0) if rare else mechanism, count))
        delta -= chance if rare else 0.0
    return kept, delta


def _length(charge: Charge) -> float:
    """Return how much one client can change in all releases together (L2), relative to its change in one."""
    mechanism, releases = charge.mechanism, charge.releases
    match mechanism.kind:
        case "poisson" | "skellam":
            return 0.0
        case "fixed":
            return math.sqrt(mechanism.participations(releases))
        case "tree":
            return tree_sensitivity(releases, mechanism.separation, mechanism.participations(releases))


def _without_amplification(sampled: _Sampled, deviation: float) -> float:
    """Return the deviation of one Gaussian release that costs at least as much: every client in every round."""
    parts = [
        count * ((2 if mechanism.overflow else 1) / mechanism.noise_multiplier) ** 2 for mechanism, count in sampled
    ]
    total = sum(parts) + deviation**-2
    return total**-0.5 if total else math.inf


def _with_noise(mechanism: Mechanism, multiplier: float) -> Mechanism:
    return msgspec.structs.replace(mechanism, noise_multiplier=multiplier)


def _multiplier(step: int) -> float:
    """Return the decimal number of 4 significant digits at a position of their order; step 0 is 1."""
    exponent, rest = divmod(step, _NUMBERS)
    return float(f"{1000 + rest}e{exponent - 3}")


@dataclasses.dataclass(frozen=True)
class _Search:
    """The start of a search for the last step within a budget; the cost of the first step is within it.

    `slope` is an estimate of the growth of the logarithm of the cost with `scale`.
    """

    bounds: tuple[int, int]
    scale: Callable[[int], float]
    start: int
    slope: float


def _last_on_grids(cost: Callable[[int, int], float], budget: float, search: _Search, near: float) -> int:
    """Return the last step whose cost on the finest grid is within the budget; `cost` takes a step and a coarseness.

    With `near`, a step is enough whose cost is below the budget by at most `near`, as a logarithm. The coarse grids
    find the neighbourhood, in which the fine one needs two or three evaluations. They err upwards: if the last step of
    all is within the budget on one of them, it is on the finest, too.
    """
    end = search.bounds[1]
    for coarser, tolerance in _COARSE_GRIDS:
        step, slope = _last(lambda step, coarser=coarser: cost(step, coarser), budget, search, tolerance)
        if step == end and cost(end, coarser) <= budget:
            return end
        search = dataclasses.replace(search, start=step, slope=slope)
    return _last(lambda step: cost(step, 1), budget * math.exp(-near / 2), search, near / 2)[0]


def _last(cost: Callable[[int], float], budget: float, search: _Search, near: float = 0.0) -> tuple[int, float]:
    """Return the last step whose cost is within the budget, or one with a cost `near` it, and the slope there.

    Costs grow with the steps. The search uses secants of the logarithm of the cost over `scale`, because one cost may
    take a second to compute; it uses bisection if a cost is 0 or infinite, or if secants take too long.
    """
    low, high = search.bounds[0], search.bounds[1] + 1
    place, slope = search.start, search.slope
    last: tuple[float, float] | None = None
    for count in itertools.count(1):
        value, position = _excess(cost(place), budget), search.scale(place)
        low, high = (place, high) if value <= 0.0 else (low, place)
        if math.isfinite(value) and last is not None and (value - last[0]) * (position - last[1]) > 0.0:
            slope = (value - last[0]) / (position - last[1])
        if high - low <= 1 or abs(value) < near:
            return (low if high - low <= 1 else place), slope
        if math.isfinite(value) and count <= _SECANTS:
            last, target = (value, position), position - value / slope
            place = low + max(1, bisect_right(range(low + 1, high), target, key=search.scale))
        else:
            place = (low + high) // 2
    raise AssertionError("the search did not end")


def _excess(cost: float, budget: float) -> float:
    return math.log(cost / budget) if cost else -math.inf


class Cost(Struct, frozen=True, kw_only=True):
    """A number of releases, and their total epsilon at `delta`, by PLD and, as a cross-check, by RDP.

    With noise that clients add, both are by RDP. `noise_multiplier` is that of the release with the least noise.
    `budget` is the job's bound on epsilon; None: it has noise, but no bound.
    """

    releases: int
    epsilon: float
    epsilon_rdp: float
    delta: float
    noise_multiplier: float
    adjacency: str
    budget: float | None = None


def cost_of(options: Privacy, mechanism: Mechanism, releases: int) -> Cost:
    """Return the cost of a number of releases of a private job. Raises `MissingExtraError` without extra `privacy`."""
    return cost_of_charges(options, mechanism, [Charge(mechanism, releases)])


def cost_of_charges(options: Privacy, mechanism: Mechanism, charges: Sequence[Charge]) -> Cost:
    """Return the cost of releases whose mechanisms may have more noise than that of the job, `mechanism`."""
    return Cost(
        releases=sum(charge.releases for charge in charges),
        epsilon=epsilon(charges, options.delta),
        epsilon_rdp=epsilon_rdp(charges, options.delta),
        delta=options.delta,
        noise_multiplier=mechanism.noise_multiplier,
        adjacency=describe_adjacency(mechanism),
        budget=options.epsilon,
    )
