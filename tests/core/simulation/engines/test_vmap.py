"""What the engine `vmap` refuses, and what only it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedplat.errors import EngineError
from fedplat.pytorch.vectorized import vmap_gradients
from fedplat.simulation.engines.client_trainer import ClientTraining, VmapEngine
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.processes import LoopEngine
from support.simulation.layers import dropping, normed
from support.simulation.tasks import lenet, rounds, task

WORKS = [[ClientTask(client, version, client) for client in range(6)] for version in range(2)]


def first_only(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[:1], targets[:1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (task(normed), "BatchNorm keeps means"),
        (task(dropping), "random"),
        (task(precision="bf16"), "precision"),
        (task(dp="flat", dp_noise_multiplier=1, dp_max_grad_norm=1, dp_delta=1e-5), "one client at a time"),
        (task()._replace(learner=task().learner.__class__(model=lenet, loss=first_only)), "not a mean over examples"),
    ],
)
def test_what_cannot_be_done_is_refused_with_words(given: ClientTraining, words: str) -> None:
    with pytest.raises(EngineError, match=f'engine = "vmap": .*{words}.*; use "loop" or "processes"'):
        rounds(VmapEngine(given, "cpu"), given.learner.initial(), WORKS)


@pytest.mark.parametrize("unfold", [False, True])
def test_both_ways_to_compute_convolutions_are_right(unfold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(computation: Callable[..., Any], tensors: object) -> float:
        times.append(0)
        return float((len(times) % 2 == 0) != unfold)

    times: list[int] = []
    monkeypatch.setattr(vmap_gradients, "_seconds", seconds)
    given = task(lenet)
    model = given.learner.initial()
    found = rounds(VmapEngine(given, "cpu"), model, WORKS)
    expected = rounds(LoopEngine(given), model, WORKS)
    for one, other in zip(found[-1], expected[-1], strict=True):
        assert np.abs(one.update.to_vector() - other.update.to_vector()).max() < 1e-6
    assert times


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_weights() -> None:
    given = task(lenet, momentum=0.5)
    model = given.learner.initial()
    works = [[ClientTask(client, version, client) for client in range(6)] for version in range(20)]
    found = rounds(VmapEngine(given, "cuda"), model, works)
    expected = rounds(LoopEngine(given), model, works)
    for one, other in zip(found[0], expected[0], strict=True):
        assert np.abs(one.update.to_vector() - other.update.to_vector()).max() < 1e-4
    for one, other in zip(found[-1], expected[-1], strict=True):  # as CUDA graphs by then
        assert np.abs(one.update.to_vector() - other.update.to_vector()).max() < 1e-2
