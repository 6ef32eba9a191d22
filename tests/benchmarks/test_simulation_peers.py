"""The comparison of simulators: that all do the same work, and that it runs on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import peers.simulated_work as theirs
import simulated_fedplat as ours
import simulation_peers
from processes import NotInstalledError
from simulation_peers import CIFAR, ON_GPU, Case, Device


@pytest.mark.parametrize("model", sorted(ours.MODELS))
def test_all_systems_train_the_same_model_on_the_same_data(model: str) -> None:
    mine, other = ours.MODELS[model](), theirs.MODELS[model]()
    assert [each.shape for each in mine.parameters()] == [each.shape for each in other.parameters()]
    assert [type(each) for each in mine.modules()] == [type(each) for each in other.modules()]
    inputs, targets = theirs.data(model, 4, 3)
    federation = ours.federation(model, 4, 3)
    assert np.array_equal(federation.inputs, inputs)
    assert np.array_equal(federation.targets, targets)
    assert mine(torch.from_numpy(inputs)).shape == (12, 10)


@pytest.mark.slow
def test_a_system_is_measured_by_its_rounds() -> None:
    case = Case("small", "LR", 4, 2, 10, ("fedplat loop",))
    sample = simulation_peers.measure(case, "fedplat loop", Device.CPU, 0.5)
    assert sample.first > 0
    assert sample.later
    assert min(sample.later) > 0


def test_a_benchmark_s_whole_time_is_told_from_its_rate() -> None:
    assert simulation_peers.whole([(CIFAR.name, "fedplat vmap", 1500.0, 1.0), ("LR", "fedplat vmap", 9.0, 1.0)]) == [
        "1,500 rounds of CIFAR-10's CNN would take: fedplat vmap 50 s."
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.model)
@pytest.mark.parametrize("system", ["fedplat vmap", "fedplat loop", "pfl-research", "plain PyTorch"])
def test_systems_are_measured_on_a_gpu(case: Case, system: str) -> None:
    try:
        sample = simulation_peers.measure(case, system, Device.CUDA, 5.0)
    except NotInstalledError as exc:
        pytest.skip(str(exc))
    assert len(sample.later) > 1
