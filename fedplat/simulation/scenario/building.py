"""The learner and the initial model of a simulation file, and jobs that are made from Python objects.

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
from typing import TYPE_CHECKING, Any

import msgspec

from fedplat import errors, extras, initial, job, model, randomness
from fedplat.config import toml, user_code
from fedplat.errors import JobFileError, MissingExtraError
from fedplat.learner import ArrayLearner
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.scenario.options import ModelOptions

if TYPE_CHECKING:
    from fedplat.pytorch.training import Learner


def build_learner(file: SimulationFile) -> tuple[Learner | ArrayLearner, model.Parameters]:
    """Return the learner of a simulation file, and the initial model, whose random values follow from the seed.

    Raises `JobFileError`, `UserCodeError`, and `MissingExtraError`.
    """
    named, options, seed = file.job.model.initial, file.simulation.model, file.simulation.seed
    if isinstance(options, ModelOptions):
        check_torch()
        if not options.module:
            return _build_from_initial(options, file)
    try:
        learner = options.build(file.folder)
    except JobFileError as exc:
        raise JobFileError(f"simulation.model: {exc}") from exc
    try:
        with randomness.use_seeds(seed):
            start = initial.resolve(named, file.folder)
        expected = make_initial(learner, seed)
    except ValueError as exc:  # `personal` names a tensor that the module does not have
        raise JobFileError(f"simulation.model: {exc}") from exc
    if difference := start.schema.difference_from(expected.schema):
        origin = getattr(options, "module", "") or f"the learner {type(learner).__name__}"
        raise JobFileError(f"model.initial = {named!r} does not fit {origin}: {difference}")
    return learner, start


def make_initial(learner: Learner | ArrayLearner, seed: int) -> model.Parameters:
    """Return the initial model of a learner. Raises `JobFileError` if it returns something else."""
    if not isinstance(learner, ArrayLearner):
        return learner.initial(seed)
    with randomness.use_seeds(seed), user_code.wrap_errors(f"{type(learner).__name__}.initial()"):
        found = learner.initial(seed)
    return initial.convert_result(found, f"{type(learner).__name__}.initial")


def check_torch() -> None:
    """Raise `MissingExtraError` without PyTorch."""
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            f"training needs PyTorch; install it with: {extras.install_command('torch')}, or use --no-training"
        ) from exc
    del torch


def _build_from_initial(options: ModelOptions, file: SimulationFile) -> tuple[Learner, model.Parameters]:
    """Build the learner whose module is the job's `model.initial`."""
    named = file.job.model.initial
    if named.endswith(".safetensors"):
        raise JobFileError(
            f"model.initial = {named!r} has tensors and no module; name the function that creates the module: "
            '[simulation.model] module = "module:function"'
        )
    learner = msgspec.structs.replace(options, module=named).build(file.folder)
    try:
        return learner, learner.initial(file.simulation.seed)
    except ValueError as exc:  # as above
        raise JobFileError(f"simulation.model: {exc}") from exc


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
    return toml.make_record(job.JobSpec, named | {"rounds": rounds, "selection": selection, "config": config} | tables)


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
