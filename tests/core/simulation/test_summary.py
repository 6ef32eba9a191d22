from __future__ import annotations

import math

import numpy as np
import pytest

from fedplat.simulation.report.plots import gini
from fedplat.simulation.report.summary import MetricValue, series, summarize
from support.simulation.runs import attempt, result


def of(*values: float, metric: str = "accuracy", step: int = 1, target: float = 0.0):
    attempts = [attempt(step * (n + 1), {metric: value}) for n, value in enumerate(values)]
    return summarize(result(*attempts), metric, target)


def test_last_and_best() -> None:
    found = of(0.1, 0.5, 0.4)
    assert found.last == MetricValue(value=0.4, round=3, at_s=30.0)
    assert found.best == MetricValue(value=0.5, round=2, at_s=20.0)
    assert found.rounds_to_target is None


def test_of_a_loss_the_least_is_best() -> None:
    found = of(3.0, 1.0, 2.0, metric="loss", target=2.0)
    assert found.best is not None
    assert found.best.value == 1.0
    assert found.rounds_to_target == pytest.approx(1.5)


def test_rounds_to_the_target_are_interpolated_along_the_running_best() -> None:
    """0.6 (round 10), 0.5 (20), 0.8 (30): the running best goes from 0.6 to 0.8 in rounds 20 to 30."""
    found = of(0.6, 0.5, 0.8, step=10, target=0.7)
    assert found.rounds_to_target == pytest.approx(25.0)
    assert found.seconds_to_target == pytest.approx(250.0)
    assert of(0.6, 0.5, step=10, target=0.6).rounds_to_target == 10.0
    assert of(0.6, 0.5, target=0.7).rounds_to_target is None


def test_values_that_are_no_numbers_are_passed_over() -> None:
    found = of(math.nan, 0.5, math.nan, target=0.4)
    assert found.best is not None
    assert found.best.round == 2
    assert found.rounds_to_target == 2.0
    assert of(math.nan, math.nan, target=0.4).rounds_to_target is None


def test_a_run_without_scores() -> None:
    found = summarize(result(attempt(1, {}, metrics={"accuracy": 0.7})), target=0.5)
    assert found.last is None
    assert found.of_clients == 0.7


def test_a_series_is_of_scored_and_committed_rounds() -> None:
    abandoned = attempt(2, {"accuracy": 0.9}, phase="ABANDONED")
    found = series(
        [attempt(1, {"accuracy": 0.5}), abandoned, attempt(3, {}), attempt(4, {"accuracy": 0.6})], "accuracy"
    )
    assert found.rounds.tolist() == [1.0, 4.0]
    assert found.at_s.tolist() == [10.0, 40.0]
    assert found.values.tolist() == [0.5, 0.6]


def test_gini() -> None:
    assert gini(np.array([2, 2, 2])) == pytest.approx(0.0)
    assert gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
    assert gini(np.array([1, 3])) == pytest.approx(0.25)
    assert gini(np.zeros(3, np.int64)) == 0.0
