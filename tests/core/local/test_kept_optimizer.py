"""Optimizers that continue between rounds, and DiLoCo, which is made of them, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedplat.aggregate import Contribution, FedAvgM
from fedplat.client_state import ClientState
from fedplat.model import Parameters, VectorBlocks
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, StepSchedule, TensorExamples, Trainee, train

Wide = npt.NDArray[np.float64]
RNG = np.random.default_rng(4)
NUM_CLIENTS, EACH, SIZE = 3, 9, 4
INPUTS, TARGETS = RNG.normal(size=(NUM_CLIENTS, EACH, SIZE)), RNG.normal(size=(NUM_CLIENTS, EACH, 1))
START = RNG.normal(size=(1, SIZE))
LEARNER = Learner(model=lambda: nn.Linear(SIZE, 1, bias=False).double(), loss=nn.functional.mse_loss)
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 0.02, "keep_optimizer": True}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.1}


def train_client(
    client: int, w: Wide, options: LocalOptions, state: ClientState, round_number: int, make_optimizer: Any = None
) -> tuple[Wide, ClientState]:
    """The trained weights, and the state as the client reads it back from its disk."""
    model = Parameters.from_arrays({"weight": w.copy()})
    work = LocalTraining(
        examples=TensorExamples(torch.from_numpy(INPUTS[client]), torch.from_numpy(TARGETS[client])),
        options=options,
        seed=round_number,
        round_number=round_number,
        client_state=state,
        make_optimizer=make_optimizer,
    )
    train(Trainee(LEARNER), model, work)
    stored = {name: Parameters.from_bytes(each.to_bytes()) for name, each in state.contents.items()}
    return model["weight"].astype("f8"), ClientState(stored)


def slopes(client: int, options: LocalOptions, round_number: int) -> Iterable[Callable[[Wide], Wide]]:
    """The gradient of each step, as a function of the weights."""
    for step in StepSchedule(num_examples=EACH, options=options, seed=round_number).steps():
        x, y = INPUTS[client][step], TARGETS[client][step]

        def slope(w: Wide, x: Wide = x, y: Wide = y) -> Wide:
            return 2 * (x @ w.T - y).T @ x / len(x)

        yield slope


class Adam:
    """AdamW of Loshchilov and Hutter 2019 (arXiv 1711.05101), Algorithm 2, with the decay times the learning rate."""

    def __init__(self) -> None:
        self.m, self.v, self.t = np.zeros((1, SIZE)), np.zeros((1, SIZE)), 0

    def step(self, w: Wide, g: Wide, rate: float, decay: float) -> Wide:
        self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return w - rate * decay * w - rate * m / (np.sqrt(v) + 1e-8)


def test_diloco_equals_its_recurrence() -> None:
    """Inner AdamW that continues, outer Nesterov momentum on the mean of the displacements."""
    options = LocalOptions.from_config(OPTIONS | ADAMW | {"learning_rate_decay": 0.9})
    outer, beta = 0.7, 0.9
    rule = FedAvgM(learning_rate=outer, momentum=beta, nesterov=True).build()
    states, inner = [ClientState() for _ in range(NUM_CLIENTS)], [Adam() for _ in range(NUM_CLIENTS)]
    centre, expected, velocity, memory = START, START, np.zeros((1, SIZE)), rule.init(SIZE)
    for number in range(1, 7):
        partial, total = rule.start(SIZE), np.zeros((1, SIZE))
        for client in range(NUM_CLIENTS):
            trained, states[client] = train_client(client, centre, options, states[client], number)
            partial = rule.fold(partial, VectorBlocks((trained - centre).reshape(-1).astype("f4")), Contribution(1.0))
            w = expected
            for slope in slopes(client, options, number):
                w = inner[client].step(w, slope(w), options.rate(number), options.weight_decay)
            np.testing.assert_allclose(trained, w, atol=3e-6)
            total += w - expected
        step, memory = rule.apply(memory, partial)
        centre = centre + step.reshape(1, SIZE)
        mean = total / NUM_CLIENTS
        velocity = beta * velocity + mean
        expected = expected + outer * (mean + beta * velocity)
    np.testing.assert_allclose(centre, expected, atol=3e-6)
    assert inner[0].t == 6 * 2 * 3


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_momentum_is_that_of_torch(nesterov: bool) -> None:
    rule = FedAvgM(learning_rate=0.7, momentum=0.9, nesterov=nesterov).build()
    weight = nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=nesterov)
    x, state = START.copy(), rule.init(SIZE)
    for number in range(50):
        delta = np.random.default_rng(number).normal(scale=0.1, size=SIZE).astype("f4")
        step, state = rule.apply(state, rule.fold(rule.start(SIZE), VectorBlocks(delta), Contribution(1.0)))
        x = x + step
        weight.grad = torch.from_numpy(-delta.astype("f8")).reshape(1, SIZE)
        optimizer.step()
    np.testing.assert_allclose(x, weight.detach().numpy(), atol=3e-6)


def test_adamw_equals_that_of_torch_without_and_with_its_state() -> None:
    kept = LocalOptions.from_config(OPTIONS | ADAMW)
    fresh = LocalOptions.from_config(OPTIONS | ADAMW | {"keep_optimizer": False})
    for options in (kept, fresh):
        state, w, expected = ClientState(), START, START
        adam = Adam()
        for number in (1, 2, 3):
            w, state = train_client(0, w, options, state, number)
            adam = adam if options.keep_optimizer else Adam()
            for slope in slopes(0, options, number):
                expected = adam.step(expected, slope(expected), 0.02, 0.1)
        np.testing.assert_allclose(w, expected, atol=1e-12)
        assert (state.get("optimizer") is not None) is options.keep_optimizer
    kept_state = train_client(0, START, kept, ClientState(), 1)[1].get("optimizer")
    assert kept_state is not None
    assert kept_state.keys() == {"weight/step", "weight/exp_avg", "weight/exp_avg_sq"}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_of_sgd_continues(momentum: float) -> None:
    options = LocalOptions.from_config(OPTIONS | {"momentum": momentum})
    state, w, expected, velocity = ClientState(), START, START, np.zeros((1, SIZE))
    for number in (1, 2, 3):
        w, state = train_client(0, w, options, state, number)
        for slope in slopes(0, options, number):
            velocity = momentum * velocity + slope(expected)
            expected = expected - 0.02 * velocity
    np.testing.assert_allclose(w, expected, atol=1e-12)
    assert (state.get("optimizer") is None) is (momentum == 0.0)


def test_an_own_optimizer_continues_with_its_state_and_the_rate_of_the_round() -> None:
    options = LocalOptions.from_config(OPTIONS)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop([{"params": list(parameters), "lr": 0.01}], momentum=0.5)

    state, w = ClientState(), START
    for number in (1, 2):
        w, state = train_client(0, w, options, state, number, make)
    weight = nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = make([weight])
    for number in (1, 2):
        for slope in slopes(0, options, number):
            weight.grad = torch.from_numpy(slope(weight.detach().numpy()))
            optimizer.step()
    np.testing.assert_allclose(w, weight.detach().numpy(), atol=1e-12)


def test_state_that_cannot_be_stored_is_named() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["note"] = "text"

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Odd(parameters, lr=0.1)

    options = LocalOptions.from_config(OPTIONS)
    with pytest.raises(ValueError, match="the optimizer's state 'note' of 'weight' is a str; expected tensors"):
        train_client(0, START, options, ClientState(), 1, make)
