"""Mistakes of a user are one sentence, early, with the client or the layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedplat.errors import ModelError, UserCodeError
from fedplat.job import Selection
from fedplat.pytorch.server import ServerTrainer
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train
from fedplat.pytorch.vectorized.trainer import FlatTrainer
from fedplat.simulation import SimulationOptions, make_job, simulate
from fedplat.simulation.data import Federation
from fedplat_client import Task
from fedplat_client.trainers.torch import TorchTrainer

INPUTS, LABELS = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 2
CONFIG = {"epochs": 1, "batch_size": 4, "learning_rate": 0.1}


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


def task(module: Any, **config: Any) -> Task:
    return Task(name="t", parameters=Learner(model=module).initial(), config=CONFIG | config)


def test_the_data_of_a_trainer_is_checked_when_it_is_made() -> None:
    pairs = TensorDataset(INPUTS, LABELS)
    with pytest.raises(ValueError, match=r"the data is a DataLoader, .*; expected its dataset, \.dataset"):
        TorchTrainer(model=linear, data=DataLoader(pairs, 4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="the data is a int; expected a dataset of"):
        TorchTrainer(model=linear, data=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="40 inputs and 39 targets"):
        TorchTrainer(model=linear, data=(INPUTS, LABELS[:-1]))
    expected = TorchTrainer(model=linear, data=pairs, device="cpu")(task(linear)).parameters
    for data in (
        (INPUTS, LABELS),
        (INPUTS.numpy().astype(np.float64), LABELS.numpy()),
        [pairs[index] for index in range(40)],
    ):
        for given in (data, lambda task, data=data: data):  # pyright: ignore[reportUnknownLambdaType]
            trainer = TorchTrainer(model=linear, data=given, device="cpu")  # pyright: ignore[reportArgumentType]
            assert trainer(task(linear)).parameters == expected
    late = TorchTrainer(model=linear, data=lambda task: DataLoader(pairs), device="cpu")  # pyright: ignore
    with pytest.raises(ValueError, match="the data is a DataLoader"):
        late(task(linear))
    assert ServerTrainer(model=linear, data=pairs).learner.count_answers is not None


@pytest.mark.parametrize("engine", ["loop", "processes"])
def test_a_client_with_a_single_example_is_named(engine: Any) -> None:
    parts = [np.arange(1, 20), np.arange(0, 1)]
    data = Federation(INPUTS.numpy(), LABELS.numpy(), parts, INPUTS.numpy()[:0], LABELS.numpy()[:0])
    job = make_job(None, rounds=1, selection=Selection(goal=2, over_selection=1.0), config=CONFIG)
    with pytest.raises(
        UserCodeError, match=r"training of client 1 failed: .*a single example.*at least 2.*min_examples"
    ):
        simulate(job, SimulationOptions(engine=engine), data=data, learner=Learner(model=normed), progress=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.output = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.output.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.words(tokens[:, 0]))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.output = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(4, 9)
        self.register_buffer("numbers", torch.arange(5)[None])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output((self.words(tokens) + self.places(self.numbers)).mean(1))


def test_layers_without_norms_of_single_examples_are_named() -> None:
    private = {"dp_noise_multiplier": 1.0, "dp_max_grad_norm": 1.0, "dp_delta": 1e-5}
    tokens = torch.randint(0, 9, (16, 5), generator=torch.Generator().manual_seed(1)), torch.arange(16) % 9
    for module, words in ((Tied, "'words.weight' and 'output.weight' are one weight"), (Positions, "'places.weight'")):
        with pytest.raises(ModelError, match=f'dp = "ghost": .*{words}.* use dp = "flat"'):
            TorchTrainer(model=module, data=tokens, device="cpu")(task(module, dp="ghost", **private))
    assert TorchTrainer(model=Tied, data=tokens, device="cpu")(task(Tied, dp="flat", **private)).metrics["epsilon"] > 0


def bag(sparse: bool) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(10, 4, sparse=sparse), nn.Linear(4, 2))


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"max_grad_norm": 0.1}, {"weight_decay": 0.1}])
def test_sparse_gradients_are_those_of_a_dense_embedding(more: dict[str, Any]) -> None:
    tokens = torch.randint(0, 10, (80, 5), generator=torch.Generator().manual_seed(1))
    options = LocalOptions.from_config(CONFIG | {"batch_size": 2} | more)  # enough batches for a recording
    work = LocalTraining(examples=TensorExamples(tokens, torch.arange(80) % 2), options=options, seed=1)
    found: list[Any] = []
    for sparse in (False, True):
        learner = Learner(model=lambda sparse=sparse: bag(sparse))
        base, trainee = learner.initial(seed=3), Trainee(learner)
        model = base.copy()
        train(trainee, model, work)
        found.append(model.minus(base))
        if "max_grad_norm" not in more:
            flat = FlatTrainer(Trainee(learner), options)
            found.append(flat.train(flat.base(base), work)[0])
    for each in found:
        np.testing.assert_allclose(each.to_vector(), found[0].to_vector(), atol=1e-6)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.nothing = (
            nn.Linear(4, 2),
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.ones(0)),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.scale + self.nothing.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.layer = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.cell(inputs[..., None])[0][:, -1])


@pytest.mark.parametrize("module", [Scaled, Recurrent])
def test_an_engine_trains_what_a_client_trains(module: type[nn.Module]) -> None:
    options = LocalOptions.from_config(CONFIG | {"batch_size": 1})  # enough batches for a recording
    work, learner = (
        LocalTraining(examples=TensorExamples(INPUTS, LABELS), options=options, seed=1),
        Learner(model=module),
    )
    base = learner.initial()
    trained, flat = base.copy(), FlatTrainer(Trainee(learner), options)
    train(Trainee(learner), trained, work)
    update = flat.train(flat.base(base), work)[0]
    np.testing.assert_allclose(update.to_vector(), trained.minus(base).to_vector(), atol=1e-6)


def test_modules_without_weights_to_train_are_named() -> None:
    frozen = TorchTrainer(model=lambda: linear().requires_grad_(False), data=(INPUTS, LABELS), device="cpu")
    with pytest.raises(ModelError, match="no parameters that are trained; expected one with requires_grad"):
        frozen(task(linear))
    with pytest.raises(ModelError, match=r"the parameter '0.weight' has no shape yet; .* call a lazy module once"):
        Learner(model=lambda: nn.Sequential(nn.LazyLinear(2))).initial()


@pytest.mark.parametrize("kind", [list, np.uint16, np.int32, np.bool_, object])
def test_pairs_of_arrays_of_every_type_train_alike(kind: Any) -> None:
    labels = LABELS.numpy()
    pair = (INPUTS.tolist(), labels.tolist()) if kind is list else (INPUTS.numpy(), labels.astype(kind))
    found, expected = task(linear), task(linear)
    trainer = TorchTrainer(model=linear, data=pair, device="cpu")
    metrics = trainer(found).metrics
    assert metrics == TorchTrainer(model=linear, data=(INPUTS, LABELS), device="cpu")(expected).metrics
    assert found.parameters == expected.parameters
    assert trainer.evaluate(found).metrics["accuracy"] >= 0.0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((INPUTS, np.array(["no", "yes"])[LABELS]), "the targets cannot be a tensor: .*; expected an array of numbers"),
        ((np.ma.masked_greater(INPUTS.numpy(), 1.0), LABELS), "the inputs have masked values"),
        ((INPUTS, LABELS, LABELS), "the data are 3 arrays"),
        ({"inputs": INPUTS}, "the data is a dict, which has no examples by number"),
        ([(INPUTS[0], 1), (INPUTS[0, :2], 0)] * 4, "the dataset list cannot be joined to a batch"),
        ((INPUTS.to(torch.int64), LABELS), "the inputs are not of the type of the weights"),
    ],
)
def test_data_that_is_not_a_pair_of_arrays_of_numbers_is_named(data: Any, words: str) -> None:
    with pytest.raises((ValueError, ModelError), match=words):
        TorchTrainer(model=linear, data=data, device="cpu")(task(linear))


def schedule(parameters: Any, config: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, 0.1), 1)


def lbfgs(parameters: Any, config: Any) -> Any:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("optimizer", "words"), [(schedule, "returned a StepLR; expected a torch.optim.Opt"), (lbfgs, "from a closure")]
)
def test_what_makes_no_steps_is_no_optimizer(optimizer: Any, words: str) -> None:
    trainer = TorchTrainer(model=linear, data=(INPUTS, LABELS), optimizer=optimizer, device="cpu")
    with pytest.raises(ModelError, match=words):
        trainer(task(linear))


def test_an_algorithm_without_its_rule_is_named() -> None:
    options = LocalOptions.from_config(CONFIG | {"algorithm": "scaffold"})
    learner = Learner(model=linear)
    with pytest.raises(ModelError, match="no tensor 'control/weight', which the algorithm"):
        FlatTrainer(Trainee(learner), options).base(learner.initial())
