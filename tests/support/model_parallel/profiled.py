"""Trainings of several layouts with the profiler, one after the other."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedplat.job.tables import WarmStart
from fedplat.parallel import Parallel
from fedplat.pytorch import server
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import TrainingRun, profiling
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


def train_without_space(ranks: Ranks, folder: str, full: int) -> tuple[list[str], list[float]]:
    """Train while one rank cannot write more than 4 KiB into any file; return the warnings and the losses."""
    parallel, made, log = Parallel(shard=ranks.size), make_trainer(), _Warnings()
    work = TrainingRun(
        options=WarmStart(**TABLE, profile=True), num_ranks=parallel.num_ranks, parallel=parallel, traces=Path(folder)
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    profiling_log = logging.getLogger(profiling.__name__)
    profiling_log.addHandler(log)
    if ranks.rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        curve = server.train(ranks, made, made.learner.initial(3), work)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        profiling_log.removeHandler(log)
    assert curve is not None
    return log.texts, curve.losses.tolist()


class _Warnings(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
