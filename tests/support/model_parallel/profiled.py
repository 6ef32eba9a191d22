"""Trainings of several layouts with the profiler, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedplat.job.pool import WarmStart
from fedplat.parallel import Parallel
from fedplat.pytorch import server
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import TrainingRun
from support.model_parallel.pool import TABLE, make_trainer


def train(ranks: Ranks, layouts: list[str], folder: str, **options: Any) -> None:
    """Train in each layout, with a folder of traces named after it."""
    for layout in layouts:
        parallel = Parallel.from_text(layout)
        work = TrainingRun(
            options=WarmStart(**TABLE, **options),
            num_ranks=parallel.num_ranks,
            parallel=parallel,
            traces=Path(folder) / layout,
        )
        made = make_trainer()
        server.train(ranks, made, made.learner.initial(3), work)
