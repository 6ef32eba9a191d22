"""Stages, early stopping and the table, with outcomes from functions instead of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedplat.sweep.plan import (
    Configuration,
    IntegerRange,
    LogRange,
    MedianStopping,
    Objective,
    SearchOptions,
    SuccessiveHalving,
)
from fedplat.sweep.schedule import TrialChooser, choose_stopped, once
from fedplat.sweep.table import make_table
from support.sweeps import drive, outcome

ACCURACY = Objective("accuracy", maximize=True)
LOSS = Objective("loss", maximize=False)
FIVE = [Configuration(number, {"config.mu": float(number)}) for number in range(1, 6)]


def linear(configuration: Configuration, seed: int) -> Sequence[float]:
    """Configuration n gains n hundredths per round."""
    return [0.01 * configuration.number * number + 0.001 * seed for number in range(1, 11)]


def test_without_early_stopping_all_runs_are_one_stage() -> None:
    stages, evaluated = drive(once(FIVE), [7, 8], ACCURACY, linear)
    (parts,) = stages
    assert [(part.configuration.number, part.seed, part.until) for part in parts] == [
        (number, seed, 0) for number in range(1, 6) for seed in (7, 8)
    ]
    assert [each.stopped_after for each in evaluated] == [0] * 5


def test_halving_continues_with_the_best_half() -> None:
    stopping = SuccessiveHalving(rounds=[2, 5])
    stages, evaluated = drive(once(FIVE), [0, 1], ACCURACY, linear, stopping)
    assert [[part.configuration.number for part in parts[::2]] for parts in stages] == [
        [1, 2, 3, 4, 5],
        [3, 4, 5],
        [4, 5],
    ]
    assert [parts[0].until for parts in stages] == [2, 5, 0]
    assert [each.stopped_after for each in evaluated] == [2, 2, 5, 0, 0]
    _, falling = drive(once(FIVE), [0, 1], LOSS, linear, stopping)
    assert [each.stopped_after for each in falling] == [0, 0, 5, 2, 2]


def test_the_median_rule_stops_what_is_below_the_median() -> None:
    _, evaluated = drive(once(FIVE), [0], ACCURACY, linear, MedianStopping(rounds=[3]))
    assert [each.stopped_after for each in evaluated] == [3, 3, 0, 0, 0]
    few = MedianStopping(rounds=[3], min_configurations=6)
    assert not any(each.stopped_after for each in drive(once(FIVE), [0], ACCURACY, linear, few)[1])


@pytest.mark.parametrize(
    ("keep", "count", "stopped"), [(0.5, 1, 0), (0.5, 3, 1), (0.7, 10, 3), (0.01, 4, 3), (0.99, 4, 0)]
)
def test_the_kept_fraction_is_rounded_up(keep: float, count: int, stopped: int) -> None:
    scores = {number: -float(number) for number in range(count)}
    found = choose_stopped(SuccessiveHalving(rounds=[1], keep=keep), scores)
    assert found == set(range(count - stopped, count))


def test_what_has_no_finite_score_is_the_worst_and_one_always_continues() -> None:
    nothing = {1: -math.inf, 2: 0.5, 3: -math.inf, 4: 0.4}
    assert choose_stopped(SuccessiveHalving(rounds=[1]), nothing) == {1, 3}
    assert choose_stopped(MedianStopping(rounds=[1]), {1: -math.inf, 2: -math.inf}, [0.1, 0.2, 0.3]) == {2}
    assert choose_stopped(MedianStopping(rounds=[1]), {1: 0.5, 2: 0.5, 3: 0.5}) == set()


def test_a_run_that_ends_before_the_rung_counts_with_its_last_value() -> None:
    def short(configuration: Configuration, seed: int) -> Sequence[float | None]:
        return [None] if configuration.number == 1 else [0.1 * configuration.number]

    stages, evaluated = drive(once(FIVE[:2]), [0], ACCURACY, short, SuccessiveHalving(rounds=[4]))
    assert [each.stopped_after for each in evaluated] == [4, 0]
    assert len(stages) == 2


def test_the_table_has_the_best_first_and_means_with_intervals() -> None:
    stopping = SuccessiveHalving(rounds=[2, 5])
    _, evaluated = drive(once(FIVE), [0, 1, 2], ACCURACY, linear, stopping)
    rows = make_table(evaluated, ACCURACY)
    assert [(row.rank, row.number, row.stopped_after) for row in rows] == [
        *((1, 5, 0), (2, 4, 0)),
        *((3, 3, 5), (4, 2, 2), (5, 1, 2)),
    ]
    best = rows[0]
    values = np.array([0.5, 0.501, 0.502])
    assert best.score == pytest.approx(values.mean())
    # Student's t for 2 degrees of freedom and 95 %: 4.3027 (any table of the distribution)
    assert best.high == pytest.approx(values.mean() + 4.302653 * values.std(ddof=1) / np.sqrt(3), abs=1e-6)
    assert best.scores == pytest.approx({"0": 0.5, "1": 0.501, "2": 0.502})
    assert rows[2].score == pytest.approx(0.01 * 3 * 5 + 0.001)
    assert (best.status, rows[2].status) == ("COMPLETED", "STOPPED")
    assert (best.curve.rounds, rows[2].curve.rounds) == (list(range(1, 11)), list(range(1, 6)))


def test_a_diverged_seed_has_no_mean_and_targets_are_those_reached() -> None:
    def curve(configuration: Configuration, seed: int) -> Sequence[float | None]:
        return [0.2, None] if (configuration.number, seed) == (2, 1) else [0.1, 0.1]

    _, evaluated = drive(once(FIVE[:2]), [0, 1], ACCURACY, curve)
    rows = make_table(evaluated, ACCURACY)
    assert [(row.number, row.score) for row in rows] == [(1, pytest.approx(0.1)), (2, None)]
    assert rows[1].scores == {"0": pytest.approx(0.1), "1": None}
    assert rows[1].curve.mean[1] is None
    reached = outcome([0.1, 0.3], target_round=1.5, target_s=15.0)
    (row,) = make_table([type(evaluated[0])(FIVE[0], {0: reached, 1: outcome([0.1, 0.1])})], ACCURACY)
    assert (row.num_reached, row.num_seeds, row.target_rounds, row.target_s) == (1, 2, 1.5, 15.0)


def test_the_score_is_the_last_or_the_best_value() -> None:
    values = outcome([0.1, 0.5, None, 0.3])
    assert values.score(ACCURACY) == 0.3
    assert values.score(Objective("accuracy", maximize=True, best=True)) == 0.5
    assert values.score(Objective("loss", maximize=False, best=True), until=2) == 0.1
    assert math.isnan(values.score(ACCURACY, until=3) or 0.0)
    assert outcome([]).score(ACCURACY) is None


SEARCH = SearchOptions(trials=24, batch=3, parameters={"config.learning_rate": LogRange(low=1e-4, high=10.0)})


def parabola(configuration: Configuration, seed: int) -> Sequence[float]:
    """The best learning rate is 0.1."""
    return [-((math.log10(configuration.values["config.learning_rate"]) + 1.0) ** 2)] * 4


@pytest.mark.parametrize("stopping", [None, MedianStopping(rounds=[2])])
def test_a_search_approaches_the_best_value_and_is_reproducible(stopping: MedianStopping | None) -> None:
    stages, evaluated = drive(TrialChooser(SEARCH, ACCURACY), [0], ACCURACY, parabola, stopping)
    again = drive(TrialChooser(SEARCH, ACCURACY), [0], ACCURACY, parabola, stopping)[1]
    assert again == evaluated
    assert [each.configuration.number for each in evaluated] == list(range(1, 25))
    assert max(len(parts) for parts in stages) == 3
    best = make_table(evaluated, ACCURACY)[0]
    assert 0.05 < best.values["config.learning_rate"] < 0.2
    assert any(each.stopped_after for each in evaluated) == (stopping is not None)


def test_a_search_does_not_repeat_a_configuration() -> None:
    rounds = {"rounds": IntegerRange(low=1, high=3)}
    options = SearchOptions(trials=20, batch=4, sampler="random", parameters=dict(rounds))
    stages, evaluated = drive(
        TrialChooser(options, ACCURACY), [0], ACCURACY, lambda each, seed: [each.values["rounds"]]
    )
    assert sorted(each.configuration.values["rounds"] for each in evaluated) == [1, 2, 3]
    assert sum(map(len, stages)) == 3
