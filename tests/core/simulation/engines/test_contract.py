"""All engines give what clients in the field give: the results of `fedplat.pytorch.training.trainer`, to 1e-6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedplat import aggregate
from fedplat.aggregate.local import CONTROL
from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training import LocalTraining, TensorExamples, Trainee, evaluate, train
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.engines.loop import LoopEngine
from support.simulation.engines import ENGINES, MakeEngine
from support.simulation.tasks import SIZES, lenet, logistic_regression, personal, rounds, task, two_layers

ALL = range(len(SIZES))
WORKS = [
    [ClientTask(client, version, 100 * version + client, 0.5 if client == 3 else 1.0) for client in ALL]
    for version in (0, 1, 2)
]
"""Three rounds of all clients, one of which has time for half of its steps."""
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


class Reference:
    """Trains as a client in the field does."""

    def __init__(self, task: ClientTraining) -> None:
        self._task = task
        self._trainee = Trainee(task.learner, seed=task.seed)
        self._memories: dict[int, ClientState] = {}

    def rounds(self, model: Parameters) -> list[list[LocalUpdate]]:
        found: list[list[LocalUpdate]] = []
        for cohort in WORKS:
            found.append([self.train(model, task) for task in cohort])
            for each in found[-1]:
                model = model.plus(each.update.to_vector() / np.float32(len(cohort)))
        return found

    def train(self, model: Parameters, task: ClientTask) -> LocalUpdate:
        memory = self._memories.get(task.client, ClientState())
        inputs, targets = map(torch.from_numpy, self._task.federation.examples(task.client))
        parameters = model.copy()
        training = LocalTraining(
            examples=TensorExamples(inputs, targets),
            options=self._task.options,
            seed=task.seed,
            round_number=task.version + 1,
            fraction=task.fraction,
            client_state=memory,
            noise_seed=task.seed,
        )
        metrics = train(self._trainee, parameters, training)
        self._memories[task.client] = ClientState(memory.contents)
        return LocalUpdate(parameters.minus(model), len(targets), metrics)

    def score(self, model: Parameters, task: ClientTask) -> tuple[int, dict[str, float]]:
        data = self._task.federation
        part = data.held_out[task.client]
        inputs, targets = torch.from_numpy(data.inputs[part]), torch.from_numpy(data.targets[part])
        memory = self._memories.get(task.client, ClientState())
        return len(part), evaluate(self._trainee, model, TensorExamples(inputs, targets), client_state=memory)


def differences(left: list[list[LocalUpdate]], right: list[list[LocalUpdate]]) -> tuple[float, float]:
    """The largest of the updates, and of the metrics."""
    pairs = [pair for round_ in zip(left, right, strict=True) for pair in zip(*round_, strict=True)]
    assert all(one.num_examples == other.num_examples for one, other in pairs)
    assert all(one.metrics.keys() == other.metrics.keys() for one, other in pairs)
    updates = [np.abs(one.update.to_vector() - other.update.to_vector()).max() for one, other in pairs]
    metrics = [abs(one.metrics[name] - other.metrics[name]) for one, other in pairs for name in one.metrics]
    return float(max(updates)), max(metrics)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("make", [logistic_regression, two_layers, pytest.param(lenet, marks=pytest.mark.slow)])
def test_engine_trains_as_clients_in_the_field_do(
    make: Callable[[], nn.Module], config: dict[str, Any], make_engine: MakeEngine
) -> None:
    given = task(make, **config)
    model = given.learner.initial()
    if config.get("algorithm") == "scaffold":
        model = _with_control(model)
    found = rounds(make_engine(given), model, WORKS)
    updates, metrics = differences(found, Reference(given).rounds(model))
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
@pytest.mark.parametrize("name", ["loop", "processes"])
def test_private_training_draws_and_adds_what_the_seed_says(kind: str, name: str) -> None:
    """Also for the smallest client, whose only example is in every step; epsilon is that of all rounds."""
    given = task(two_layers, dp=kind, dp_noise_multiplier=0.8, dp_max_grad_norm=0.5, dp_delta=1e-3, momentum=0.5)
    model = given.learner.initial()
    engine = ENGINES[name](given)
    found = rounds(engine, model, WORKS)
    engine.close()
    updates, metrics = differences(found, Reference(given).rounds(model))
    assert updates < 1e-6
    assert metrics < 1e-5
    assert [each[0].metrics["private_steps"] for each in found] == [6, 12, 18]
    assert "loss" not in found[0][0].metrics


def test_personal_layers_stay_with_their_client(make_engine: MakeEngine) -> None:
    given = personal()
    model = given.learner.initial()
    updates, metrics = differences(rounds(make_engine(given), model, WORKS), Reference(given).rounds(model))
    assert updates < 1e-6
    assert metrics < 1e-5


def test_clients_score_with_what_they_keep_from_training_and_with_their_own_layers(make_engine: MakeEngine) -> None:
    given = personal()
    engine, reference = make_engine(given), Reference(given)
    model = given.learner.initial()
    rounds(engine, model, WORKS[:1])
    for each in WORKS[0]:
        reference.train(model, each)
    engine.publish(1, model)
    remembered = engine.client_states()
    tasks = [ClientTask(client, 1, 0, scores=True) for client in ALL]
    engine.begin(tasks)
    engine.drop(tasks[0])
    engine.retire(1)
    for each in tasks[1:]:
        scored = engine.result(each)
        num_examples, expected = reference.score(model, each)
        assert scored.num_examples == num_examples == 1 + each.client % 4
        assert not scored.update
        assert scored.metrics == pytest.approx(expected, rel=1e-5)
    assert engine.client_states() == remembered


def test_what_did_not_count_is_not_remembered(make_engine: MakeEngine) -> None:
    given = personal()
    engine, model = make_engine(given), given.learner.initial()
    engine.publish(0, model)
    first, second, third = (ClientTask(0, 0, seed) for seed in range(3))
    engine.begin([first])
    engine.result(first)
    before = engine.client_states()
    for asked in (True, False):
        engine.begin([second])
        if asked:
            engine.result(second)
            assert engine.client_states()[0] != before[0]
        engine.drop(second)
        assert engine.client_states() == before
    engine.begin([third])
    expected = engine.result(third)

    resumed = make_engine(given)
    resumed.set_client_states(before)
    resumed.publish(0, model)
    resumed.begin([third])
    assert resumed.result(third).update == expected.update
    assert before.keys() == {0}
    assert before[0]["personal"].keys() == {"5.weight", "5.bias"}


def test_engine_gives_the_same_bits_whenever_it_is_asked(make_engine: MakeEngine) -> None:
    given = task()  # no convolutions: vmap computes them as is faster at the moment
    model = given.learner.initial()
    backwards = [list(reversed(cohort)) for cohort in WORKS[:1]]
    forth = rounds(make_engine(given), model, WORKS[:1])[0]
    back = rounds(make_engine(given), model, backwards)[0][::-1]
    assert all(one.update == other.update for one, other in zip(forth, back, strict=True))


def test_versions_outlive_their_retirement_while_works_need_them(make_engine: MakeEngine) -> None:
    given = task()
    engine, model = make_engine(given), given.learner.initial()
    works = [ClientTask(client, 0, client) for client in ALL]
    expected = rounds(LoopEngine(given), model, [works])[0]
    engine.publish(0, model)
    engine.begin(works)
    engine.retire(0)
    engine.publish(1, model.plus(np.ones(model.schema.num_floating, np.float32)))
    engine.begin([ClientTask(0, 1, 7)])
    found = [engine.result(work) for work in works]
    assert differences([found], [expected])[0] < 1e-6
    assert engine.result(ClientTask(0, 1, 7)).update != expected[0].update


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


def test_engine_scores_models_on_held_out_examples(make_engine: MakeEngine) -> None:
    given = task()
    model = given.learner.initial()
    scores = make_engine(given).evaluate(model)
    module = given.learner.model()
    backend.load_into(module, model)
    with torch.no_grad():
        outputs = module(torch.from_numpy(given.federation.test_inputs)).numpy()
    assert scores["accuracy"] == pytest.approx((outputs.argmax(1) == given.federation.test_targets).mean())


def test_a_model_of_another_shape_is_refused_with_words(make_engine: MakeEngine) -> None:
    engine = make_engine(task())
    with pytest.raises(ModelError, match="does not fit the module Sequential"):
        engine.publish(0, task(lenet).learner.initial())
