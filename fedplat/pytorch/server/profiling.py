"""PyTorch's profiler for a few steps of a training; TensorBoard can read its traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from torch import profiler

from fedplat.pytorch.distributed import Ranks

_ACTIVE = 3


@contextmanager
def trace_steps(folder: Path | None, ranks: Ranks, num_steps: int) -> Generator[Callable[[], None]]:
    """Trace steps into `folder`, a file for each rank; yield a function to call after each step.

    Records three steps, after one skipped step and one for the profiler's warm-up. A training with fewer steps records
    the last ones, and one with a single step none.
    """
    if folder is None or num_steps < 2:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    active = min(_ACTIVE, num_steps - 1)
    schedule = profiler.schedule(wait=min(1, num_steps - active - 1), warmup=1, active=active, repeat=1)
    handler = profiler.tensorboard_trace_handler(os.fspath(folder), worker_name=f"rank{ranks.rank}")
    with profiler.profile(schedule=schedule, on_trace_ready=handler, record_shapes=True) as running:
        yield running.step
