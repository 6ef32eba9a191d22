from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from scipy import stats

from fedplat.simulation.report import summary
from fedplat.simulation.report.summary import mean_interval, t_quantile


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_quantiles_are_those_of_students_distribution(confidence: float) -> None:
    for degrees in [*range(1, 41), 99, 1000, 5001]:
        expected = stats.t.ppf((1 + confidence) / 2, degrees)
        assert t_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("count", [2, 3, 5, 20])
def test_an_interval_is_that_of_scipy(count: int) -> None:
    values = np.random.default_rng(count).normal(0.9, 0.01, count)
    found = mean_interval(values, 0.9)
    low, high = stats.t.interval(0.9, count - 1, loc=values.mean(), scale=stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))
    assert found.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.deviation == pytest.approx(values.std(ddof=1), rel=1e-12)
    assert (found.count, found.confidence) == (count, 0.9)


def test_a_single_value_has_no_interval() -> None:
    found = mean_interval([0.5])
    assert (found.mean, found.half_width, found.deviation, found.low, found.high) == (0.5, None, None, None, None)
    assert str(found) == "0.5"


def test_an_interval_with_a_value_that_is_not_finite_is_nan() -> None:
    found = mean_interval([0.5, math.inf])
    assert found.half_width is not None
    assert math.isnan(found.mean)
    assert math.isnan(found.half_width)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.9, 0.92, 0.94], "0.920 ± 0.050"),
        ([100.0, 300.0, 500.0], "300 ± 497"),
        ([0.1, 0.1, 0.1], "0.1 ± 0"),
        ([math.nan, 1.0], "nan ± nan"),
        ([1234.5678], "1235"),
    ],
)
def test_text_has_two_digits_of_the_half_width(values: list[float], text: str) -> None:
    assert str(mean_interval(values)) == text


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="there are no values; expected at least one"):
        mean_interval([])
    with pytest.raises(ValueError, match=r"confidence = 95: expected a number between 0 and 1, such as 0\.95"):
        mean_interval([1.0, 2.0], 95)


def test_its_example() -> None:
    assert doctest.testmod(summary) == (0, 1)
