"""Adapters with a term of the server: what the module computes, what clients of each engine report, and turns."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from fedplat.aggregate import FedExLora
from fedplat.aggregate.factors import SCALING
from fedplat.client_state import ClientState
from fedplat.errors import EngineError, JobFileError, ModelError
from fedplat.local_options import LocalOptions
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalTraining, Trainee, train
from fedplat.pytorch.vectorized.batched import CohortTrainer, PartExamples
from fedplat.pytorch.vectorized.layout import UnsuitableError
from fedplat.pytorch.vectorized.trainer import FlatTrainer
from fedplat.simulation import simulate

RNG = np.random.default_rng(5)
INPUTS = torch.from_numpy(RNG.normal(size=(24, 4)).astype(np.float32))
TARGETS = torch.from_numpy(RNG.integers(0, 3, 24))
OPTIONS = LocalOptions(epochs=4, batch_size=8, learning_rate=0.5)
RULE = FedExLora(scaling=2.0).build()
PRODUCT = "server/0.lora_BA"


class Adapted(nn.Linear):
    """A frozen layer with an adapter of its own, as libraries other than peft write it."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.weight.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))
        self.scaling = 2.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.scaling * (input @ self.lora_A.T @ self.lora_B.T)


def make() -> nn.Module:
    return nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(4, 3))


LEARNER = Learner(model=make, share="trained")


def with_term(learner: Learner = LEARNER) -> Parameters:
    model = RULE.requirements.extend(learner.initial()).copy()
    model[PRODUCT] = np.arange(16, dtype=np.float32).reshape(4, 4) / 100  # no symmetric one
    return model


def work(**options: Any) -> LocalTraining:
    examples = PartExamples(INPUTS, TARGETS, np.arange(24))
    return LocalTraining(
        examples=examples, options=msgspec.structs.replace(OPTIONS, **options),
        seed=3, client_state=ClientState(),
    )  # fmt: skip


def test_a_layer_adds_the_term_of_the_model_that_was_loaded_last() -> None:
    trainee, model = Trainee(LEARNER), with_term()
    layer: Any = trainee.module[0]  # type: ignore[index]
    weight = layer.weight.detach().clone()
    for factor in (1.0, 3.0, 0.0):
        model[PRODUCT] = factor * with_term()[PRODUCT]
        trainee.load(model, ClientState())
        expected = weight.numpy().T + 2.0 * model[PRODUCT].T
        np.testing.assert_allclose(layer(torch.eye(4)).detach().numpy(), expected, atol=1e-6)
    trainee.load(with_term(), ClientState())
    trainee.load(LEARNER.initial(), ClientState())  # of another job
    np.testing.assert_array_equal(layer(torch.eye(4)).detach().numpy(), weight.numpy().T)
    assert torch.equal(layer.weight, weight)


def test_clients_train_beside_the_term_and_report_none() -> None:
    base = with_term()
    folded = Parameters.from_arrays({name: array for name, array in base.items() if not name.startswith("server/")})

    def make_merged() -> nn.Module:
        module: Any = make()
        with torch.no_grad():
            module[0].weight.add_(2.0 * torch.from_numpy(base[PRODUCT].copy()))
        return module

    results: list[Parameters] = []
    for learner, model in ((LEARNER, base), (Learner(model=make_merged, share="trained"), folded)):
        trained = model.copy()
        train(Trainee(learner), trained, work())
        results.append(trained.minus(model))
    assert results[0].schema == results[1].schema == LEARNER.initial().schema
    np.testing.assert_allclose(results[0].to_vector(), results[1].to_vector(), atol=1e-6)
    assert np.any(results[0]["0.lora_A"])


@pytest.mark.slow  # the first use of torch.func takes seconds
@pytest.mark.parametrize("trainer", [FlatTrainer, CohortTrainer])
def test_vectors_are_refused_in_words(trainer: Any) -> None:
    made = trainer(Trainee(LEARNER), OPTIONS)
    base = made.base(with_term())
    with pytest.raises(UnsuitableError, match="adds tensors of the server to the model, which need one client at a"):
        made.train(base, work() if trainer is FlatTrainer else [work()])
    with pytest.raises(UnsuitableError, match="trains other tensors in each round"):
        trainer(Trainee(LEARNER), work(alternate="*lora_A").options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {**with_term(), SCALING: np.array([1.5], np.float32)},
            r"'0' has the scaling 2.0, and the job states 1.5 \(aggregation.sc",
        ),
        ({name: array for name, array in with_term().items() if name != SCALING}, f"but no '{SCALING}'; expected both"),
        ({**with_term(), "server/9.lora_BA": np.zeros((4, 4), np.float32)}, "and the module has no layer '9'"),
        ({**with_term(), PRODUCT: np.zeros((4, 3), np.float32)}, r"is \[4, 3\]; the layer '0' needs \[4, 4\]"),
        ({**with_term(), "server/1.lora_BA": np.zeros((4, 4), np.float32)}, "'1' adapts a Tanh; .* linear layers only"),
    ],
)
def test_a_term_that_does_not_fit_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Trainee(LEARNER).load(Parameters.from_arrays(model), ClientState())


def test_tensors_take_turns() -> None:
    trainee, base = Trainee(LEARNER), LEARNER.initial()
    for number, changed in ((1, "0.lora_B"), (2, "0.lora_A"), (3, "0.lora_B")):
        model = base.copy()
        train(trainee, model, dataclasses.replace(work(alternate="*lora_B, *lora_A"), round_number=number))
        update = model.minus(base)
        assert {name for name in update if update[name].any()} == {changed, "2.weight", "2.bias"}
        base = model
    assert set(trainee.parameters()) == set(base)
    with pytest.raises(ModelError, match=r"'\*head' matches none of the trained tensors: 0.lora_A"):
        train(trainee, base.copy(), work(alternate="*head"))
    for options, message in (
        ({"keep_optimizer": True}, "a tensor that rests would lose its optimizer's state; expected keep_optimizer = f"),
        ({"algorithm": "feddyn", "alpha": 0.1}, 'would lose its client state; expected "sgd" or "fedprox"'),
    ):
        config = {"epochs": 1, "batch_size": 4, "learning_rate": 0.1, "alternate": "*lora_A", **options}
        with pytest.raises(JobFileError, match=message):
            LocalOptions.from_config(config)


@pytest.mark.slow
def test_engines_simulate_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(Adapted).replace("(4, 4, bias", "(64, 10, bias").replace("(2, 4)", "(2, 64)")
    (tmp_path / "adapters.py").write_text(
        "import torch\nfrom torch import nn\nfrom fedplat import Learner\n"
        + source.replace("zeros(4, 2)", "zeros(10, 2)")
        + "def make():\n    return nn.Sequential(nn.Flatten(), Adapted())\n"
        'def initial():\n    return Learner(model=make, share="trained").initial()\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {
        "model.initial": "adapters:initial",
        "simulation.model": {"module": "adapters:make", "share": "trained"},
        "rounds": 3,
        "aggregation": {"rule": "fedex_lora", "scaling": 2.0},
    }
    models: list[Parameters] = []
    for engine in ("loop", "processes"):
        model = simulate("digits", {**changes, "simulation.engine": engine}).model
        assert model is not None
        models.append(model)
    assert models[0]["server/1.lora_BA"].any()
    np.testing.assert_array_equal(models[0].buffer, models[1].buffer)
    with pytest.raises(EngineError, match=r'engine = "vmap": the job.s rule adds tensors .*use "loop" or "processes"'):
        simulate("digits", {**changes, "simulation.engine": "vmap"})
