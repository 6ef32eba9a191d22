"""Sums in an accelerator's memory: NumPy's bits, also when the memory is full."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fedplat.aggregate import Accumulator, Contribution, Shard, clip_by_norm, weighted_mean
from fedplat.model import WINDOW, Parameters
from fedplat.pytorch.distributed.vectors import DeviceSum, device_sum
from support.ranks.backends import if_on_gpus

SIZE = 2 * WINDOW + 77
DEVICES = ["cpu", *if_on_gpus("cuda", 1)]
PLENTY = 1 << 30


def update(seed: int) -> Parameters:
    return Parameters.from_arrays({"w": np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)})


def folded(memory: DeviceSum | None, weights: tuple[float, ...] = (1.0, 0.1, 7.3)) -> bytes:
    rule = clip_by_norm(100.0)(weighted_mean())
    accumulator = Accumulator(update(0).schema, rule, None, Shard(range(SIZE), memory=memory))
    for seed, weight in enumerate(weights):
        accumulator.fold(update(seed), Contribution(weight))
    return accumulator.finish(update(9), {})[0].to_bytes()


@pytest.mark.parametrize("device", DEVICES)
def test_the_bits_are_those_of_numpy(device: str) -> None:
    memory = device_sum(SIZE, torch.device(device), PLENTY)
    assert isinstance(memory, DeviceSum)
    assert folded(memory) == folded(None)


@pytest.mark.fault("F35")
@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_that_does_not_fit_stays_with_the_host(device: str) -> None:
    assert device_sum(SIZE, torch.device(device), 4 * SIZE) is None


def test_without_an_accelerator_there_is_no_device_sum() -> None:
    assert device_sum(SIZE, torch.device("cpu")) is None


@pytest.mark.fault("F35")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_out_of_memory_in_the_middle_costs_time_only(device: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = device_sum(SIZE, torch.device(device), PLENTY)
    assert memory is not None
    with _failing(monkeypatch, after):
        assert folded(memory) == folded(None)


@pytest.mark.fault("F35")
def test_another_process_may_take_the_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "zeros", none)
    assert device_sum(SIZE, torch.device("cpu"), PLENTY) is None


@contextmanager
def _failing(monkeypatch: pytest.MonkeyPatch, after: int) -> Generator[None]:
    """Lets the device run out of memory after `after` windows."""
    copy, left = torch.Tensor.copy_, [after]

    def copied(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no room")
        return copy(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", copied)
        yield
