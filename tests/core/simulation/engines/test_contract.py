"""All engines give what clients in the field give: the results of `fedplat.pytorch.training.trainer`, to 1e-6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedplat import aggregate
from fedplat.aggregate.local import CONTROL
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.engines.registry import ENGINES as BY_NAME
from fedplat.testing import check_engine
from fedplat.testing.engines import WORKS, FieldClients
from support.pairwise import pairwise
from support.simulation.engines import ENGINES, HAS_RAY, RAY, MakeEngine
from support.simulation.tasks import SIZES, lenet, logistic_regression, rounds, task, two_layers

ALL = range(len(SIZES))
CONFIGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.01, "momentum": 0.5},
    "clipped": {"max_grad_norm": 0.1},
    "accumulated": {"accumulate": 2},
    "decayed": {"learning_rate_decay": 0.5},
    "one batch": {"batch_size": 0},
    "fedprox": {"algorithm": "fedprox", "mu": 0.5},
    "scaffold": {"algorithm": "scaffold"},
    "feddyn": {"algorithm": "feddyn", "alpha": 0.1},
    "before": {"measure_before": True},
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "two_layers": two_layers,
    "logistic_regression": logistic_regression,
    "lenet": lenet,
}
HERE = [name for name in ENGINES if name != "ray" or HAS_RAY]
"""The engines that this machine has: a pair that is only tested with another one would not be tested."""


def train_in_the_field(task: ClientTraining, model: Parameters) -> list[list[LocalUpdate]]:
    """Rounds of federated averaging by clients that train as the SDK does."""
    clients = FieldClients(task)
    found: list[list[LocalUpdate]] = []
    for cohort in WORKS:
        found.append([clients.train(model, task) for task in cohort])
        for each in found[-1]:
            model = model.plus(each.update.to_vector() / np.float32(len(cohort)))
    return found


def differences(left: list[list[LocalUpdate]], right: list[list[LocalUpdate]]) -> tuple[float, float]:
    """The largest of the updates, and of the metrics."""
    pairs = [pair for round_ in zip(left, right, strict=True) for pair in zip(*round_, strict=True)]
    assert all(one.num_examples == other.num_examples for one, other in pairs)
    assert all(one.metrics.keys() == other.metrics.keys() for one, other in pairs)
    updates = [np.abs(one.update.to_vector() - other.update.to_vector()).max() for one, other in pairs]
    metrics = [abs(one.metrics[name] - other.metrics[name]) for one, other in pairs for name in one.metrics]
    return float(max(updates)), max(metrics)


# Those with processes of their own take seconds.
MARKS = {"ray": [RAY, pytest.mark.slow], "auto": [pytest.mark.slow], "processes": [pytest.mark.slow]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) if name in MARKS else name for name in BY_NAME])
def test_the_public_checks(name: str) -> None:
    check_engine(BY_NAME[name]())


@pytest.mark.parametrize(
    ("make_engine", "make", "config"), pairwise(HERE, MODELS, CONFIGS, full=[1]), indirect=["make_engine"]
)
def test_engine_trains_as_clients_in_the_field_do(
    make: Callable[[], nn.Module], config: dict[str, Any], make_engine: MakeEngine
) -> None:
    given = task(make, **config)
    model = given.learner.initial()
    if config.get("algorithm") == "scaffold":
        model = _with_control(model)
    found = rounds(make_engine(given), model, WORKS)
    updates, metrics = differences(found, train_in_the_field(given, model))
    assert updates < 1e-6
    assert metrics < 1e-5


def _with_control(model: Parameters) -> Parameters:
    """With control variates that are not zero."""
    extended = aggregate.Scaffold(num_clients=len(SIZES)).build().requirements.extend(model)
    for name, values in extended.items():
        if name.startswith(CONTROL):
            values += np.float32(0.01)
    return extended


@pytest.mark.parametrize("kind", ["flat", "per_layer", "ghost"])
@pytest.mark.parametrize("name", ["loop", pytest.param("processes", marks=pytest.mark.slow)])
def test_private_training_draws_and_adds_what_the_seed_says(kind: str, name: str) -> None:
    """Also for the smallest client, whose only example is in every step; epsilon is that of all rounds."""
    given = task(two_layers, dp=kind, dp_noise_multiplier=0.8, dp_max_grad_norm=0.5, dp_delta=1e-3, momentum=0.5)
    model = given.learner.initial()
    engine = ENGINES[name](given)
    found = rounds(engine, model, WORKS)
    engine.close()
    updates, metrics = differences(found, train_in_the_field(given, model))
    assert updates < 1e-6
    assert metrics < 1e-5
    assert [each[0].metrics["private_steps"] for each in found] == [6, 12, 18]
    assert "loss" not in found[0][0].metrics


def test_dropped_works_leave_nothing_behind(make_engine: MakeEngine) -> None:
    given = task()
    engine, model = make_engine(given), given.learner.initial()
    engine.publish(0, model)
    for seed in range(20):
        works = [ClientTask(client, 0, seed) for client in ALL]
        engine.begin(works)
        kept = engine.result(works[seed % len(works)])
        for work in works:
            if work.client != seed % len(works):
                engine.drop(work)
        assert kept.num_examples == SIZES[seed % len(works)]
    assert engine.num_clients == len(SIZES)


def test_a_model_of_another_shape_is_refused_with_words(make_engine: MakeEngine) -> None:
    engine = make_engine(task())
    with pytest.raises(ModelError, match="does not fit the module Sequential"):
        engine.publish(0, task(lenet).learner.initial())
