"""Learners that share what is trained only: the base stays where it is, is equal everywhere, and does not change."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.local_options import LocalOptions
from fedplat.model import Parameters
from fedplat.pytorch.training import (
    Learner,
    LocalTraining,
    Trainee,
    check_base,
    evaluate,
    train,
)
from fedplat.pytorch.vectorized.batched import CohortTrainer, PartExamples
from fedplat.pytorch.vectorized.trainer import FlatTrainer
from fedplat.simulation import simulate

RNG = np.random.default_rng(5)
INPUTS = torch.from_numpy(RNG.normal(size=(24, 4)).astype(np.float32))
TARGETS = torch.from_numpy(RNG.integers(0, 3, 24))
OPTIONS = LocalOptions(epochs=2, batch_size=8, learning_rate=0.3, momentum=0.9)


class Adapted(nn.Module):
    """A frozen layer with two names, such as tied embeddings, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.first.weight
        self.first.weight.requires_grad_(False)
        self.adapter = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((4,), 0.5, dtype=torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs)) + self.adapter(inputs) * self.scale.float()
        return self.head(self.again(hidden))


SHARED = {"adapter.weight", "adapter.bias", "head.weight", "head.bias"}
WHOLE, LEARNER = Learner(model=Adapted), Learner(model=Adapted, share="trained")


def work() -> LocalTraining:
    examples = PartExamples(INPUTS, TARGETS, np.arange(24))
    return LocalTraining(examples=examples, options=OPTIONS, seed=3, client_state=ClientState())


def train_alone(learner: Learner, model: Parameters) -> Parameters:
    result = model.copy()
    train(Trainee(learner), result, work())
    return result.minus(model)


def train_flat(learner: Learner, model: Parameters) -> Parameters:
    trainer = FlatTrainer(Trainee(learner), OPTIONS)
    return trainer.train(trainer.base(model), work())[0]


def train_stacked(learner: Learner, model: Parameters) -> Parameters:
    trainer = CohortTrainer(Trainee(learner), OPTIONS)
    return trainer.train(trainer.base(model), [work(), work()])[1][0]


@pytest.mark.parametrize("run", [train_alone, train_flat, train_stacked])
def test_the_update_has_the_bits_of_one_with_the_base_in_it(run: Callable[[Learner, Parameters], Parameters]) -> None:
    update, whole = run(LEARNER, LEARNER.initial()), run(WHOLE, WHOLE.initial())
    assert set(update) == SHARED
    assert set(whole) == {*SHARED, "first.weight", "scale"}
    assert np.any(update["adapter.weight"])
    assert not np.any(whole["first.weight"])
    for name in SHARED:
        np.testing.assert_array_equal(update[name], whole[name])


def test_the_statistics_of_frozen_batch_norm_travel() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        module[:2].requires_grad_(False)
        return module

    shared = {"1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias"}
    learner = Learner(model=make, share="trained")
    assert set(learner.initial()) == shared
    update = train_alone(learner, learner.initial())
    assert np.any(update["1.running_mean"])


def test_the_digest_of_a_base_is_that_of_its_names_types_shapes_and_bytes() -> None:
    module = LEARNER.make(seed=1)
    digest = hashlib.sha256(b"scale\0torch.bfloat16\0[4]\0" + b"\x00\x3f" * 4)
    weight = module.state_dict()["first.weight"].numpy()
    digest.update(b"first.weight\0torch.float32\0[4, 4]\0" + weight.tobytes())
    trainee = Trainee(LEARNER, seed=1)
    assert trainee.base is not None
    assert trainee.base.names == {"first.weight", "again.weight", "scale"}
    assert trainee.base.sha256 == digest.hexdigest()
    check_base(trainee.base, digest.hexdigest())
    with pytest.raises(ModelError, match=f"has the SHA-256 {digest.hexdigest()}; expected the same base on all"):
        check_base(trainee.base, Trainee(LEARNER, seed=2).base.sha256)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r'expected a learner or trainer with share = "trained"'):
        check_base(Trainee(WHOLE).base, digest.hexdigest())
    with pytest.raises(ModelError, match=r'a learner with share = "all" has no base'):
        WHOLE.base_sha256()


def without(name: str) -> Parameters:
    model = LEARNER.initial()
    return Parameters.from_arrays({each: model[each] for each in model if each != name})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            WHOLE.initial(),
            "the tensor 'first.weight' is not trained, so it belongs to the base, but the job's model has it",
        ),
        (without("head.bias"), "the job's model has no tensor 'head.bias', which Adapted trains; expected all 4"),
        (
            Parameters.from_arrays({**LEARNER.initial(), "adapter.weight": np.zeros((2, 4), np.float32)}),
            r"'adapter.weight' has the shape \[2, 4\] in the job's model; Adapted has the shape \[4, 4\]",
        ),
        (
            Parameters.from_arrays({**LEARNER.initial(), "lora": np.zeros(2, np.float32)}),
            "'lora' has the shape .* Adapted has no such tensor among those that are trained",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_loaded(model: Parameters, message: str) -> None:
    trainee = Trainee(LEARNER)
    before = {name: value.clone() for name, value in trainee.module.state_dict().items()}
    with pytest.raises(ModelError, match=message):
        trainee.load(Parameters.from_arrays({name: model[name] + 1 for name in model}), ClientState())
    for name, value in trainee.module.state_dict().items():
        assert torch.equal(value, before[name])


class Drifting(Adapted):
    """A module whose training changes a tensor of the base."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.state_dict()[self.name].mul_(0.5)
        return super().forward(inputs)


@pytest.mark.parametrize("name", ["first.weight", "scale"])
@pytest.mark.parametrize("run", [train_alone, train_flat])
def test_a_base_that_changes_is_an_error(run: Callable[[Learner, Parameters], Parameters], name: str) -> None:
    learner = Learner(model=lambda: Drifting(name), share="trained")
    with pytest.raises(ModelError, match=rf"'({name}|again.weight)' changed in the training, although it is not train"):
        run(learner, learner.initial())


def test_a_learner_that_trains_nothing_is_refused_in_words() -> None:
    def frozen() -> nn.Module:
        return nn.Linear(4, 3).requires_grad_(False)

    with pytest.raises(ModelError, match=r'share = "trained": no parameter of Linear is trained'):
        Learner(model=frozen, share="trained").initial()
    with pytest.raises(ValueError, match='share = \'some\': expected "all" or "trained"'):
        Learner(model=frozen, share="some")  # type: ignore[arg-type]
    beside = Learner(model=Adapted, loss=lambda outputs, targets: outputs.detach().mean() + targets.sum() * 0)
    with pytest.raises(ModelError, match="the loss"):
        train_alone(beside, beside.initial())


def test_personal_tensors_are_among_the_trained_ones() -> None:
    learner = dataclasses.replace(LEARNER, personal=("adapter.*", "first.*"))
    assert set(learner.initial()) == {"head.weight", "head.bias"}
    trainee, mine = Trainee(learner), ClientState()
    model = learner.initial()
    train(trainee, model, dataclasses.replace(work(), client_state=mine))
    note = mine.get("personal")
    assert note is not None
    assert set(note) == {"adapter.weight", "adapter.bias"}  # not the base, which a client has anyway
    assert evaluate(trainee, model, work().examples, client_state=mine)["loss"] < 1.2
    update = train_flat(learner, learner.initial())
    np.testing.assert_array_equal(update["head.bias"], model.minus(learner.initial())["head.bias"])


def test_a_simulation_shares_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heads.py").write_text(
        "from torch import nn\n"
        "from fedplat import Learner\n"
        "def make():\n"
        "    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))\n"
        "    module[1].requires_grad_(False)\n"
        "    return module\n"
        "def initial():\n"
        '    return Learner(model=make, share="trained").initial()\n'
    )
    model = {"module": "heads:make", "share": "trained"}
    changes = {"model.initial": "heads:initial", "simulation.model": model, "rounds": 2}
    monkeypatch.syspath_prepend(tmp_path)
    run = simulate("digits", changes)
    assert run.model is not None
    assert len(run.model.buffer) == 4 * 170
    with pytest.raises(ModelError, match="expected the same base on all participants"):
        simulate("digits", changes | {"config.base_sha256": "0" * 64})
