"""The engines, by the names of `simulation.engine` in a simulation file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from fedplat.errors import EngineError
from fedplat.learner import ArrayLearner
from fedplat.simulation.engines import malloc
from fedplat.simulation.engines.auto import AutoEngine
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.engines.loop import LoopEngine
from fedplat.simulation.engines.processes import ProcessEngine
from fedplat.simulation.engines.tasks import ClientTraining

ENGINES: Mapping[str, Callable[[ClientTraining, int], Engine]] = {
    "auto": lambda task, num_workers: AutoEngine(task, num_workers or len(os.sched_getaffinity(0))),
    "loop": lambda task, num_workers: LoopEngine(task),
    "processes": ProcessEngine,
    "ray": lambda task, num_workers: _ray(task, num_workers),
    "vmap": lambda task, num_workers: _vmap(task),
}


def open_engine(name: str, task: ClientTraining, num_workers: int = 0) -> Engine:
    """Create an engine, which the caller closes; it has `num_workers` processes, unless it trains in this one.

    `num_workers` = 0 stands for one process for each core; with `ray`, for each core of the cluster. Also makes this
    process keep freed memory for later tensors (see `malloc`). Raises `EngineError` for a task that the engine does not
    support, and `MissingExtraError` if a package is not installed.
    """
    malloc.keep_freed_memory()
    return ENGINES[name](task, num_workers)


def _vmap(task: ClientTraining) -> Engine:
    if isinstance(task.learner, ArrayLearner):
        raise EngineError('engine = "vmap": the learner is no PyTorch module; use "loop" or "processes"')
    from fedplat.simulation.engines.vmap import VmapEngine

    return VmapEngine(task)


def _ray(task: ClientTraining, num_workers: int) -> Engine:
    from fedplat.simulation.engines.ray.engine import RayEngine

    return RayEngine(task, num_workers)
