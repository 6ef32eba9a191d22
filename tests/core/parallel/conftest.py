"""One process and two, for the tests of data-parallel training."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedplat.pytorch.distributed import Ranks, join_group
from support.ranks import scenarios
from support.ranks.group import RankError, Zygote
from support.ranks.scenarios import Arrays

HERE = "support.ranks.scenarios"


@pytest.fixture
def alone() -> Generator[Ranks]:
    """This process, as a group of its own."""
    with join_group("gloo") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """What two processes have left behind that did all scenarios, and were killed in a training."""
    folder = tmp_path_factory.mktemp("two")
    with zygote.group(2) as group:
        group.call(f"{HERE}:do", folder=str(folder))
        group.begin(f"{HERE}:do_half", folder=str(folder))
        for rank in range(2):
            with pytest.raises(RankError):  # it is gone, or the other one was before it
                group.result(rank)
    return folder


@pytest.fixture(scope="session")
def folder_of_gpus(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """The same of processes with a GPU each: two, or as many as there are."""
    folder = tmp_path_factory.mktemp("gpus")
    with zygote.group(min(2, torch.cuda.device_count()), BACKEND="nccl") as group:
        group.call(f"{HERE}:do", folder=str(folder))
    return folder


@pytest.fixture
def of_two(folder_of_two: Path) -> Callable[[str], Arrays]:
    """What two processes have found in a scenario."""

    return lambda name: arrays(folder_of_two / f"{name}.npz")


@pytest.fixture
def of_gpus(folder_of_gpus: Path) -> Callable[[str], Arrays]:
    """What processes with GPUs have found in a scenario."""
    return lambda name: arrays(folder_of_gpus / f"{name}.npz")


def arrays(path: Path) -> Arrays:
    with np.load(path) as file:
        return dict(file)


@pytest.fixture
def of_one(alone: Ranks, tmp_path: Path) -> Callable[[str], Arrays]:
    """What this process finds in a scenario by itself."""
    return lambda name: getattr(scenarios, name)(alone, tmp_path)
