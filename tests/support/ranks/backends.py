"""The libraries that carry tensors between the ranks of a test: Gloo on CPUs, and NCCL where each rank has a GPU."""

from __future__ import annotations

import pytest
import torch


def backends(count: int, *marks: pytest.MarkDecorator) -> list[object]:
    """The parameters of a test or a fixture with `count` ranks, which runs once for each library; `marks` are Gloo's.

    On CPUs a test compares bits; GPUs add in other orders, and their results are close.
    """
    lacking = f"needs {count} CUDA devices, one for each rank; there are {torch.cuda.device_count()}"
    on_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < count, reason=lacking)]
    return [pytest.param("gloo", marks=marks), pytest.param("nccl", marks=on_gpus)]
