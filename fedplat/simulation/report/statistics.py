"""Means over seeds, and their confidence intervals.

>>> print(mean_interval([0.90, 0.92, 0.94]))
0.920 ± 0.050
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
EVERY_NUMBER = -math.inf, math.inf
_STEPS = 60
"""Bisections of an angle below 2: then its error is that of a float."""


class MeanInterval(Struct, frozen=True, kw_only=True):
    """The mean of `count` numbers, and the interval around it that contains the true mean with this confidence.

    `deviation` is the sample's standard deviation (divisor count - 1). It and `half_width` are None for a single
    number, from which they cannot be estimated. No end of the interval is outside `bounds`, the possible values.
    """

    mean: float
    half_width: float | None
    deviation: float | None
    count: int
    confidence: float = CONFIDENCE
    bounds: tuple[float, float] = EVERY_NUMBER

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return None if self.half_width is None else max(self.mean - self.half_width, self.bounds[0])

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half_width is None else min(self.mean + self.half_width, self.bounds[1])

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.mean:.4g}"
        if not self.half_width > 1e-9 * abs(self.mean):  # NaN, or a rounding error
            return f"{self.mean:.4g} ± {0.0 if self.half_width >= 0.0 else self.half_width:g}"
        decimals = max(0, 1 - math.floor(math.log10(self.half_width)))  # two digits of the half width
        low, high = self.mean - self.half_width, self.mean + self.half_width
        if low < self.bounds[0] or high > self.bounds[1]:
            return f"{self.mean:.{decimals}f} ({self.low:.{decimals}f} to {self.high:.{decimals}f})"
        return f"{self.mean:.{decimals}f} ± {self.half_width:.{decimals}f}"


class MeanSeries(Struct, frozen=True, kw_only=True):
    """A metric in the rounds that all seeds evaluated, as arrays of equal length.

    `at_s` is the mean virtual second of the round; `low` and `high` are the ends of the confidence interval of the
    mean, NaN with a single seed.
    """

    rounds: Floats
    at_s: Floats
    mean: Floats
    low: Floats
    high: Floats


def mean_interval(
    values: Iterable[float], confidence: float = CONFIDENCE, bounds: tuple[float, float] = EVERY_NUMBER
) -> MeanInterval:
    """Return the mean of independent numbers, such as the accuracies with several seeds, and its confidence interval.

    The interval is that of Student's t distribution, within the `bounds` of possible values; it is NaN if a number is
    not finite. Raises `ValueError` without a number, and for a confidence that is not between 0 and 1.
    """
    values = [float(value) for value in values]
    if not values:
        raise ValueError("there are no values; expected at least one")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence = {confidence}: expected a number between 0 and 1, such as 0.95")
    count = len(values)
    if not all(map(math.isfinite, values)):
        spread = None if count == 1 else math.nan
        return MeanInterval(mean=math.nan, half_width=spread, deviation=spread, count=count, confidence=confidence)
    mean, deviation, half_width = math.fsum(values) / count, None, None
    if count > 1:
        deviation = statistics.stdev(values)
        half_width = t_quantile(confidence, count - 1) * deviation / math.sqrt(count)
    return MeanInterval(
        mean=mean, half_width=half_width, deviation=deviation, count=count, confidence=confidence, bounds=bounds
    )


@functools.cache
def t_quantile(confidence: float, degrees: int) -> float:
    """Return the t for which Student's distribution is within [-t, t] with this probability.

    `degrees` is the number of degrees of freedom, at least 1. The probability is the finite sum of Abramowitz and
    Stegun 1964, 26.7.3 and 26.7.4, in the angle arctan(t / sqrt(degrees)).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, degrees) < confidence else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _probability(angle: float, degrees: int) -> float:
    """Return the probability of [-t, t], for t = sqrt(degrees) tan(angle)."""
    is_odd, cosine = degrees % 2, math.cos(angle)
    term, total = (cosine if is_odd else 1.0), 0.0
    for number in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine * cosine * number / (number + 1)
    return (angle + math.sin(angle) * total) * 2 / math.pi if is_odd else math.sin(angle) * total
