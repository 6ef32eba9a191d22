"""Jobs that are made from Python objects, for simulations.

>>> from fedplat.aggregate import FedAdam
>>> from fedplat.job import Selection
>>> config = {"epochs": 1, "batch_size": 32, "learning_rate": 0.1}
>>> model = "fedplat.pytorch.models:digits_2nn"
>>> job = make_job(model, rounds=20, selection=Selection(goal=10), config=config, aggregation=FedAdam())
>>> job.name, job.selection.goal, job.aggregation.learning_rate
('simulation', 10, 0.01)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedplat import errors, job
from fedplat.config.toml import make_record

OF_LEARNER = "learner:initial"
"""The `model.initial` of a job whose initial model is that of a `Learner`."""


def make_job(
    model: str | Callable[[], object] | None = None,
    *,
    rounds: int,
    selection: job.Selection,
    config: Mapping[str, job.Scalar],
    name: str = "simulation",
    **tables: Any,
) -> job.JobSpec:
    """Return a job for a simulation.

    `model` is `model.initial` of the job file, or a function or class that creates a PyTorch module, which is then
    named; None: `simulate` is called with a `learner`. `name` is also the name of the population and of the trainer.
    `tables` are the other keys of a job file. Raises `JobFileError` with a line for each mistake.
    """
    initial = OF_LEARNER if model is None else model if isinstance(model, str) else _reference(model)
    named = {"name": name, "population": name, "trainer": name, "model": {"initial": initial}}
    return make_record(job.JobSpec, named | {"rounds": rounds, "selection": selection, "config": config} | tables)


def _reference(function: Callable[[], object]) -> str:
    if not inspect.isfunction(function) and not isinstance(function, type):
        raise errors.JobFileError(
            f"model is a {type(function).__name__}; expected a function or class that creates the module, or its "
            "reference, module:function"
        )
    reference = f"{function.__module__}:{function.__qualname__}"
    if not re.fullmatch(r"[\w.]+:[\w.]+", reference):
        raise errors.JobFileError(
            f"model = {function.__qualname__}: it cannot be found by its name; define the function with def, outside "
            "of other functions, or call simulate(..., learner=Learner(model=...))"
        )
    return reference
