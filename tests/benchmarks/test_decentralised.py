"""The comparison of modes: its bytes are those of a calculation by hand, and all modes do the same work."""

from __future__ import annotations

import numpy as np
import pytest

import decentralised
from decentralised import MODES, SILOS, Point
from fedplat.model import Parameters
from fedplat.pytorch.models import logistic_regression
from fedplat.simulation.data import Federation

SMALL = ['model.initial="fedplat.pytorch.models:logistic_regression"', "config.batch_size=8"]
ROUNDS = 2


def make_data() -> Federation:
    """Silos with 2, 4, 6 ... random pictures."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(np.arange(1, SILOS + 1) * 2)
    inputs = rng.random((int(ends[-1]), 1, 28, 28), np.float32)
    targets = rng.integers(10, size=len(inputs))
    return Federation(inputs, targets, np.split(np.arange(len(inputs)), ends[:-1]), inputs[:8], targets[:8])


def model_bytes() -> float:
    arrays = {name: tensor.numpy() for name, tensor in logistic_regression().state_dict().items()}
    return float(len(Parameters.from_arrays(arrays).to_bytes()))


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("FedAvg", 2 * SILOS),  # each silo downloads one, and uploads one
        ("EASGD, rounds", 2 * SILOS),
        ("gossip, ring", 4),  # to and from two neighbours
        ("gossip, exponential", 14),  # at the distances 1, 2 and 4 in both directions, and 8
        ("gossip, random pairs", 2),
        ("ring all-reduce", 2 * 2 * (SILOS - 1) / SILOS),  # reduce-scatter and all-gather, in and out
    ],
)
def test_the_busiest_nodes_bytes_are_those_of_a_calculation_by_hand(name: str, models: float) -> None:
    mode = MODES[name]
    points = decentralised.measure(mode, 1, ROUNDS, make_data(), SMALL)
    assert len(points) == ROUNDS or mode.group == "no server"  # more until the silos agree
    expected = [models * number * model_bytes() for number in range(1, len(points) + 1)]
    if name.startswith("gossip"):  # the last round has the ring all-reduce of the mean that is exported
        expected[-1] += 2 * 2 * (SILOS - 1) / SILOS * model_bytes()
    assert [point.busiest for point in points] == pytest.approx(expected)
    assert [point.at_s for point in points] == sorted(point.at_s for point in points)
    assert points[-1].accuracy is not None


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if not mode.has_rounds])
def test_modes_without_rounds_do_the_same_work(name: str) -> None:
    data, rounds = make_data(), 8
    versions = decentralised.count_versions(MODES[name], 1, rounds, data)
    trained = decentralised.simulate_schedule(MODES[name], 1, versions, data) @ data.sizes()
    wanted = rounds * data.sizes().sum()
    assert trained == pytest.approx(wanted, rel=0.1)
    if name != "SSP, slack 3":
        assert versions * MODES[name].merged > rounds * SILOS, "fast silos with few examples train more often"


def test_a_row_has_medians_and_says_when_the_target_was_not_reached() -> None:
    def run(end: float, size: float) -> list[Point]:
        return [Point(30.0, size, 0.5), Point(60.0, 2 * size, None), Point(120.0, 3 * size, end)]

    good, better, bad = run(0.86, 1e6), run(0.9, 3e6), run(0.8, 2e6)
    assert decentralised.make_row("a", [good, better, bad]) == ("a", "86.0 (80.0 to 90.0)", 6.0, 2.0, 9.0, 2.0)
    assert decentralised.make_row("b", [good, bad, bad])[-2:] == ("not reached", "not reached")
    assert decentralised.find_target(good, 0.85) == good[-1]
    assert decentralised.find_target(bad, 0.85) is None
