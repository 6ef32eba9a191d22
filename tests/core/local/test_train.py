"""Local training of a linear model, whose gradients are a line of NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.errors import JobFileError, ModelError
from fedplat.model import Parameters
from fedplat.pytorch.training import (
    BATCH_NORM,
    Learner,
    LocalOptions,
    LocalTraining,
    StepSchedule,
    TensorExamples,
    Trainee,
)
from fedplat.pytorch.training import evaluate as score
from fedplat.pytorch.training import train as train_in_place

Wide = npt.NDArray[np.float64]
RNG = np.random.default_rng(3)
INPUTS = RNG.normal(size=(11, 3))
TARGETS = RNG.normal(size=(11, 1))
START: Wide = RNG.normal(size=(1, 3))
OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 4, "learning_rate": 0.05}


def linear() -> nn.Module:
    return nn.Linear(3, 1, bias=False)


LEARNER = Learner(model=linear, loss=nn.functional.mse_loss)
EXAMPLES = TensorExamples(torch.tensor(INPUTS, dtype=torch.float32), torch.tensor(TARGETS, dtype=torch.float32))


def work(seed: int = 7, round_number: int = 1, fraction: float = 1.0, **options: Any) -> LocalTraining:
    given = LocalOptions.from_config(OPTIONS | options)
    return LocalTraining(examples=EXAMPLES, options=given, seed=seed, round_number=round_number, fraction=fraction)


def train(training: LocalTraining) -> tuple[Wide, dict[str, float]]:
    parameters = Parameters.from_arrays({"weight": START.astype(np.float32)})
    metrics = train_in_place(Trainee(LEARNER), parameters, training)
    return parameters["weight"].astype(np.float64), dict(metrics)


def plan_of(training: LocalTraining) -> StepSchedule:
    return StepSchedule(num_examples=11, options=training.options, seed=training.seed, fraction=training.fraction)


def reference(training: LocalTraining, *, pull: float = 0.0, max_norm: float = np.inf) -> Wide:
    """w ← w - η v with v ← m v + g + pull (w - w₀), where g is the gradient of the batch's mean squared error."""
    options, w, v = training.options, START.copy(), np.zeros_like(START)
    rate = options.learning_rate * options.learning_rate_decay ** (training.round_number - 1)
    for batch in plan_of(training).steps():
        x, y = INPUTS[batch], TARGETS[batch]
        g = 2 * (x @ w.T - y).T @ x / len(batch)
        g *= min(1.0, max_norm / np.linalg.norm(g))
        v = options.momentum * v + g + pull * (w - START) + options.weight_decay * w
        w = w - rate * v
    return w


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (work(), {}),
        (work(momentum=0.9, weight_decay=0.1), {}),
        (work(batch_size=0), {}),
        (work(algorithm="fedprox", mu=0.7), {"pull": 0.7}),
        (work(algorithm="fedprox", mu=0.7, momentum=0.5, fraction=0.4), {"pull": 0.7}),
        (work(learning_rate_decay=0.5, round_number=3), {}),
        (work(max_grad_norm=0.3), {"max_norm": 0.3}),
        (work(accumulate=2), {}),
    ],
)
def test_weights_equal_the_formula(training: LocalTraining, expected: dict[str, float]) -> None:
    weight, metrics = train(training)
    np.testing.assert_allclose(weight, reference(training, **expected), atol=2e-6)
    assert metrics["local_steps"] == plan_of(training).num_steps


def test_metrics_are_means_over_the_examples() -> None:
    weight, metrics = train(work(epochs=1, batch_size=0, measure_before=True))
    before = np.mean((INPUTS @ START.T - TARGETS) ** 2)
    assert metrics == pytest.approx({"loss": before, "loss_before": before, "local_steps": 1}, rel=1e-5)
    parameters = Parameters.from_arrays({"weight": weight.astype(np.float32)})
    after = score(Trainee(LEARNER), parameters, EXAMPLES, batch_size=3)["loss"]
    assert after == pytest.approx(np.mean((INPUTS @ weight.T - TARGETS) ** 2), rel=1e-5)


def test_steps_are_told_with_what_their_gradients_count_for() -> None:
    assert "effective_steps" not in train(work())[1]
    _, metrics = train(work(epochs=2, momentum=0.5, batch_size=0))
    assert (metrics["local_steps"], metrics["effective_steps"]) == (2, 1 + 1.5)


def test_training_ends_when_it_is_told_to() -> None:
    told: list[tuple[int, int]] = []

    def after_step(done: int, total: int) -> bool:
        told.append((done, total))
        return done < 2

    weight, metrics = train(dataclasses.replace(work(), after_step=after_step))
    assert told == [(1, 9), (2, 9)]
    assert metrics["local_steps"] == 2
    np.testing.assert_allclose(weight, reference(work(fraction=2 / 9)), atol=1e-6)


def test_a_trainee_is_used_again_without_a_trace() -> None:
    trainee, results = Trainee(LEARNER), list[bytes]()
    for seed in (1, 2, 1):
        parameters = Parameters.from_arrays({"weight": START.astype(np.float32)})
        train_in_place(trainee, parameters, work(seed, momentum=0.9))
        results.append(parameters.to_bytes())
    assert results[0] == results[2] != results[1]


def test_bf16_is_near_and_fp16_is_refused_on_a_cpu() -> None:
    weight, _ = train(work(precision="bf16"))
    np.testing.assert_allclose(weight, reference(work()), atol=0.05)
    assert not np.allclose(weight, reference(work()), atol=1e-6)
    with pytest.raises(ValueError, match='precision = "fp16": expected a GPU'):
        train(work(precision="fp16"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"algorithm": "fedavg"}, "config.algorithm = 'fedavg': expected one of sgd, fedprox"),
        ({"mu": 0.1}, 'mu = 0.1: only the algorithm "fedprox" has it'),
        ({"batch_size": 0, "accumulate": 2}, "accumulate = 2: expected 1 if a batch is all data"),
        ({"momentum": 1.0}, "config.momentum = 1"),
        ({"precision": "fp8"}, "config.precision = 'fp8': expected one of fp32, bf16, fp16"),
    ],
)
def test_options_that_cannot_be_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        LocalOptions.from_config(OPTIONS | config | {"another": "key"})


def mixed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("personal", "kept"),
    [
        (("3.*",), {"3.weight", "3.bias"}),
        ((BATCH_NORM,), {f"1.{name}" for name in mixed()[1].state_dict()}),
    ],
)
def test_personal_layers_stay_in_the_clients_memory(personal: tuple[str, ...], kept: set[str]) -> None:
    learner = Learner(model=mixed, loss=nn.functional.mse_loss, personal=personal)
    start, trainee = learner.initial(), Trainee(learner)
    assert start.keys() == mixed().state_dict().keys() - kept
    with_memory = dataclasses.replace(work(epochs=40), client_state=ClientState())
    parameters = start.copy()
    train_in_place(trainee, parameters, with_memory)
    note = with_memory.client_state.get("personal")
    assert note is not None
    assert note.keys() == kept
    losses = [
        score(trainee, parameters, EXAMPLES, client_state=ClientState(each))["loss"]
        for each in ({}, {"personal": note})
    ]
    assert losses[1] < losses[0]
    # The next training goes on with what is remembered; another client begins with the module's own values.
    again = dataclasses.replace(work(), client_state=ClientState({"personal": note}))
    first, next_ = parameters.copy(), parameters.copy()
    train_in_place(trainee, next_, again)
    train_in_place(trainee, first, work())
    assert first != next_


def test_personal_layers_that_are_missing_or_travel_are_named() -> None:
    with pytest.raises(ValueError, match=r"personal = 'head\.\*' matches none of the module's tensors: weight"):
        Trainee(Learner(model=linear, personal=("head.*",)))
    learner = Learner(model=mixed, loss=nn.functional.mse_loss, personal=("3.*",))
    with pytest.raises(ModelError, match=r"the tensor '3\.bias' is personal, but the job's model has it"):
        train_in_place(Trainee(learner), Learner(model=mixed).initial(), work())
