"""Clients whose data disagree: FedAvg stops beside the optimum of the whole, SCAFFOLD and FedDyn in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedplat.aggregate import Accumulator, Contribution, Rule, first_columns
from fedplat.aggregate.state import columns_of
from fedplat.client_state import ClientState
from fedplat.config.toml import read_record
from fedplat.errors import JobFileError, ModelError
from fedplat.job import JobSpec, Selection, build_rule
from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train
from fedplat.simulation import SimulationOptions, make_job, simulate
from fedplat.simulation.data import Dataset, partitioners

NUM_CLIENTS = 4
RNG = np.random.default_rng(11)
INPUTS = [RNG.normal(size=(12, 3)) * scale for scale in (0.4, 0.8, 1.2, 1.6)]
TARGETS = [x @ RNG.normal(size=(3, 1)) for x in INPUTS]
# All clients have as many examples, so the mean of their losses is the loss of all examples.
OPTIMUM = np.linalg.lstsq(np.concatenate(INPUTS), np.concatenate(TARGETS), rcond=None)[0].T
LEARNER = Learner(model=lambda: nn.Linear(3, 1, bias=False), loss=nn.functional.mse_loss)
CONFIG: Mapping[str, Any] = {"epochs": 10, "batch_size": 0, "learning_rate": 0.1}


def rule_of(name: str, config: Mapping[str, Any]) -> Rule:
    """That of a job, as its file describes it."""
    job = {"name": "j", "population": "p", "trainer": "t", "rounds": 1, "model": {"initial": "m:f"}}
    aggregation = {"rule": name} | ({} if name == "fedavg" else {"num_clients": NUM_CLIENTS})
    more = {"selection": {"goal": 4}, "config": config, "updates": {"weighting": "uniform"}, "aggregation": aggregation}
    return build_rule(read_record({**job, **more}, JobSpec))


def distance(rule_name: str, num_rounds: int, *, per_round: int = NUM_CLIENTS, **config: Any) -> float:
    """How far from the optimum the model is after so many rounds, of all clients or of those whose turn it is."""
    config = {**CONFIG, **config}
    rule, options, trainee = rule_of(rule_name, config), LocalOptions.from_config(config), Trainee(LEARNER)
    model = rule.requirements.extend(backend.from_state_dict({"weight": torch.zeros(1, 3)}))
    state, memories = list(first_columns(rule, model.schema.num_floating)), [ClientState() for _ in INPUTS]
    rng = np.random.default_rng(0)
    for number in range(1, num_rounds + 1):
        accumulator = Accumulator(model.schema, rule)
        for client in rng.choice(NUM_CLIENTS, per_round, replace=False):
            parameters, memories[client] = model.copy(), ClientState(memories[client].contents)
            examples = TensorExamples(*(torch.tensor(each[client], dtype=torch.float32) for each in (INPUTS, TARGETS)))
            work = LocalTraining(
                examples=examples, options=options, seed=number, round_number=number, client_state=memories[client]
            )
            train(trainee, parameters, work)
            accumulator.fold(parameters.minus(model), Contribution(1.0))
        model, after = accumulator.finish(model, state[0])
        state = list(columns_of(after, model.schema.num_floating))
    return float(np.linalg.norm(model["weight"] - OPTIMUM))


def test_fedavg_stops_beside_the_optimum() -> None:
    beside = distance("fedavg", 20)
    assert beside > 0.4
    assert distance("fedavg", 25) == pytest.approx(beside, rel=1e-3)
    assert 0.3 < distance("fedavg", 20, algorithm="fedprox", mu=1.0) < beside  # nearer, and still beside it


@pytest.mark.parametrize(
    ("rule", "per_round", "config"),
    [
        ("scaffold", NUM_CLIENTS, {}),
        pytest.param("scaffold", NUM_CLIENTS, {"momentum": 0.5, "learning_rate": 0.05}, marks=pytest.mark.slow),
        pytest.param("scaffold", 2, {}, marks=pytest.mark.slow),
        ("feddyn", NUM_CLIENTS, {"alpha": 0.5}),
        pytest.param("feddyn", 2, {"alpha": 0.5}, marks=pytest.mark.slow),
    ],
)
def test_scaffold_and_feddyn_converge_to_the_optimum(rule: str, per_round: int, config: dict[str, Any]) -> None:
    assert distance(rule, 80, per_round=per_round, algorithm=rule, **config) < 0.01


def test_scaffolds_control_variates_are_the_clients_gradients_at_the_optimum() -> None:
    """So they add up to nothing: the fixed point of the paper."""
    parameters = rule_of("scaffold", {"algorithm": "scaffold"}).requirements.extend(
        backend.from_state_dict({"weight": torch.tensor(OPTIMUM, dtype=torch.float32)})
    )
    changes = list[Any]()
    options = LocalOptions.from_config({**CONFIG, "epochs": 1, "algorithm": "scaffold"})
    for x, y in zip(INPUTS, TARGETS, strict=True):
        examples = TensorExamples(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
        trained, memory = parameters.copy(), ClientState()
        train(Trainee(LEARNER), trained, LocalTraining(examples=examples, options=options, seed=0, client_state=memory))
        note = memory.get("scaffold")
        assert note is not None
        np.testing.assert_allclose(note["weight"], (2 * (x @ OPTIMUM.T - y).T @ x / len(x)), atol=1e-5)
        changes.append(trained["control/weight"])
    np.testing.assert_allclose(sum(changes), np.zeros((1, 3)), atol=1e-5)


def make_linear() -> nn.Module:
    return nn.Linear(3, 2)


def test_a_simulation_without_the_rule_of_scaffold_says_what_is_missing() -> None:
    config = {"algorithm": "scaffold", "epochs": 1, "batch_size": 2, "learning_rate": 0.1}
    job = make_job(make_linear, rounds=1, selection=Selection(goal=2, over_selection=1.0), config=config)
    data = Dataset.from_arrays(np.ones((8, 3), np.float32), np.arange(8) % 2)
    options = SimulationOptions(partition=partitioners.Iid(clients=2))
    with pytest.raises(JobFileError, match=r'expected \[aggregation\] rule = "scaffold" with num_clients'):
        simulate(job, options, data=data, progress=False)


def test_scaffold_needs_the_models_control_variates() -> None:
    model = Parameters.from_arrays({"weight": np.zeros((1, 3), "f4")})
    options = LocalOptions.from_config({**CONFIG, "algorithm": "scaffold"})
    examples = TensorExamples(torch.zeros(2, 3), torch.zeros(2, 1))
    work = LocalTraining(examples=examples, options=options, seed=0)
    with pytest.raises(ModelError, match="the model has no tensor 'control/weight'"):
        train(Trainee(LEARNER), model, work)
