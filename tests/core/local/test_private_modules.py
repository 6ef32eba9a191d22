"""Example-level privacy of modules, losses and datasets that are not plain: what works, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.privacy.steps import StepCharge
from fedplat.pytorch import dp
from fedplat.pytorch.training import (
    DatasetExamples,
    Learner,
    LocalOptions,
    LocalTraining,
    Loss,
    TensorExamples,
    Trainee,
    evaluate,
    train,
)
from support.private_cases import (
    EXAMPLES,
    INPUTS,
    KINDS,
    LEARNER,
    PLAIN,
    QUIET,
    TENSORS,
    close,
    draws,
    quiet,
    reference,
    start,
    trained,
    work,
)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return TENSORS[0][index], TENSORS[1][index]


def test_any_dataset_may_have_steps_without_examples() -> None:
    read = work(DatasetExamples(Rows(), torch.device("cpu")), **quiet(batch_size=1))
    close(trained(read)[0], trained(work(**quiet(batch_size=1)))[0], atol=0)


def looking(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that no `vmap` can do, and that is a sum rather than a mean."""
    assert outputs.sum().item() != 0
    return (outputs - targets).square().sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, looking])
def test_an_example_whose_gradient_is_not_finite_counts_as_zero(kind: str, loss: Loss) -> None:
    inputs, targets = TENSORS[0].clone(), TENSORS[1]
    inputs[3] = float("nan")
    inputs[5] = float("inf")
    options = quiet(epochs=1, dp=kind, dp_max_grad_norm=0.5)
    learner = Learner(model=LEARNER.model, loss=loss)
    training = work(TensorExamples(inputs, targets), batch_size=0, **options)
    rest = np.delete(np.arange(11), [3, 5])
    close(trained(training, learner)[0], reference(work(batch_size=11, **options), [rest]))


def normed(affine: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12, affine=affine), nn.Linear(12, 1))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_refused_with_opacus_reason_and_the_fix(affine: bool) -> None:
    learner, memory = Learner(model=lambda: normed(affine), loss=nn.functional.mse_loss), ClientState()
    with pytest.raises(ModelError) as caught:
        train(Trainee(learner), learner.initial(), work(memory=memory, **QUIET))
    said = str(caught.value)
    assert said.startswith(
        "the model cannot be trained with example-level privacy: its layer '1' is BatchNorm1d; use GroupNorm(4, 12, "
    )
    assert "as opacus.validators.ModuleValidator.fix(module) does. Opacus reports: BatchNorm cannot support" in said
    assert said.endswith("depending on who else is on its batch.")
    assert len(said) < 500 - len("ModelError: ")  # a server is told no more
    assert not memory.changed


def test_a_layer_with_values_of_its_own_is_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_buffer("seen", torch.zeros(()))

    learner = Learner(model=Counting, loss=nn.functional.mse_loss)
    with pytest.raises(ModelError, match=r"Opacus reports: Model contains a trainable layer with buffers.*Counting"):
        train(Trainee(learner), learner.initial(), work(**QUIET))


class Watching(nn.Module):
    """Keeps what it has seen, and has a parameter that may be of no use."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(3, 1), nn.Linear(1, 1) if unused else nn.Identity()
        self.watch = nn.Module()
        self.watch.register_buffer("last", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.watch.last.copy_(inputs.detach().mean(0))  # type: ignore[operator]
        return self.linear(inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_trained_stays_as_it_was_given(kind: str) -> None:
    learner = Learner(model=Watching, loss=nn.functional.mse_loss)
    parameters = learner.initial()
    train(Trainee(learner), parameters, work(**quiet(dp=kind)))
    assert not parameters["watch.last"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_is_named_and_costs_nothing(kind: str) -> None:
    learner, memory = Learner(model=lambda: Watching(unused=True), loss=nn.functional.mse_loss), ClientState()
    with pytest.raises(ModelError, match="has no gradient of single examples"):
        train(Trainee(learner), learner.initial(), work(memory=memory, **quiet(dp=kind)))
    assert dp.RecordedLedger(memory).settle(StepCharge(1.0, 1.0, 0), 0) == []


class Scaled(nn.Module):
    """A layer that Opacus does not know, with a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 1), nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(inputs).tanh()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_ones_own_are_trained_as_without_privacy(kind: str) -> None:
    learner = Learner(model=Scaled, loss=nn.functional.mse_loss)
    plain, found = learner.initial(), learner.initial()
    train(Trainee(learner), plain, work(batch_size=0))
    train(Trainee(learner), found, work(batch_size=0, **quiet(dp=kind)))
    close(dict(found), dict(plain))
    assert found["scale"] != 2.0


class Folded(nn.Module):
    """Two examples' worth of rows for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([inputs, inputs])).view(2, -1, 1).mean(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_moves_examples_out_of_the_first_dimension_is_refused(kind: str) -> None:
    learner = Learner(model=Folded, loss=nn.functional.mse_loss)
    with pytest.raises(ModelError, match="has 22 gradients for a batch of 11 examples; expected layers that keep"):
        train(Trainee(learner), learner.initial(), work(batch_size=0, **quiet(dp=kind)))


def one_each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that is not reduced."""
    return (outputs - targets).square()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_a_mean_is_clipped_as_well(kind: str) -> None:
    training = work(**quiet(dp=kind, dp_max_grad_norm=0.5))
    learner = Learner(model=LEARNER.model, loss=one_each)
    close(trained(training, learner)[0], reference(training, draws(training)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_is_as_it_was_afterwards(kind: str) -> None:
    trainee, before = Trainee(LEARNER), trained(work())[0]

    def stop(done: int, total: int) -> bool:
        raise KeyboardInterrupt

    options = LocalOptions.from_config(PLAIN | QUIET | {"dp": kind})
    with pytest.raises(KeyboardInterrupt):
        train(trainee, start(), LocalTraining(examples=EXAMPLES, options=options, seed=1, after_step=stop))
    parameters = start()
    assert evaluate(trainee, parameters, EXAMPLES)["loss"] > 0
    train(trainee, parameters, work())
    close(dict(parameters), before, atol=0)
    assert {"grad_sample", "summed_grad", "activations"}.isdisjoint(vars(trainee.module) | vars(trainee.module.weight))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0])),
        functools.partial(nn.functional.cross_entropy, weight=torch.tensor([1.0, 9.0])),
    ],
)
def test_weights_of_classes_that_would_cancel_are_refused(loss: Loss) -> None:
    learner = Learner(model=LEARNER.model, loss=loss)
    with pytest.raises(ModelError, match="weights of classes, which cancel in the loss of a single example"):
        trained(work(**quiet()), learner)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.layer(inputs)))


class InPlace(Reused):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(inputs).relu_())


def bounded() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("module", "kinds", "words"),
    [
        (Reused, ["ghost"], r'dp = "ghost": .* used twice.* use dp = "flat"'),
        (InPlace, KINDS, "changes the outputs of a layer in place; use inplace=False"),
        (bounded, KINDS, "its layer '0' has max_norm, which scales the rows that examples use, without noise"),
    ],
)
def test_modules_that_hooks_cannot_follow_are_refused_in_words(module: Any, kinds: list[str], words: str) -> None:
    learner = Learner(model=module, loss=nn.functional.mse_loss)
    for kind in kinds:
        with pytest.raises(ModelError, match=words):
            train(Trainee(learner), learner.initial(), work(**quiet(dp=kind)))
