"""What simulated clients are like, and when they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat.config.plugins import BUILTIN
from fedplat.config.toml import read_record, read_toml
from fedplat.errors import JobFileError
from fedplat.simulation.clients import Availability, FleetOptions, build_fleet
from fedplat.simulation.clients.availability import (
    AVAILABILITY_MODELS,
    DAY_S,
    HOUR_S,
    AlwaysOptions,
    AvailabilityOptions,
    DiurnalOptions,
    SometimesOptions,
)
from fedplat.simulation.clients.distributions import DISTRIBUTIONS, Distribution, hash_uniform, hashed_normal
from fedplat.testing import check_availability, check_distribution
from support.simulation.cases import make_fleet


def is_there(model: Availability, client: int, moments: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    begin, _ = model.spells(np.full(len(moments), client), moments)
    return begin <= moments


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "constant", "value": 3.0}, (3.0, 3.0, 3.0)),
        ({"kind": "uniform", "low": 10.0, "high": 20.0}, (11.0, 15.0, 19.0)),
        ({"kind": "lognormal", "median": 10.0, "sigma": 1.0}, (2.776, 10.0, 36.02)),
        ({"kind": "pareto", "minimum": 1.0, "shape": 1.5}, (1.0728, 1.5874, 4.6416)),
        ({"kind": "empirical", "values": [1.0, 2.0, 3.0], "weights": [0.3, 0.4, 0.3]}, (1.0, 2.0, 3.0)),
    ],
)
def test_distributions_have_the_quantiles_that_they_name(table: dict[str, Any], expected: tuple[float, ...]) -> None:
    drawn = BUILTIN.decode(Distribution, table).draw(200_000, np.random.default_rng(5))
    assert np.quantile(drawn, (0.1, 0.5, 0.9)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_pass_the_public_checks(name: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "constant": {"value": 3.0},
        "uniform": {"low": 10.0, "high": 20.0},
        "lognormal": {"median": 10.0},
        "pareto": {"minimum": 1.0},
        "empirical": {"values": [1.0, 2.0]},
    }
    check_distribution(BUILTIN.decode(Distribution, {"kind": name, **needed[name]}))


@pytest.mark.parametrize(
    "options",
    [
        AlwaysOptions(),
        SometimesOptions(0.3),
        SometimesOptions(0.97, slot_s=60.0),
        DiurnalOptions(),
        DiurnalOptions(probability=0.5),
    ],
)
def test_availability_models_pass_the_public_checks(options: AvailabilityOptions) -> None:
    check_availability(options)


def test_every_availability_model_has_a_row() -> None:
    assert set(AVAILABILITY_MODELS.values()) == {AlwaysOptions, SometimesOptions, DiurnalOptions}


def test_hashed_numbers_are_uniform_and_depend_on_their_arguments_only() -> None:
    clients = np.arange(100_000)
    drawn = hash_uniform(7, clients, 3)
    assert np.quantile(drawn, (0.0, 0.25, 0.5, 0.75, 1.0)) == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.01)
    assert hash_uniform(7, clients[5:9], 3).tolist() == drawn[5:9].tolist()
    assert abs(np.corrcoef(drawn, hash_uniform(7, clients, 4))[0, 1]) < 0.02
    normal = hashed_normal(7, clients, 3)
    assert (normal.mean(), normal.std()) == pytest.approx((0.0, 1.0), abs=0.02)


def test_a_fleet_follows_from_its_options_and_seed() -> None:
    options: dict[str, Any] = {"speed": {"kind": "lognormal", "median": 10.0}, "labels": {"os": {"a": 0.9, "b": 0.1}}}
    one, two, other = make_fleet(5000, 1, **options), make_fleet(5000, 1, **options), make_fleet(5000, 2, **options)
    assert one.speed.tolist() == two.speed.tolist()
    assert one.speed.tolist() != other.speed.tolist()
    assert one.labels["os"].codes.mean() == pytest.approx(0.1, abs=0.02)
    assert one.labels_of(0)["os"] in "ab"


def test_diurnal_clients_are_there_at_their_own_hours() -> None:
    fleet = make_fleet(
        2,
        availability={
            "kind": "diurnal",
            "begins_h": {"kind": "constant", "value": 22.0},
            "lasts_h": {"kind": "constant", "value": 8.0},
            "offset_h": {"kind": "constant", "value": 2.0},
            "start_h": 12.0,
        },
    )
    # 22:00 at UTC+2 is 20:00 UTC, 8 hours after the beginning.
    begin, end = fleet.availability.spells(np.array([0, 0, 1]), np.array([0.0, 9 * HOUR_S, 16 * HOUR_S]))
    assert (begin / HOUR_S).tolist() == [8.0, 8.0, 32.0]
    assert (end / HOUR_S).tolist() == [16.0, 16.0, 40.0]
    moments = np.linspace(0, 10 * DAY_S, 5000)
    assert is_there(fleet.availability, 0, moments).mean() == pytest.approx(8 / 24, abs=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "probability", "probability": 0.3, "slot_s": 100.0},
        {"kind": "diurnal", "probability": 0.5, "lasts_h": {"kind": "constant", "value": 14.4}},
    ],
)
def test_clients_are_there_as_often_as_the_probability_says(options: dict[str, Any]) -> None:
    fleet = make_fleet(200, availability=options)
    shares = [is_there(fleet.availability, client, np.linspace(0, 40 * DAY_S, 300)).mean() for client in range(200)]
    assert np.mean(shares) == pytest.approx(0.3, abs=0.02)


def test_devices_and_spells_come_from_traces(tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text("client,speed,download,label.os\na,10,1e6,x\nb,20,2e6,y\n")
    (tmp_path / "spells.jsonl").write_text(
        '{"client": "b", "begin_s": 50, "end_s": 60}\n{"client": "a", "begin_s": 10, "end_s": 20}\n'
        '{"client": "a", "begin_s": 20, "end_s": 30}\n'
    )
    options = FleetOptions(trace="devices.csv", availability_trace="spells.jsonl", repeat_s=100.0)
    fleet = build_fleet(options, seed=1, folder=tmp_path)
    assert (fleet.num_clients, fleet.speed.tolist(), fleet.labels_of(1)) == (2, [10.0, 20.0], {"os": "y"})
    begin, end = fleet.availability.spells(np.array([0, 0, 1, 1]), np.array([0.0, 30.0, 55.0, 160.0]))
    assert begin.tolist() == [10.0, 110.0, 50.0, 250.0]
    assert end.tolist() == [30.0, 130.0, 60.0, 260.0]
    many = build_fleet(msgspec.structs.replace(options, num_clients=1000), seed=1, folder=tmp_path)
    assert np.mean(many.speed) == pytest.approx(15.0, abs=0.5)
    once = build_fleet(msgspec.structs.replace(options, repeat_s=0.0), seed=1, folder=tmp_path)
    assert once.availability.spells(np.array([0]), np.array([30.0]))[0].tolist() == [np.inf]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("speed\n0\n", "line 2: speed is '0'; expected a number above 0"),
        ("sped\n1\n", "there is no column 'sped'; known columns"),
        ("speed,latency_s\n1\n", "expected as many cells as in the first line"),
        ("speed\n", "the file has no devices"),
    ],
)
def test_a_trace_that_cannot_be_used_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "devices.csv").write_text(content)
    with pytest.raises(JobFileError, match=message):
        build_fleet(FleetOptions(trace="devices.csv"), seed=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_clients = 5\nspeed = { kind = 'normal' }", "simulation.fleet.speed.kind = 'normal': expected one of"),
        ("num_clients = 5\nlabels.os = { a = 0.5 }", "labels.os: the shares add up to 0.5; expected 1"),
        ("fails = 0.6\nvanishes = 0.6", "fails"),
        ("batch_s = 61.0", "batch_s = 61.0: expected at most wait_s"),
        ("speed = { kind = 'uniform', low = -1.0, high = 2.0 }", "speed: expected values above 0 only"),
        ("latency_s = { kind = 'empirical', values = [1.0, -1.0] }", "latency_s: expected no value below 0"),
        ("num_client = 5", "did you mean num_clients"),
    ],
)
def test_mistakes_of_a_fleet_are_named(text: str, message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        read_record(read_toml(text), FleetOptions, "simulation.fleet.")


def test_the_number_of_clients_must_be_known_and_agree() -> None:
    with pytest.raises(JobFileError, match="this key is required without data and without a trace"):
        build_fleet(FleetOptions(), seed=1)
    with pytest.raises(JobFileError, match="num_clients = 5: the data has 6"):
        build_fleet(FleetOptions(num_clients=5), seed=1, num_clients=6)
