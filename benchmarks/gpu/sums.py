"""Sums of updates of 1 GB in the host's memory and in the GPU's: the same bits, and bytes a second."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedplat.aggregate import Accumulator, Contribution, FedAvg, Shard
from fedplat.model import Parameters
from fedplat.pytorch.distributed.vectors import device_sum
from gpu.lines import Check, Line, Measurement, Setting

NAME = "sums"
TURNS = 4
HOST_BYTES = 1 << 34
"""What a CPU counts as free memory of a device, with `--device cpu`."""


def measure(setting: Setting) -> Iterator[Line]:
    """Fold the same update several times in both places."""
    size = 250_000 if setting.is_small else 250_000_000
    update = Parameters.from_arrays({"w": np.random.default_rng(0).standard_normal(size, dtype=np.float32)})
    on_device = device_sum(size, setting.device, None if setting.is_on_gpu else HOST_BYTES)
    if on_device is None:
        raise MemoryError(f"the device has too little free memory for a sum of {4 * size:,} bytes")
    accumulators = {"in the host's memory": Accumulator(update.schema, FedAvg().build())}
    accumulators["in the GPU's memory"] = Accumulator(
        update.schema, FedAvg().build(), None, Shard(range(size), memory=on_device)
    )
    for place, accumulator in accumulators.items():
        accumulator.fold(update, Contribution(3.0))  # the first one allocates
        begin_s = setting.now_s()
        for _ in range(TURNS):
            accumulator.fold(update, Contribution(3.0))
        rate = TURNS * 4 * size / (setting.now_s() - begin_s)
        work = f"sum of updates of {4 * size // 1_000_000:,} MB"
        yield Measurement(part=NAME, work=work, system=place, value=rate / 1e9, unit="GB/s")
    same = np.array_equal(accumulators["in the host's memory"].total, on_device.total())
    found = "equal bits" if same else "other bits"
    yield Check(part=NAME, statement="sums in both memories have the same bits", passed=same, found=found)
