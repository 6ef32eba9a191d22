"""The mean of a number over seeds, and its confidence interval.

>>> print(mean_interval([0.90, 0.92, 0.94]))
0.92 ± 0.05
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable

from msgspec import Struct

CONFIDENCE = 0.95
_STEPS = 60
"""Bisections of an angle below 2: then its error is that of a float."""


class MeanInterval(Struct, frozen=True, kw_only=True):
    """The mean of `count` numbers, and the interval around it that contains the true mean with this confidence.

    `deviation` is the sample's standard deviation (divisor count - 1). It and `half_width` are None for a single
    number, from which they cannot be estimated.
    """

    mean: float
    half_width: float | None
    deviation: float | None
    count: int
    confidence: float = CONFIDENCE

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.half_width is None else f"{self.mean:.4g} ± {self.half_width:.2g}"


def mean_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> MeanInterval:
    """Return the mean of independent numbers, such as the accuracies with several seeds, and its confidence interval.

    The interval is that of Student's t distribution; it is NaN if a number is not finite. Raises `ValueError` without
    a number, and for a confidence that is not between 0 and 1.
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
    mean = math.fsum(values) / count
    if count == 1:
        return MeanInterval(mean=mean, half_width=None, deviation=None, count=1, confidence=confidence)
    deviation = statistics.stdev(values)
    half_width = t_quantile(confidence, count - 1) * deviation / math.sqrt(count)
    return MeanInterval(mean=mean, half_width=half_width, deviation=deviation, count=count, confidence=confidence)


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
