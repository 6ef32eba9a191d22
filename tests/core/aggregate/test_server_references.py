"""Server rules beside Flower's strategies, on the same updates (`make references` writes them again).

Where Flower differs from the paper, the test states the difference: its adaptive optimizers begin with a
second moment of 0 (Algorithm 2 of Reddi et al. needs at least τ²), and its FedAdam has a bias correction. Its adaptive
clipping counts the updates that were clipped, where Algorithm 1 of Andrew et al. counts those that were not: when all
are too long its norm shrinks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedplat.aggregate import Contribution, Partial, Rule, RuleOptions, State, Wrapper, clip_by_quantile
from fedplat.aggregate.clipping import AdaptiveClip
from fedplat.config.plugins import BUILTIN
from fedplat.model import Vector, VectorBlocks

FOUND: dict[str, Any] = json.loads(Path(__file__).with_name("server_references.json").read_bytes())
BASE = np.array(FOUND["base"], np.float32)
ADAPTIVE = {"learning_rate": 0.03, "tau": 0.01}
BETAS = {"beta1": 0.8, "beta2": 0.95}


def rule_of(name: str, **options: float) -> Rule:
    return BUILTIN.decode(RuleOptions, {"rule": name, **options}).build()


def always(rule: Rule) -> Callable[[int], Rule]:
    return lambda round_number: rule


def flowers_adam(round_number: int) -> Rule:
    """FedAdam with the bias correction of Kingma and Ba for step t + 1, where rounds are counted from 1."""
    steps = round_number + 1
    correction = np.sqrt(1 - BETAS["beta2"] ** steps) / (1 - BETAS["beta1"] ** steps)
    return rule_of("fedadam", **{**ADAPTIVE, "learning_rate": ADAPTIVE["learning_rate"] * float(correction)}, **BETAS)


def clipping() -> Wrapper:
    return clip_by_quantile(AdaptiveClip(quantile=0.6, learning_rate=0.3, initial_norm=0.4))


OURS: dict[str, Callable[[int], Rule]] = {
    "fedavg": always(rule_of("fedavg")),
    "fedavgm": always(rule_of("fedavgm", learning_rate=0.5, momentum=0.8)),
    "fedadagrad": always(rule_of("fedadagrad", **ADAPTIVE)),
    "fedadam": flowers_adam,
    "fedyogi": always(rule_of("fedyogi", **ADAPTIVE, **BETAS)),
    "qfedavg": always(rule_of("qfedavg", q=0.7, local_learning_rate=0.05)),
    "adaptive clipping": always(clipping()(rule_of("fedavg"))),
}


def flowers_norm(rule: Rule, partial: Partial) -> Mapping[str, float]:
    """The next norm, computed from the fraction of clipped updates instead of unclipped ones."""
    scalars = rule.remember(partial)
    if "clip_norm" not in scalars:
        return scalars
    clipped = 1 - partial.sums["within_clip_norm"] / partial.num_updates
    return {"clip_norm": partial.scalars["clip_norm"] * float(np.exp(-0.3 * (clipped - 0.6)))}


def ours(name: str, second_moment: float | None) -> Iterator[Vector]:
    """Our model after each round; each rule continues from its own models, as the peer's does."""
    model, size = BASE, BASE.size
    state: State = dict(OURS[name](1).init(size))
    if second_moment is not None and "second_moment" in state:
        state = {**state, "second_moment": np.full(size, second_moment, np.float32)}
    scalars = OURS[name](1).start(size).scalars
    for number, cohort in enumerate(FOUND["rounds"], 1):
        rule = OURS[name](number)
        partial = dataclasses.replace(rule.start(size), scalars=scalars)
        for report in cohort:
            weight = 1.0 if name == "qfedavg" else report["num_examples"]  # Flower's q-FedAvg has no weights
            update = np.array(report["update"], np.float32)
            partial = rule.fold(
                partial, VectorBlocks(update), Contribution(weight, metrics={"loss_before": report["loss"]})
            )
        step, state = rule.apply(state, partial)
        model, scalars = model + step, flowers_norm(rule, partial)
        yield model


def distance(models: Sequence[npt.NDArray[Any]], name: str) -> float:
    return float(np.abs(np.array(models) - np.array(FOUND["models"][name])).max())


def test_every_strategy_has_its_counterpart():
    assert OURS.keys() == FOUND["models"].keys()


@pytest.mark.parametrize("name", OURS)
def test_models_equal_flowers(name: str):
    assert distance(list(ours(name, second_moment=0.0)), name) < 1e-6


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_the_second_moment_of_the_paper_makes_another_model(name: str):
    assert distance(list(ours(name, second_moment=None)), name) > 1e-4
