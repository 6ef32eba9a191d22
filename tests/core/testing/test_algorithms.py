"""The checks of local algorithms name the violation of each that is broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct

from fedplat.aggregate import (
    Correction,
    LocalAlgorithm,
    LocalAlgorithmOptions,
    LocalEnding,
    LocalFedDyn,
    LocalFedProx,
    LocalScaffold,
    LocalSgd,
    LossContext,
)
from fedplat.config.plugins import Plugins
from fedplat.pytorch.training import LocalOptions, forward_features
from fedplat.testing import ConformanceError, check_algorithm

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plugins"
CALLS = itertools.count()


@pytest.mark.parametrize(
    "options", [LocalSgd(), LocalFedProx(mu=0.3), LocalScaffold(), LocalFedDyn(alpha=0.5)], ids=repr
)
def test_built_in_algorithms_keep_the_contract(options: LocalAlgorithmOptions) -> None:
    check_algorithm(options)


@pytest.mark.parametrize("name", ["fedlc.py:FedLC", "fedntd.py:FedNTD", "fedsam.py:FedSAM"])
def test_the_examples_keep_the_contract(name: str) -> None:
    given = {"epochs": 1, "batch_size": 1, "learning_rate": 0.1, "algorithm": name}
    check_algorithm(LocalOptions.from_config(given, Plugins(folder=EXAMPLES)).algorithm)


def correlated(context: LossContext) -> Any:
    """A loss of the whole batch, as in FedDecorr (Shi et al. 2023, arXiv 2210.00226)."""

    def compute(module: Any, inputs: Any, targets: Any) -> Any:
        outputs, features = forward_features(module, inputs)
        return context.loss(outputs, targets) + features.mean(0).square().sum(), outputs

    return compute


def with_loss(change: Callable[[Any, Any], Any]) -> LocalAlgorithm:
    """Returns an algorithm with a change of the module and the inputs before the loss is computed."""

    def make_loss(context: LossContext) -> Any:
        def compute(module: Any, inputs: Any, targets: Any) -> Any:
            outputs = change(module, inputs)
            return context.loss(outputs, targets), outputs

        return compute

    return LocalAlgorithm(make_loss=make_loss)


def scaled_in_place(module: Any, inputs: Any) -> Any:
    return module(inputs.mul_(2.0))


def in_evaluation_mode(module: Any, inputs: Any) -> Any:
    return module.eval()(inputs)


def without_the_first_layer(module: Any, inputs: Any) -> Any:
    return module[2](module[1](module[0](inputs).detach()))


def doubled(module: Any, inputs: Any) -> Any:
    return 2.0 * module(inputs)


def overwritten(gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {name: gradient.mul_(0.5) for name, gradient in gradients.items()}


SEEN: list[Any] = []


def leaking() -> LocalAlgorithm:
    """Keeps what the client before had, outside of the client state."""

    def begin(control: Any, remembered: Any) -> Correction:
        return Correction(drift=dict(SEEN[-1]) if SEEN else {})

    def end(correction: Any, remembered: Any, direction: Any) -> LocalEnding:
        SEEN.append({name: moved.clone() for name, moved in direction.displacement.items()})
        return LocalEnding()

    return LocalAlgorithm(begin, end)


BROKEN: dict[str, tuple[Callable[[], LocalAlgorithm], str]] = {
    "a batch is coupled": (
        lambda: LocalAlgorithm(make_loss=correlated, loss_is_mean=True),
        "a_loss_that_is_a_mean_is_one: the loss of a batch differs from the mean of its examples' losses by",
    ),
    "a clock": (
        lambda: LocalAlgorithm(lambda control, remembered: Correction(pull=float(next(CALLS)))),
        "expected no clock, no memory",
    ),
    "a memory": (leaking, "two trainings with the same options, data and seed return different bits"),
    "a batch is changed": (lambda: with_loss(scaled_in_place), "the loss writes into a batch; expected new tensors"),
    "evaluation mode": (lambda: with_loss(in_evaluation_mode), "expected that it stays in training mode"),
    "a part": (lambda: with_loss(without_the_first_layer), "the loss does not depend on 0.weight"),
    "other outputs": (lambda: with_loss(doubled), "other outputs than those of the module"),
    "gradients are changed": (lambda: LocalAlgorithm(perturb=overwritten), "perturb() writes into an argument"),
    "a division by zero": (
        lambda: LocalAlgorithm(
            perturb=lambda gradients: {name: each / each.norm() for name, each in gradients.items()}
        ),
        "with gradients times 0: config.algorithm =",
    ),
    "infinite": (
        lambda: LocalAlgorithm(lambda control, remembered: Correction(pull=float("inf"))),
        "the pull is inf; expected a finite number",
    ),
}


@pytest.mark.parametrize(("build", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_algorithm_fails_with_a_clear_sentence(build: Callable[[], LocalAlgorithm], sentence: str) -> None:
    SEEN.clear()

    class Broken(Struct, frozen=True):
        def build(self) -> LocalAlgorithm:
            return build()

    with pytest.raises(ConformanceError) as caught:
        check_algorithm(Broken())
    assert sentence in str(caught.value)


def test_a_loss_of_the_whole_batch_is_allowed_if_it_is_declared() -> None:
    class Whole(Struct, frozen=True):
        def build(self) -> LocalAlgorithm:
            return dataclasses.replace(LocalAlgorithm(), make_loss=correlated)

    check_algorithm(Whole())
