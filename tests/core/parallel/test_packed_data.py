"""Data-parallel training on packed data has the bits of training on the same data in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.packed import PackedWriter
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.packed import PackedDataset
from fedplat.pytorch.server import ServerTrainer, TrainingRun
from support.ranks import scenarios


@pytest.mark.slow
def test_a_server_trains_on_packed_data(alone: Ranks, tmp_path: Path) -> None:
    inputs, targets = (tensor.numpy() for tensor in scenarios.examples().tensors)
    with PackedWriter(tmp_path / "data", 1000) as writer:
        writer.add(inputs, targets)
    trainer = ServerTrainer(model=scenarios.dropout_net, data=lambda: PackedDataset(tmp_path / "data"))
    work = TrainingRun(options=scenarios.warm(**scenarios.RICH, **scenarios.SCALED), num_ranks=2)
    expected = scenarios.rich(alone, tmp_path)
    for name, value in scenarios.learned(alone, trainer, work).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
