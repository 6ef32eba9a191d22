"""How much one silo counts in a ring: the coordinator's limits on what silos claim, and a silo's on what it believes.

Each silo knows its own model, and can subtract it from the mean. So the mean shows a silo's model not only if that is
nearly all of the mean, but also if it is nearly all that another silo has not contributed itself. A coordinator that
keeps these limits makes no ring that a silo with the default options refuses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low

MAX_WEIGHT_FACTOR = 10.0
"""How many times the median of examples a silo counts for at most, as in rounds with a server."""
MAX_SHARE = 0.5
"""How much of a mean one model may be."""
MAX_REMAINDER = 0.75
"""How much of a mean without a silo's own model one other model may be; of three equal ones it is 0.5."""
MAX_BOUND_FACTOR = 100.0
"""How many times the median the largest number of a model may be, which determines the steps of all silos."""
MAX_OWN_BOUND_FACTOR = 2.0**12
"""How many times a silo's own largest number the bound of a ring may be: a step is then 2^-17 of that number."""
MIN_MEDIAN = 3
"""With fewer numbers, none is an outlier: of two, either could be the wrong one."""
_ROUNDING = 1e-6


def limit_weights(num_examples: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of silos from the examples that they claim, so that no claim alone decides the mean.

    A weight is at most `MAX_WEIGHT_FACTOR` times the lower median, and the largest ones are such that the shares are
    within `MAX_SHARE` and `MAX_REMAINDER`.
    """
    claims = sorted((number for number in num_examples.values() if number > 0.0), reverse=True)
    if len(claims) < MIN_MEDIAN:
        return dict(num_examples)
    rest = math.fsum(claims[2:])
    most = min(MAX_WEIGHT_FACTOR * median_low(claims), rest * MAX_REMAINDER / (1.0 - MAX_REMAINDER), rest + claims[1])
    return {silo: min(number, most) for silo, number in num_examples.items()}


def find_outliers(largest: Mapping[str, float]) -> dict[str, str]:
    """Return the silos whose largest number would make the steps of all others too coarse, and why."""
    median = limit(largest.values())
    return {
        silo: f"the largest number of its model is {value:.3g}, more than {MAX_BOUND_FACTOR:g} times the median of all "
        f"silos, {median / MAX_BOUND_FACTOR:.3g}"
        for silo, value in largest.items()
        if value > median > 0.0
    }


def limit(values: Collection[float], factor: float = MAX_BOUND_FACTOR) -> float:
    """Return `factor` times the lower median of what silos state; infinity of fewer than `MIN_MEDIAN` numbers."""
    return factor * median_low(values) if len(values) >= MIN_MEDIAN else math.inf


def check_shares(shares: Sequence[float], max_share: float = MAX_SHARE) -> None:
    """Raise `ValueError` if a mean with these shares would show one silo's model, to others or to one of them."""
    first, second = sorted(shares, reverse=True)[:2]
    if min(shares) < 0.0:
        raise ValueError(f"a share is {min(shares):.3g}; expected at least 0")
    most = min(max_share, 1.0 - 1.0 / len(shares))
    if first > most + _ROUNDING:
        raise ValueError(f"one model is {first:.3g} of the mean, and would be seen in it; expected at most {most:.3g}")
    if first > MAX_REMAINDER * (1.0 - second) + _ROUNDING:
        raise ValueError(
            f"one model is {first:.3g} of the mean and another one {second:.3g}, so that each of these two silos would "
            f"see the other's; expected at most {MAX_REMAINDER:g} of what is left without either"
        )


def check_bound(bound: float, largest: float) -> None:
    """Raise `ValueError` if the steps of a quantizer would be too coarse for a model with this largest number."""
    if bound > MAX_OWN_BOUND_FACTOR * largest > 0.0:
        raise ValueError(
            f"the bound is {bound:.3g}, and the largest number of the own model {largest:.3g}, which would be lost in "
            f"rounding; expected at most {MAX_OWN_BOUND_FACTOR:g} times as much"
        )
