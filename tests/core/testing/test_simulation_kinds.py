"""The checks of fleet models, staleness weights, sources, metrics and engines name the violation of each broken one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec import Struct
from typing_extensions import override

from fedplat.metrics import Metric
from fedplat.model import Parameters
from fedplat.modes import StalenessWeight
from fedplat.simulation.clients.availability import Always, AvailabilityOptions, Clients, Spells
from fedplat.simulation.clients.distributions import Distribution, Floats
from fedplat.simulation.data import Dataset, DataSource
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.engines.processes import LoopEngine
from fedplat.testing import (
    ConformanceError,
    check_availability,
    check_distribution,
    check_engine,
    check_metric,
    check_source,
    check_staleness,
)
from support.metrics import BROKEN, Count

CALLS = itertools.count(1)


def violation(check: Callable[[Any], None], options: object) -> str:
    with pytest.raises(ConformanceError) as caught:
        check(options)
    return str(caught.value)


class Weight(Struct, frozen=True):
    value: Callable[[int], Any]

    def weight(self, staleness: int) -> Any:
        return self.value(staleness)


BAD_WEIGHTS: list[tuple[Callable[[int], Any], str]] = [
    (lambda age: 1.0 / (10 - age), "weight(10) raised ZeroDivisionError"),
    (lambda age: 3.0 - age, "weight(4) returned -1.0; expected a finite number of at least 0"),
    (lambda age: float("nan"), "weight(0) returned nan; expected a finite number of at least 0"),
    (lambda age: "1", "weight(0) returned 1; expected a finite number"),
    (lambda age: float(age), "weight(0) returns 0; expected a positive weight"),
    (lambda age: 1.0 / next(CALLS), "expected no randomness and no memory"),
]


@pytest.mark.parametrize(("value", "sentence"), BAD_WEIGHTS)
def test_a_broken_staleness_weight_fails_with_a_clear_sentence(value: Callable[[int], Any], sentence: str) -> None:
    weight: StalenessWeight = Weight(value)
    assert sentence in violation(check_staleness, weight)


def test_a_weight_may_be_any_real_number() -> None:
    check_staleness(Weight(lambda age: np.float32(1.0) / np.float32(1 + age)))
    check_staleness(Weight(lambda age: int(age < 5)))


class Draws(Struct, frozen=True):
    value: Callable[[int, np.random.Generator], Any]

    def draw(self, count: int, rng: np.random.Generator) -> Any:
        return self.value(count, rng)


BAD_DRAWS: list[tuple[Callable[[int, np.random.Generator], Any], str]] = [
    (lambda count, rng: rng.random(), "draw() returned float64[]; expected float64[0]"),
    (lambda count, rng: rng.normal(size=count), "for a client; expected finite numbers above 0"),
    (lambda count, rng: np.full(count, np.inf), "draw() returned inf for a client; expected finite numbers"),
    (lambda count, rng: np.random.default_rng(next(CALLS)).random(count) + 1, "expected no other randomness"),
    (lambda count, rng: 1 / 0, "draw() raised ZeroDivisionError"),
    (lambda count, rng: ["fast"] * count, "expected float64[1]"),
]


@pytest.mark.parametrize(("value", "sentence"), BAD_DRAWS)
def test_a_broken_distribution_fails_with_a_clear_sentence(value: Callable[..., Any], sentence: str) -> None:
    distribution: Distribution = Draws(value)
    assert sentence in violation(check_distribution, distribution)


def test_values_below_0_may_be_allowed() -> None:
    check_distribution(Draws(lambda count, rng: rng.normal(size=count)), positive=False)


class Online(Struct, frozen=True):
    """A model of a function that computes spells."""

    compute: Callable[[Clients, Floats], Any]

    def build(self, num_clients: int, rng: np.random.Generator) -> Any:
        compute = self.compute

        class Model(Always):
            @override
            def spells(self, clients: Clients, at: Floats) -> Spells:
                return compute(clients, at)

        return Model()


def by_position(clients: Clients, at: Floats) -> Spells:
    begin = np.floor(at / 600.0) * 600.0
    return begin, begin + 600.0 + np.arange(len(clients))


def at_random(clients: Clients, at: Floats) -> Spells:
    end = at + np.random.default_rng(next(CALLS)).random(len(at)) + 1.0
    return at, end


def in_place(clients: Clients, at: Floats) -> Spells:
    at += 1.0
    return at, at + 600.0


def postponed(clients: Clients, at: Floats) -> Spells:
    """A client is never online: its spell begins a minute after the moment."""
    return at + 60.0, at + 120.0


BAD_SPELLS: list[tuple[Callable[[Clients, Floats], Any], str]] = [
    (lambda clients, at: (at, at), "expected that it ends after that moment, and not before it begins"),
    (lambda clients, at: (at + 2.0, at + 1.0), "returned a spell from 2.0 to 1.0 for client 0 and the moment 0;"),
    (lambda clients, at: (at * np.nan, at + 1.0), "returned a spell from nan to 1.0"),
    (lambda clients, at: (0.0, 1.0), "spells() returned float64[]; expected two arrays float64[300]"),
    (lambda clients, at: 1 / 0, "spells() raised ZeroDivisionError"),
    (in_place, "expected that the arguments are only read"),
    (by_position, "the spells of some clients differ from those of the same clients among all"),
    (at_random, "expected no memory"),
    (postponed, "a moment before a spell, the next spell is another one"),
]


@pytest.mark.parametrize(("compute", "sentence"), BAD_SPELLS)
def test_a_broken_availability_model_fails_with_a_clear_sentence(
    compute: Callable[[Clients, Floats], Any], sentence: str
) -> None:
    model: AvailabilityOptions = Online(compute)
    assert sentence in violation(check_availability, model)


class Loads(Struct, frozen=True):
    data: Callable[[], Any]

    def load(self, place: object) -> Any:
        return self.data()


INPUTS, TARGETS = np.zeros((6, 2), np.float32), np.arange(6) % 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (lambda: (INPUTS, TARGETS), "load() returns a tuple; expected a Dataset or a Federation"),
        (lambda: Dataset.from_arrays(INPUTS, TARGETS[:2]), "load() raises ValueError: inputs have shape"),
        (lambda: Dataset.from_arrays(INPUTS + np.nan, TARGETS), "inputs, row 1, column 1: nan"),
        (
            lambda: Dataset.from_arrays(INPUTS, TARGETS, (INPUTS[:, :1], TARGETS)),
            "an example of test_inputs is float32[1], and one of inputs float32[2]; expected the same",
        ),
        (lambda: Dataset.from_arrays(INPUTS + next(CALLS), TARGETS), "expected no other randomness"),
    ],
)
def test_a_broken_source_fails_with_a_clear_sentence(data: Callable[[], Any], sentence: str) -> None:
    source: DataSource = Loads(data)
    assert sentence in violation(check_source, source)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_metric_fails_with_a_clear_sentence(name: str) -> None:
    metric, sentence = BROKEN[name]
    assert sentence in violation(check_metric, metric)


def test_a_metric_that_is_not_broken() -> None:
    metric: Metric = Count()
    check_metric(metric)


class Opens(Struct, frozen=True):
    """The options of an engine with a defect."""

    engine: Callable[[ClientTraining], Engine]

    def build(self, task: ClientTraining, num_workers: int) -> Engine:
        return self.engine(task)


class Inexact(LoopEngine):
    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        found = super().result(task)
        if len(found.update):
            found.update["0.weight"] += np.float32(1e-3)
        return found


class KeepsStates(LoopEngine):
    @override
    def drop(self, task: ClientTask) -> None:
        if task in self._begun:
            super().drop(task)


class Untested(LoopEngine):
    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return {}


class Unchecked(LoopEngine):
    @override
    def publish(self, version: int, model: Parameters) -> None:
        if "other" not in model:
            super().publish(version, model)


class ByTurns(LoopEngine):
    """Adds to the update the number of results that were fetched before."""

    turns = 0

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        found = super().result(task)
        self.turns += 1
        if len(found.update):
            found.update["0.weight"] += np.float32(1e-8) * self.turns
        return found


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (Inexact, "client 0 in round 1: the update differs by 1.0e-03 from that of a client in the field"),
        pytest.param(
            KeepsStates, "drop() after result() changes the client's state; expected no change", marks=pytest.mark.slow
        ),
        pytest.param(Untested, "evaluate(): the metrics are none; expected accuracy, loss", marks=pytest.mark.slow),
        pytest.param(
            Unchecked,
            "publish() of a model with other tensors is accepted; expected a ModelError",
            marks=pytest.mark.slow,
        ),
        (ByTurns, "the updates have other bits if their results are fetched in reverse order"),
    ],
)
def test_a_broken_engine_fails_with_a_clear_sentence(engine: Callable[[ClientTraining], Engine], sentence: str) -> None:
    assert sentence in violation(check_engine, Opens(engine))
