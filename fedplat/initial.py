"""The model that a job starts from: `[model] initial` of a job file, resolved where the job is submitted.

It is a `.safetensors` file or a function (`fedplat/config/user_code.py`), relative to the job file. The function may
return `Parameters`, a mapping of NumPy arrays, a torch `state_dict` or an `nn.Module`; torch is imported here only if
the function's own code has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedplat.config import plugins, user_code
from fedplat.errors import JobFileError, ModelError, UserCodeError
from fedplat.job import JobSpec, build_rule
from fedplat.model import Parameters
from fedplat.rounds.protocols.base import find_training


def of_job(spec: JobSpec, folder: Path) -> Parameters:
    """Return the model that a job starts from, with the tensors that its rule adds. Raises `JobFileError`.

    Nothing is added if a plugin of the job is absent. A job of some kinds has its first model itself.
    """
    if (first := find_training(spec).first_model(spec)) is not None:
        return first
    parameters = resolve(spec.model.initial, folder)
    if plugins.has_absent(spec):
        return parameters  # the server checks the model
    try:
        return build_rule(spec).requirements.extend(parameters)
    except ModelError as exc:
        raise JobFileError(f"model.initial = {spec.model.initial!r}: {exc}") from exc


def resolve(initial: str, folder: Path) -> Parameters:
    """Return the parameters that `initial` names, relative to `folder`.

    Runs the code of the job's author, with `folder` first on `sys.path` meanwhile. Raises `JobFileError` if the model
    has no tensors or is not finite, or if the function fails.
    """
    try:
        if initial.endswith(".safetensors"):
            parameters = _from_file(folder / initial)
        else:
            parameters = convert_result(user_code.call(initial, folder), user_code.split(initial)[1])
        if not parameters:
            raise JobFileError("the model has no tensors; expected at least one")
        if not parameters.is_finite():
            raise JobFileError("the model holds NaN or infinite values; expected finite ones")
    except (JobFileError, ModelError, UserCodeError) as exc:
        raise JobFileError(f"model.initial = {initial!r}: {exc}") from exc
    return parameters


def _from_file(path: Path) -> Parameters:
    try:
        return Parameters.open(path)
    except OSError as exc:
        raise JobFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def convert_result(value: object, function_name: str) -> Parameters:
    """Convert the return value of a user's function to `Parameters`. Raises `JobFileError`."""
    if isinstance(value, Parameters):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        value = cast(Any, value).state_dict()
    if not isinstance(value, Mapping):
        raise JobFileError(
            f"{function_name}() returned a {type(value).__name__}; "
            "expected Parameters, a mapping of NumPy arrays, a state_dict or an nn.Module"
        )
    tensors = cast(Mapping[Any, Any], value)
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise JobFileError(f"{function_name}() returned the key {name!r}; expected a tensor's name")
        if not isinstance(tensor, np.ndarray) and not (torch is not None and isinstance(tensor, torch.Tensor)):
            raise JobFileError(
                f"{function_name}() returned a {type(cast(object, tensor)).__name__} for {name!r}; "
                "expected a NumPy array or a torch tensor"
            )
    if torch is not None and any(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        from fedplat.pytorch.convert import leave_out_ties

        tensors = leave_out_ties(tensors)
    return Parameters.from_arrays({name: _array(name, tensor) for name, tensor in tensors.items()})


def _array(name: str, tensor: Any) -> np.ndarray[Any, Any]:
    if isinstance(tensor, np.ndarray):
        return tensor
    from fedplat.pytorch import convert as backend

    try:
        return backend.from_state_dict({name: tensor})[name]
    except (RuntimeError, TypeError) as exc:  # a sparse or meta tensor, a dtype that NumPy does not have
        raise JobFileError(f"tensor {name!r} ({tensor.dtype}) cannot be stored: {exc}") from exc
