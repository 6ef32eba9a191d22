"""Elastic averaging: the client's half against Algorithms 1 and 2 of the paper, in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedplat.aggregate import Contribution, Easgd
from fedplat.client_state import ClientState
from fedplat.errors import JobFileError, ModelError
from fedplat.model import Parameters
from fedplat.pytorch.parallel.algorithms import refuse_algorithm
from fedplat.pytorch.training import (
    Learner,
    LocalOptions,
    LocalTraining,
    StepSchedule,
    TensorExamples,
    Trainee,
    build_guarded_algorithm,
    train,
)

Wide = npt.NDArray[np.float64]
RNG = np.random.default_rng(8)
NUM_CLIENTS, EACH, SIZE = 3, 10, 4
INPUTS = RNG.normal(size=(NUM_CLIENTS, EACH, SIZE))
TARGETS = RNG.normal(size=(NUM_CLIENTS, EACH, 1))
CENTRE = RNG.normal(size=(1, SIZE))
LEARNER = Learner(model=lambda: nn.Linear(SIZE, 1, bias=False).double(), loss=nn.functional.mse_loss)
OPTIONS: dict[str, Any] = {"epochs": 1, "batch_size": 4, "learning_rate": 0.05, "algorithm": "easgd", "rho": 4.0}


def options(**changes: Any) -> LocalOptions:
    return LocalOptions.from_config(OPTIONS | changes)


class Worker:
    """A client that trains with the platform's code, and beside it the paper's worker in float64."""

    def __init__(self, number: int, options: LocalOptions) -> None:
        self.number, self.options, self.state = number, options, ClientState()
        self.x: Wide | None = None
        self.v = np.zeros((1, SIZE))
        self.clock = 0

    def train(self, centre: Wide, round_number: int) -> tuple[Wide, dict[str, float]]:
        """The update against the centre that was received."""
        examples = TensorExamples(torch.from_numpy(INPUTS[self.number]), torch.from_numpy(TARGETS[self.number]))
        model = Parameters.from_arrays({"weight": centre.copy()})
        work = LocalTraining(
            examples=examples,
            options=self.options,
            seed=round_number,
            round_number=round_number,
            client_state=ClientState(self.state.contents),
        )
        metrics = dict(train(Trainee(LEARNER), model, work))
        self.state = work.client_state
        return model["weight"] - centre, metrics

    def follow_the_paper(self, centre: Wide, round_number: int) -> Wide:
        """The work between two exchanges by Algorithm 2, which is Algorithm 1 without momentum; returns α (x - x̃)."""
        eta, delta = self.options.learning_rate, self.options.momentum
        alpha = eta * OPTIONS["rho"]
        own = centre if self.x is None else self.x
        exchanged = alpha * (own - centre)
        plan = StepSchedule(num_examples=EACH, options=self.options, seed=round_number)
        for number, step in enumerate(plan.steps()):
            x = own
            if number == 0:
                own = own - exchanged
            inputs, targets = INPUTS[self.number][step], TARGETS[self.number][step]
            slope = 2 * (inputs @ (x + delta * self.v).T - targets).T @ inputs / len(step)
            self.v = delta * self.v - eta * slope
            own = own + self.v
            self.clock += 1
        self.x = own
        return exchanged


@pytest.mark.parametrize(
    "changes", [{}, {"tau": 1}, {"tau": 5}, {"momentum": 0.9}, {"momentum": 0.8, "tau": 2, "batch_size": 0}]
)
def test_trainings_equal_algorithms_1_and_2(changes: dict[str, Any]) -> None:
    """Synchronous rounds of three clients; one of them is not there in some."""
    local = options(**changes)
    workers, centre = [Worker(number, local) for number in range(NUM_CLIENTS)], CENTRE
    for number in range(1, 9):
        present = [worker for worker in workers if worker.number or number % 3]
        found, expected = list[Wide](), list[Wide]()
        for worker in present:
            distance = 0.0 if worker.x is None else float(np.linalg.norm(worker.x - centre))
            update, metrics = worker.train(centre, number)
            found.append(update)
            expected.append(worker.follow_the_paper(centre, number))
            assert worker.x is not None
            np.testing.assert_allclose(worker.state.get("easgd")["weight"], worker.x, atol=1e-12)  # type: ignore[index]
            assert metrics["centre_distance"] == pytest.approx(distance, abs=1e-12)
            assert metrics["local_steps"] == (local.num_steps or 3)
            assert "effective_steps" not in metrics
        np.testing.assert_allclose(found, expected, atol=1e-14)
        centre = centre + np.sum(expected, axis=0)
    assert np.abs(centre - CENTRE).max() > 0.1


def test_synchronous_rounds_are_the_moving_average_of_the_clients() -> None:
    """x̃ ← (1 - β) x̃ + β mean(x_i) with β = p α."""
    local, rule = options(), Easgd().build()
    workers = [Worker(number, local) for number in range(NUM_CLIENTS)]
    beta = NUM_CLIENTS * local.learning_rate * OPTIONS["rho"]
    centre = CENTRE
    for number in range(1, 4):
        before = [centre if worker.x is None else worker.x for worker in workers]
        partial = rule.start(SIZE)
        for worker in workers:
            update = Parameters.from_arrays({"weight": worker.train(centre, number)[0].astype("f4")})
            partial = rule.fold(partial, update.to_blocks(), Contribution(1.0))
            worker.x = worker.state.get("easgd")["weight"].astype("f8")  # type: ignore[index]
        moved = centre + rule.apply({}, partial)[0].reshape(1, SIZE)
        np.testing.assert_allclose(moved, (1 - beta) * centre + beta * np.mean(before, axis=0), atol=1e-6)
        centre = moved


def test_one_client_with_eta_and_rho_of_1_swaps_places_with_the_centre() -> None:
    x = RNG.normal(size=(1, SIZE)).astype("f4")
    learner = Learner(model=lambda: nn.Linear(SIZE, 1, bias=False), loss=lambda out, y: 0.0 * out.sum())
    work = idle_work(x, learning_rate=1.0, rho=1.0)
    model = Parameters.from_arrays({"weight": CENTRE.astype("f4")})
    train(Trainee(learner), model, work)
    np.testing.assert_allclose(model["weight"], x, rtol=1e-6)
    np.testing.assert_allclose(work.client_state.get("easgd")["weight"], CENTRE, rtol=1e-6)  # type: ignore[index]


def idle_work(x: npt.NDArray[np.float32], **changes: Any) -> LocalTraining:
    examples = TensorExamples(torch.zeros(2, SIZE), torch.zeros(2, 1))
    state = ClientState({"easgd": Parameters.from_arrays({"weight": x})})
    return LocalTraining(examples=examples, options=options(**changes), seed=1, client_state=state)


def test_a_client_loses_the_bits_that_it_reports() -> None:
    """Though a model far from 0 rounds them."""
    learner = Learner(model=lambda: nn.Linear(SIZE, 1, bias=False), loss=lambda out, y: 0.0 * out.sum())
    x, centre = RNG.normal(size=(1, SIZE)).astype("f4"), (1e4 * CENTRE).astype("f4")
    work, model = idle_work(x, learning_rate=0.1, rho=0.001), Parameters.from_arrays({"weight": centre.copy()})
    train(Trainee(learner), model, work)
    lost = model["weight"] - centre
    assert not np.array_equal(lost, np.float32(1e-4) * (x - centre))
    np.testing.assert_array_equal(work.client_state.get("easgd")["weight"], x - lost)  # type: ignore[index]


def test_models_of_few_bits_do_not_fit() -> None:
    misfit = Easgd().build().requirements.misfit
    assert misfit(Parameters.from_arrays({"w": np.ones(2, "f4"), "steps": np.array(3)}).schema) == ""
    schema = Parameters.from_arrays({"w": np.ones(2, ml_dtypes.bfloat16)}).schema
    assert "needs a model of F32 or F64 tensors, so that a client loses what the centre gains, and tensor 'w'" in (
        misfit(schema)
    )


def test_values_that_are_not_trained_are_exchanged_too() -> None:
    """Statistics of BatchNorm, frozen weights, and tied weights, which count once; counters are the client's."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(SIZE)
            self.first, self.second = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
            self.second.weight = self.first.weight
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.norm(inputs)))

    learner = Learner(model=Tied, loss=lambda out, y: 0.0 * out.sum())
    centre = learner.initial(seed=1)
    centre["norm.running_var"][:] = 1.0
    floating = {name: array + np.float32(2.0) for name, array in centre.items() if array.dtype == np.float32}
    state = ClientState({"easgd": Parameters.from_arrays(floating)})
    examples = TensorExamples(torch.zeros(4, SIZE), torch.zeros(4, 1))
    work = LocalTraining(examples=examples, options=options(learning_rate=0.1, rho=1.0), seed=1, client_state=state)
    model = centre.copy()
    metrics = train(Trainee(learner), model, work)
    kept = state.get("easgd")
    assert kept is not None
    assert kept.keys() == floating.keys()
    for name, own in floating.items():
        np.testing.assert_allclose(model[name], centre[name] + 0.2, rtol=1e-6)
        if not name.startswith("norm.running"):
            np.testing.assert_allclose(kept[name], own - np.float32(0.2), rtol=1e-6)
    np.testing.assert_allclose(kept["norm.running_var"], 0.9 * (floating["norm.running_var"] - 0.2), rtol=1e-5)
    trained = 2.0 * np.sqrt(SIZE * SIZE + 2 * SIZE)  # of the weights once, and of scale and shift
    assert metrics["centre_distance"] == pytest.approx(trained, rel=1e-6)
    assert model["norm.num_batches_tracked"] == 1


def test_stable_settings_stay_bounded() -> None:
    """The paper's condition for round robin: 0 ≤ η ≤ 2 and 0 ≤ α ≤ (4 - 2η) / (4 - η), for the loss x²/2."""
    for eta in (0.3, 0.9, 1.6):
        alpha = min(1.0, (4 - 2 * eta) / (4 - eta))
        learner = Learner(model=lambda: nn.Linear(1, 1, bias=False), loss=lambda out, y: out.square().mean() / 2)
        local = options(learning_rate=eta, rho=alpha / eta, batch_size=0)
        states, centre = [ClientState() for _ in range(4)], Parameters.from_arrays({"weight": np.ones((1, 1), "f4")})
        for number in range(120):
            examples = TensorExamples(torch.ones(1, 1), torch.zeros(1, 1))
            train(
                Trainee(learner),
                centre,
                LocalTraining(examples=examples, options=local, seed=1, client_state=states[number % 4]),
            )
            assert abs(centre["weight"].item()) < 4
        assert abs(centre["weight"].item()) < 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": 21.0}, r"config.rho = 21: .* would move 1.05 of its way to the centre, .* expected at most 20"),
        ({"rho": 0.0}, r"config.rho"),
        ({"tau": 3, "epochs": 2}, r"config.tau = 3: .* expected epochs = 1 with tau, or tau = 0"),
        ({"tau": 3, "max_steps": 3}, r"config.tau = 3: expected either it or max_steps = 3"),
        ({"tau": -1}, r"config.tau"),
        ({"optimizer": "adamw", "momentum": 0.9}, r'config.momentum = 0.9: expected 0 with optimizer = "adamw"'),
        ({"optimizer": "adam"}, r"config.optimizer"),
    ],
)
def test_mistakes_are_named_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        options(**changes)


def test_adamw_does_not_fit_control_variates() -> None:
    changes = {key: value for key, value in OPTIONS.items() if key != "rho"}
    with pytest.raises(JobFileError, match=r'config.optimizer = "adamw": expected "sgd" with algorithm = "scaffold"'):
        LocalOptions.from_config(changes | {"algorithm": "scaffold", "optimizer": "adamw"})


def test_a_model_divided_among_ranks_has_no_own_weights() -> None:
    with pytest.raises(ValueError, match='algorithm = "easgd": it has client state'):
        refuse_algorithm(options(), build_guarded_algorithm(options()))
    kept = LocalOptions(epochs=1, batch_size=0, learning_rate=0.1, keep_optimizer=True)
    with pytest.raises(ValueError, match=r"keeps the state of its optimizer"):
        refuse_algorithm(kept, build_guarded_algorithm(kept))


def test_own_weights_of_another_model_are_named() -> None:
    with pytest.raises(ModelError, match="no tensor 'weight' of the shape"):
        train(
            Trainee(Learner(model=lambda: nn.Linear(SIZE, 1, bias=False))),
            Parameters.from_arrays({"weight": CENTRE.astype("f4")}),
            idle_work(np.zeros((2, SIZE), "f4")),
        )
