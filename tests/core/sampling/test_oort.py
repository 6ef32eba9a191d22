"""Oort beside a NumPy transcription of the paper's Algorithm 1, and what the paper claims of it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from fedplat.sampling import ClientHistory, Oort
from support.waiting import Waiting, heard

RNG = np.random.default_rng


def test_scores_are_those_of_the_paper() -> None:
    rng, round_, preferred_s = RNG(0), 30, 4.0
    losses, sizes = rng.gamma(2.0, 1.0, 60), rng.integers(1, 50, 60).astype(float)
    durations, rounds = rng.gamma(2.0, 3.0, 60), rng.integers(1, 30, 60)
    pasts = [
        heard(loss, duration, round_=last, num_examples=size)
        for loss, duration, last, size in zip(losses, durations, rounds.tolist(), sizes, strict=True)
    ]
    utility = sizes * losses  # |B| sqrt(1/|B| sum loss²)
    utility = np.minimum(utility, np.quantile(utility, 0.95))
    expected = utility / utility.max() + np.sqrt(0.1 * np.log(round_) / rounds)
    expected *= np.where(durations > preferred_s, (preferred_s / durations) ** 2, 1.0)
    np.testing.assert_allclose(Oort(pacer_s=1.0).scores(pasts, round_, preferred_s), expected, rtol=1e-12)


def test_the_pacer_raises_the_duration_when_less_utility_comes_in() -> None:
    policy = Oort(pacer_s=3.0, window=2)
    rising, falling = [0.0, 1, 2, 3, 4, 5, 6, 7, 8], [0.0, 9, 8, 7, 6, 6, 7, 1, 1]
    assert [policy.preferred_s(rising, round_) for round_ in range(1, 10)] == [3.0] * 9
    # Rounds 1 + 2 brought 17 and 3 + 4 brought 13; 5 + 6 brought 13 as well, 7 + 8 only 2.
    assert [policy.preferred_s(falling, round_) for round_ in range(1, 10)] == [3.0] * 4 + [6.0] * 4 + [9.0]


def test_exploitation_admits_who_is_near_the_cut_off_and_draws_by_utility() -> None:
    """K = 1 of five: those with less than 95 % of the best are never drawn, the others by their scores."""
    losses = [1.0, 0.97, 0.96, 0.9, 0.2]
    pasts = {i: heard(loss) for i, loss in enumerate(losses)}
    policy = Oort(pacer_s=5.0, exploration=0.0, min_exploration=0.0)
    rng, waiting = RNG(1), Waiting.of(5, pasts)
    drawn = Counter(policy.draw(waiting, 1, rng)[0] for _ in range(3000))
    scores = policy.scores(list(pasts.values()), 1, 5.0)
    admitted = [i for i in range(5) if scores[i] >= 0.95 * scores.max()]
    assert admitted == [0, 1, 2]
    assert set(drawn) == set(admitted)
    expected = scores[admitted] / scores[admitted].sum() * 3000
    assert stats.chisquare([drawn[i] for i in admitted], expected).pvalue > 0.01


@pytest.mark.parametrize(("round_", "share"), [(1, 0.9), (2, 0.882), (11, 0.9 * 0.98**10), (76, 0.2), (500, 0.2)])
def test_the_share_that_explores_decays(round_: int, share: float) -> None:
    waiting = Waiting.of(100, {i: heard(1.0) for i in range(50)}, round_)
    rng = RNG(2)
    new = [sum(index >= 50 for index in Oort(pacer_s=5.0).draw(waiting, 10, rng)) for _ in range(400)]
    assert {math.floor(share * 10), math.ceil(share * 10)} >= set(new)
    assert np.mean(new) == pytest.approx(share * 10, abs=0.1)


def test_a_cohort_of_one_explores_too() -> None:
    waiting, rng = Waiting.of(20, {i: heard(1.0) for i in range(10)}, 400), RNG(3)
    new = [Oort(pacer_s=5.0).draw(waiting, 1, rng)[0] >= 10 for _ in range(2000)]
    assert np.mean(new) == pytest.approx(0.2, abs=0.04)


def test_the_unexplored_are_drawn_by_speed_where_a_label_tells_it() -> None:
    waiting = Waiting([{"ghz": "1"}, {"ghz": "3"}, {}, {"ghz": "2"}])
    policy, rng = Oort(pacer_s=5.0, speed="ghz"), RNG(4)
    drawn = Counter(policy.draw(waiting, 1, rng)[0] for _ in range(3000))
    assert stats.chisquare([drawn[i] for i in range(4)], [3000 * speed / 8 for speed in (1, 3, 2, 2)]).pvalue > 0.01


def test_a_client_that_exaggerates_gains_no_more_than_the_best_of_the_others() -> None:
    pasts = [heard(1.0 + i / 100) for i in range(99)] + [heard(1e200, num_examples=1e200)]
    scores = Oort(pacer_s=5.0).scores(pasts, 1, 5.0)
    assert scores[-1] == scores[-2] == 1.0


def test_an_old_client_is_tried_again() -> None:
    """Temporal uncertainty: of two alike, the one that took part long ago has the better score."""
    scores = Oort(pacer_s=5.0).scores([heard(1.0, round_=2), heard(1.0, round_=90)], 100, 5.0)
    assert scores[0] > scores[1]


def test_a_client_that_took_part_and_never_reported_is_no_newcomer() -> None:
    waiting = Waiting.of(2, {0: ClientHistory(1, 1)})
    assert Oort(pacer_s=1.0, exploration=1.0).draw(waiting, 1, RNG(5)) == [1]


@dataclasses.dataclass
class Device:
    loss: float
    duration_s: float
    times: int = 0


def play(policy: Oort, devices: list[Device], num_rounds: int, seed: int) -> None:
    """Rounds of ten in which a client's loss falls by a tenth whenever it takes part."""
    rng, pasts, utilities = RNG(seed), dict[int, ClientHistory](), [0.0]
    for round_ in range(1, num_rounds + 1):
        waiting = Waiting([{}] * len(devices), pasts, round_, utilities)
        utilities.append(0.0)
        for index in policy.draw(waiting, 10, rng):
            device = devices[index]
            device.times += 1
            pasts[index] = heard(device.loss, device.duration_s, round_=round_, num_examples=10, times=device.times)
            utilities[round_] += pasts[index].utility
            device.loss *= 0.9


def test_clients_with_a_high_loss_that_are_fast_take_part_most_and_all_take_part() -> None:
    """Section 4.1: the sweet spot of statistical and system efficiency. Four groups of 25 clients."""
    kinds = {"high fast": (2.0, 1.0), "high slow": (2.0, 30.0), "low fast": (0.5, 1.0), "low slow": (0.5, 30.0)}
    devices = [Device(*kind) for kind in kinds.values() for _ in range(25)]
    play(Oort(pacer_s=2.0), devices, 150, seed=6)
    assert all(device.times for device in devices)
    times = {kind: sum(device.times for device in devices[25 * i : 25 * i + 25]) for i, kind in enumerate(kinds)}
    assert times["high fast"] > 1.5 * times["low fast"]
    assert times["high fast"] > 2 * times["high slow"]
    assert times["low fast"] > times["low slow"]
