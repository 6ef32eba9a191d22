"""Server optimizers against torch.optim, where torch has the same method, and how they nest."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import torch

import fedplat.aggregate
from fedplat import aggregate
from fedplat.aggregate import Contribution, FedAdagrad, FedAdam, FedAvg, FedAvgM, Rule
from fedplat.model import Parameters, Vector, VectorBlocks

SIZE = 400


def deltas(num_rounds: int = 6) -> list[Vector]:
    return [np.random.default_rng(seed).normal(0, 0.1, SIZE).astype(np.float32) for seed in range(num_rounds)]


def final(rule: Rule) -> Vector:
    model, state = np.zeros(SIZE, np.float32), rule.init(SIZE)
    for delta in deltas():
        step, state = rule.apply(state, rule.fold(rule.start(SIZE), VectorBlocks(delta), Contribution(5.0)))
        model = model + step
    return model


def torch_final(make: type[torch.optim.Optimizer], **options: float) -> Vector:
    parameter = torch.zeros(SIZE, requires_grad=True)
    optimizer = make([parameter], **options)  # type: ignore[arg-type]
    for delta in deltas():
        parameter.grad = -torch.from_numpy(delta)  # the update is a negative gradient
        optimizer.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize(
    ("rule", "make", "options"),
    [
        (FedAvg(learning_rate=0.3).build(), torch.optim.SGD, {"lr": 0.3}),
        (FedAvgM(learning_rate=0.3, momentum=0.8).build(), torch.optim.SGD, {"lr": 0.3, "momentum": 0.8}),
        (
            FedAdagrad(learning_rate=0.05, tau=0.01).build(),
            torch.optim.Adagrad,
            {"lr": 0.05, "eps": 0.01, "initial_accumulator_value": 0.01**2},
        ),
    ],
)
def test_the_same_as_torch(rule: Rule, make: type[torch.optim.Optimizer], options: dict[str, float]):
    np.testing.assert_allclose(final(rule), torch_final(make, **options), rtol=1e-4, atol=1e-6)


def test_optimizers_with_other_memories_nest():
    momentum, adam = FedAvgM(momentum=0.5), FedAdam()
    rule = aggregate.server_adam(adam)(aggregate.server_momentum(momentum)(aggregate.weighted_mean()))
    assert set(rule.init(2)) == {"velocity", "first_moment", "second_moment"}
    outer = adam.build()
    inner_state, outer_state, state = momentum.build().init(SIZE), outer.init(SIZE), rule.init(SIZE)
    for delta in deltas():
        partial = rule.fold(rule.start(SIZE), VectorBlocks(delta), Contribution(1.0))
        step, state = rule.apply(state, partial)
        middle, inner_state = momentum.build().apply(inner_state, partial)
        expected, outer_state = outer.apply(
            outer_state, outer.fold(outer.start(SIZE), VectorBlocks(middle), Contribution(1.0))
        )
        assert step.tobytes() == expected.tobytes()


def test_optimizers_with_the_same_memory_do_not_nest():
    rule = aggregate.server_adam(FedAdam())(FedAdam().build())
    with pytest.raises(ValueError, match="first_moment"):
        rule.init(3)


def test_exported_names_are_pinned():
    assert sorted(aggregate.__all__) == [
        "Accumulator",
        "AdaptiveClip",
        "BaseRule",
        "ClientRequirements",
        "Contribution",
        "Correction",
        "DeviceAccumulator",
        "Easgd",
        "FedAdagrad",
        "FedAdam",
        "FedAsync",
        "FedAvg",
        "FedAvgM",
        "FedBuff",
        "FedDyn",
        "FedExLora",
        "FedNova",
        "FedYogi",
        "Flora",
        "LOCAL_ALGORITHM",
        "LOCAL_ALGORITHMS",
        "LocalAlgorithm",
        "LocalAlgorithmOptions",
        "LocalEasgd",
        "LocalEnding",
        "LocalFedDyn",
        "LocalFedProx",
        "LocalScaffold",
        "LocalSgd",
        "LocalStart",
        "LossContext",
        "MAX_ROBUST_UPDATES",
        "Partial",
        "PartialSummary",
        "QFedAvg",
        "RULES",
        "ResultPart",
        "Robust",
        "Rule",
        "RuleOptions",
        "Scaffold",
        "Shard",
        "StartContext",
        "State",
        "UpdateDirection",
        "Wrapper",
        "average_statistics",
        "clip_by_norm",
        "clip_by_quantile",
        "column_start",
        "columns_of",
        "compress_step",
        "describe_metrics_problem",
        "describe_statistics",
        "divide_by_number",
        "first_columns",
        "hold_resting",
        "l2_norm",
        "memory_from_bytes",
        "normalize_by_steps",
        "read_columns",
        "read_memory",
        "read_scalars",
        "rebase",
        "restrict_to_mean",
        "scalars_to_bytes",
        "scale_vector",
        "seed_of",
        "server_adagrad",
        "server_adam",
        "server_feddyn",
        "server_momentum",
        "server_optimizer",
        "server_scaffold",
        "server_sgd",
        "server_yogi",
        "state_from_bytes",
        "state_schema",
        "state_to_bytes",
        "weight_by_loss",
        "weighted_mean",
    ]
    assert all(hasattr(aggregate, name) for name in aggregate.__all__)


def test_the_examples_of_the_docstrings_are_true():
    globals_ = {**vars(aggregate), "np": np, "Parameters": Parameters, "VectorBlocks": VectorBlocks}
    attempted = 0
    for info in pkgutil.iter_modules(fedplat.aggregate.__path__, "fedplat.aggregate."):
        result = doctest.testmod(importlib.import_module(info.name), extraglobs=globals_)
        attempted += result.attempted
        assert result.failed == 0
    assert doctest.testmod(aggregate, extraglobs=globals_).failed == 0
    assert attempted > 0
