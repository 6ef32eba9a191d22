"""The same on GPUs: one rank for each, NCCL between them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from fedplat.pytorch.distributed.bench.records import BenchReport
from support.ranks.group import Zygote
from support.ranks.on_ranks import vector_of

HERE = "support.ranks.on_ranks"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
]


@pytest.mark.fault("F35")
def test_sums_on_gpus_have_the_bits_of_the_order_of_logical_ranks(zygote: Zygote, tmp_path: Path) -> None:
    count, size = torch.cuda.device_count(), 100_000
    bounds = [rank * size // count for rank in range(count + 1)]
    with zygote.group(count, BACKEND="nccl") as group:
        replies = group.call(f"{HERE}:add_up", transport="auto", logical=count + 1, bounds=bounds, folder=str(tmp_path))
    assert {reply["class"] for reply in replies} == {"P2PVectors"}
    total = vector_of(0, size)
    for number in range(1, count + 1):
        total = total + vector_of(number, size)
    whole = np.frombuffer((tmp_path / "whole-second-0").read_bytes(), np.float32)
    np.testing.assert_array_equal(whole, total * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_measurement_is_right_on_gpus(zygote: Zygote) -> None:
    with zygote.group(torch.cuda.device_count(), BACKEND="nccl") as group:
        replies = group.call(f"{HERE}:bench", sizes=[4096, 2**24])
    report = msgspec.convert(replies[0]["report"], BenchReport)
    assert report.library == "nccl"
    assert [each for each in report.measurements if not each.is_correct] == []
