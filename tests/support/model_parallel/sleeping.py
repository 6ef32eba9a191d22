"""Pipelines whose stages sleep instead of computing, as `benchmarks/parallel_training.py` measures them."""

from __future__ import annotations

from typing import Any

import msgspec

from fedplat.pytorch.distributed import Ranks
from parallel_ranks import measure_sleeping


def measure(ranks: Ranks, layouts: list[str], seconds: float) -> list[dict[str, Any]]:
    """Train in each layout; return the times of the operations."""
    return [msgspec.to_builtins(measure_sleeping(ranks, layout, seconds)) for layout in layouts]
