"""Mixed precision on a GPU: near to what float32 gives, and steps out of range are left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
RNG = np.random.default_rng(9)
INPUTS, TARGETS = RNG.normal(size=(64, 8)).astype("f4"), RNG.integers(0, 3, 64)
LEARNER = Learner(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))


def trained(precision: str, device: str = "cuda", scale: float = 1.0) -> tuple[Parameters, dict[str, float]]:
    parameters = LEARNER.initial()
    config = {"epochs": 3, "batch_size": 16, "learning_rate": 0.1, "momentum": 0.9, "precision": precision}
    inputs, targets = torch.tensor(INPUTS * scale, device=device), torch.tensor(TARGETS, device=device)
    options = LocalOptions.from_config(config)
    work = LocalTraining(examples=TensorExamples(inputs, targets), options=options, seed=1)
    metrics = train(Trainee(LEARNER, device), parameters, work)
    return parameters, dict(metrics)


def test_a_gpu_gives_what_the_cpu_gives() -> None:
    np.testing.assert_allclose(trained("fp32")[0].to_vector(), trained("fp32", "cpu")[0].to_vector(), atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_near(precision: str) -> None:
    parameters, metrics = trained(precision)
    assert metrics["local_steps"] > 6  # the scale of fp16 may have to be found first
    np.testing.assert_allclose(metrics["loss"], trained("fp32")[1]["loss"], rtol=0.2)
    assert np.isfinite(parameters.to_vector()).all()


def test_steps_beyond_the_range_of_fp16_are_left_out_and_not_counted() -> None:
    parameters, metrics = trained("fp16", scale=1e6)
    assert metrics["local_steps"] < 12
    assert np.isfinite(parameters.to_vector()).all()
