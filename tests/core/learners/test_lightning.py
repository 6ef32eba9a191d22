"""Modules of PyTorch Lightning as learners, compared with the PyTorch learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")
from lightning.pytorch import LightningDataModule, LightningModule

from fedplat.errors import DataError, JobFileError, ModelError
from fedplat.model import Parameters
from fedplat.pytorch.lightning import LightningLearner, OwnLightningModule, count_examples
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, evaluate, train
from fedplat.testing import check_learner
from fedplat_client import Task
from fedplat_client.trainers.lightning import LightningTrainer

RNG = np.random.default_rng(2)
INPUTS = RNG.normal(size=(41, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, 41)
CONFIG: dict[str, Any] = {"epochs": 2, "batch_size": 8, "learning_rate": 0.1}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        outputs = self.net(inputs)
        self.log("train_accuracy", (outputs.argmax(1) == labels).float().mean(), on_epoch=True, on_step=True)
        return nn.functional.cross_entropy(outputs, labels)

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        outputs = self.net(inputs)
        self.log("val_loss", nn.functional.cross_entropy(outputs, labels))
        self.log("val_accuracy", (outputs.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.job_config["learning_rate"])  # pyright: ignore


class Unscored(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.line(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Digits(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(), batch_size=16)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(), batch_size=16)


def dataset() -> TensorDataset:
    return TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))


def test_it_keeps_the_contract() -> None:
    check_learner(LightningLearner(Lit), (INPUTS, LABELS), CONFIG)


@pytest.mark.parametrize(("budget", "steps"), [({"epochs": 2}, 10), ({"epochs": 1, "max_steps": 7}, 7)])
def test_its_steps_have_the_bits_of_the_pytorch_learner(budget: dict[str, int], steps: int) -> None:
    """The batches, BatchNorm's short last one among them, and the random numbers of dropout are the same."""
    torch_learner = Learner(model=network)
    learner, start = LightningLearner(Lit), torch_learner.initial(3)
    expected = start.copy()
    trainee = Trainee(torch_learner)
    examples = TensorExamples(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
    config = CONFIG | budget
    options = LocalOptions.from_config(config)
    scores = train(trainee, expected, LocalTraining(examples=examples, options=options, seed=5))
    found = Parameters.from_arrays({f"net.{name}": values for name, values in start.items()})
    metrics = learner.train(found, (INPUTS, LABELS), config, seed=5)
    assert {name: values.tobytes() for name, values in found.items()} == {
        f"net.{name}": values.tobytes() for name, values in expected.items()
    }
    np.testing.assert_allclose(metrics["loss"], scores["loss"], rtol=1e-6)
    assert metrics["local_steps"] == scores["local_steps"] == steps
    np.testing.assert_allclose(metrics["accuracy"], scores["accuracy"], rtol=1e-6)
    validated = learner.evaluate(found, (INPUTS, LABELS))
    expected_scores = evaluate(trainee, expected, examples)
    np.testing.assert_allclose(validated["loss"], expected_scores["loss"], rtol=1e-6)
    np.testing.assert_allclose(validated["accuracy"], expected_scores["accuracy"], rtol=1e-6)


def test_datasets_loaders_and_data_modules() -> None:
    learner = LightningLearner(Lit)
    trained: list[Parameters] = []
    for data in ((INPUTS.astype(np.float64), LABELS.astype(np.int32)), dataset()):
        trained.append(learner.initial(1))
        learner.train(trained[-1], data, CONFIG, seed=2)
    assert trained[0] == trained[1]
    for data in (DataLoader(dataset(), batch_size=16), Digits()):
        trained.append(learner.initial(1))
        assert learner.train(trained[-1], data, CONFIG, seed=2)["local_steps"] == 6
        assert count_examples(data) == 41
        assert learner.evaluate(trained[-1], data, CONFIG).keys() == {"loss", "accuracy"}
    assert trained[2] == trained[3]


def test_progress_and_metrics_of_a_module_without_validation() -> None:
    done: list[float] = []
    learner = LightningLearner(Unscored)
    model = learner.initial(0)
    metrics = learner.train(model, (INPUTS, LABELS), CONFIG, 0, after_step=done.append)
    assert metrics.keys() == {"loss", "local_steps"}
    assert len(done) == 12
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert learner.evaluate(model, (INPUTS, LABELS)) == {}


def test_global_randomness_is_left_alone() -> None:
    state = torch.get_rng_state()
    learner = LightningLearner(Lit)
    learner.train(learner.initial(0), (INPUTS, LABELS), CONFIG, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    learner = LightningLearner(Lit)
    with pytest.raises(ModelError, match="does not fit the module Lit"):
        learner.train(LightningLearner(Unscored).initial(0), (INPUTS, LABELS), CONFIG, 0)
    with pytest.raises(DataError, match="there are no examples"):
        learner.train(learner.initial(0), (INPUTS[:0], LABELS[:0]), CONFIG, 0)
    with pytest.raises(JobFileError, match=r"config.epochs = 0: expected"):
        learner.check_config({"epochs": 0})
    (tmp_path / "plain.py").write_text("from torch import nn\ndef make(units): return nn.Linear(units, 1)\n")
    with pytest.raises(JobFileError, match="is a Linear; expected a LightningModule of the package `lightning`"):
        OwnLightningModule("plain.py:make", tmp_path, {"units": 2})()


class Manual(Unscored):
    """Two optimizers, which its steps call themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        for optimizer in self.optimizers():  # pyright: ignore
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.line(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_entropy", loss)  # pyright: ignore[reportPossiblyUnboundVariable]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.line.parameters(), lr=0.1) for _ in range(2)]


def test_a_loss_that_was_not_measured_is_absent() -> None:
    learner = LightningLearner(Manual)
    metrics = learner.train(learner.initial(0), (INPUTS, LABELS), CONFIG, 0)
    assert metrics.keys() == {"entropy", "local_steps"}
    assert metrics["entropy"] > 0.0
    assert metrics["local_steps"] == 12.0  # of each optimizer
    few = CONFIG | {"epochs": 1, "max_steps": 3}
    assert learner.train(learner.initial(0), (INPUTS, LABELS), few, 0)["local_steps"] == 3.0
    with pytest.raises(JobFileError, match=r"max_steps = 3: .* expected epochs = 1 with max_steps"):
        learner.check_config(CONFIG | {"max_steps": 3})


class OnABase(Lit):
    def __init__(self) -> None:
        super().__init__()
        cast(nn.Sequential, self.net)[0].requires_grad_(False)


def test_only_what_is_trained_is_shared() -> None:
    learner, whole = LightningLearner(OnABase, share="trained"), LightningLearner(OnABase)
    shared, everything = learner.initial(), whole.initial()
    assert set(everything) - set(shared) == {"net.0.weight", "net.0.bias"}
    with pytest.raises(ModelError, match="the same base on all participants"):
        learner.train(shared.copy(), (INPUTS, LABELS), CONFIG | {"base_sha256": "0" * 64}, seed=3)
    config = CONFIG | {"base_sha256": learner.base_sha256()}
    learner.train(shared, (INPUTS, LABELS), config, seed=3)
    whole.train(everything, (INPUTS, LABELS), CONFIG, seed=3)
    for name in shared:
        np.testing.assert_array_equal(shared[name], everything[name])
    scores = learner.evaluate(shared, (INPUTS, LABELS), config)
    assert scores == whole.evaluate(everything, (INPUTS, LABELS))
    with pytest.raises(ModelError, match="belongs to the base, but the job's model has it"):
        learner.evaluate(everything, (INPUTS, LABELS), config)


def test_a_trainer_takes_only_jobs_that_state_its_base() -> None:
    made: list[OnABase] = []

    def make() -> OnABase:
        made.append(OnABase())
        return made[-1]

    trainer = LightningTrainer(module=make, data=(INPUTS, LABELS), device="cpu", share="trained")
    learner = LightningLearner(OnABase, share="trained")
    with pytest.raises(ModelError, match=f"expected base_sha256 in its .*{learner.base_sha256()}"):
        trainer(Task(name="lit", parameters=learner.initial(), config=CONFIG))
    config = CONFIG | {"base_sha256": learner.base_sha256()}
    made.clear()
    results: list[Parameters] = []
    for _ in range(2):
        task = Task(name="lit", parameters=learner.initial(), config=config)
        assert trainer(task).num_examples == 41
        results.append(task.parameters)
        assert trainer.evaluate(task).num_examples == 41
    assert len(made) == 1  # a base may take minutes to load
    assert results[0] == results[1]
    fresh = Task(name="lit", parameters=learner.initial(), config=config)
    LightningTrainer(module=OnABase, data=(INPUTS, LABELS), device="cpu", share="trained")(fresh)
    assert fresh.parameters == results[0]
    with pytest.raises(
        ModelError, match=r"the trainer here does not name the tokenizer of its data; expected one with tokenizer"
    ):
        trainer(Task(name="lit", parameters=learner.initial(), config=config | {"tokenizer_sha256": "0" * 64}))
