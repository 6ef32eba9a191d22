"""One process and two, for the tests of data-parallel training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch

from core.parallel import scenarios
from core.parallel.scenarios import Arrays
from fedplat.backends.ranks import Backend, Ranks, joined

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def alone() -> Generator[Ranks]:
    """This process, as a group of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the two processes have
    with joined("gloo") as ranks:
        yield ranks
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have left behind that did all scenarios, and were killed in the last one."""
    return left_behind(tmp_path_factory.mktemp("two"), 2, "gloo")


@pytest.fixture(scope="session")
def folder_of_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of processes with a GPU each: two, or as many as there are."""
    return left_behind(tmp_path_factory.mktemp("gpus"), min(2, torch.cuda.device_count()), "nccl")


def left_behind(folder: Path, num_processes: int, backend: Backend) -> Path:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    env = dict(os.environ, WORLD_SIZE=str(num_processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "tests")}
    program = [sys.executable, "-W", "error", "-m", "core.parallel.scenarios", str(folder), backend]
    running = [
        subprocess.Popen(program, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_processes)
    ]
    assert signal.SIGKILL in [-each.wait() for each in running]
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
