"""The learner of a simulation file, and the initial model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fedplat import extras, initial, model, randomness
from fedplat.config import user_code
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
