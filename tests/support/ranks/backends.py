"""The libraries that carry tensors between the ranks of a test: Gloo on CPUs, and NCCL where each rank has a GPU.

Without a CUDA device there are no parameters for NCCL: their tests could only be skipped.

On CPUs the tests compare bits. GPUs add in other orders than CPUs, and some of their kernels in another one each time,
so there the results have to be close.

With `SHARED_GPU=1` in the environment, all ranks use the first GPU. That is slow, but so the tests with NCCL run on a
machine with one GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.ranks.group import SHARED_GPU


def on_gpus(count: int) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs a GPU for each of `count` ranks."""
    found = torch.cuda.device_count()
    reason = f"needs {count} CUDA devices, one for each rank, or SHARED_GPU=1 with one; there are {found}"
    return [pytest.mark.gpu, pytest.mark.skipif(found < (1 if SHARED_GPU else count), reason=reason)]


def if_on_gpus(value: object, count: int) -> list[Any]:
    """The parameter of a test that needs a GPU for each of `count` ranks; none on a machine without a GPU."""
    return [pytest.param(value, marks=on_gpus(count))] if torch.cuda.is_available() else []


def backends(count: int) -> list[Any]:
    """The parameters of a fixture with `count` ranks, which exists once for each library."""
    return ["gloo", *if_on_gpus("nccl", count)]


def bound(backend: str, on_cpus: float) -> float:
    """The largest difference of losses: that of the CPUs, or a larger one."""
    return on_cpus if backend == "gloo" else max(on_cpus, 1e-4)
