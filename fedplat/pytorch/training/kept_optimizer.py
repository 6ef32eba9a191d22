"""The state of a client's optimizer that is kept between its trainings, as an entry of the client state.

Each tensor and number of the state of a parameter NAME is a tensor `NAME/KEY`, such as `weight/exp_avg`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training.sgd import Sgd

ENTRY = "optimizer"
"""Name of the entry of the client state."""
_VELOCITY = "momentum_buffer"


def pack_state(optimizer: torch.optim.Optimizer | Sgd, parameters: Mapping[str, nn.Parameter]) -> Parameters:
    """Return the state of an optimizer. Raises `ValueError` for state other than tensors and numbers."""
    tensors: dict[str, torch.Tensor] = {}
    for name, state in _read_state(optimizer, parameters).items():
        for key, value in state.items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor | int | float):
                raise ValueError(
                    f"keep_optimizer = true: the optimizer's state {key!r} of {name!r} is a {type(value).__name__}; "
                    "expected tensors and numbers"
                )
            tensors[f"{name}/{key}"] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return backend.store_tensors(tensors)


def restore_state(
    optimizer: torch.optim.Optimizer | Sgd, parameters: Mapping[str, nn.Parameter], stored: Parameters
) -> None:
    """Restore a state that `pack_state` returned; that of parameters which are not there any more is left out.

    Learning rates and other options stay those of the new optimizer.
    """
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for path, value in backend.to_torch(stored).items():
        name, _, key = path.rpartition("/")
        if name in parameters:
            entries.setdefault(name, {})[key] = value.clone()
    if isinstance(optimizer, Sgd):
        own = {name: state[_VELOCITY] for name, state in entries.items() if _VELOCITY in state}
        optimizer.velocities = {name: value.to(parameters[name]) for name, value in own.items()}
        return
    numbers = _numbers(optimizer, parameters)
    state = {numbers[name]: entry for name, entry in entries.items() if name in numbers}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _read_state(
    optimizer: torch.optim.Optimizer | Sgd, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Mapping[str, Any]]:
    if isinstance(optimizer, Sgd):
        return {name: {_VELOCITY: velocity} for name, velocity in optimizer.velocities.items()}
    state = cast(dict[int, Mapping[str, Any]], optimizer.state_dict()["state"])
    return {name: state[number] for name, number in _numbers(optimizer, parameters).items() if number in state}


def _numbers(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the number of each parameter in the optimizer's `state_dict`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    ordered = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {names[id(each)]: number for number, each in enumerate(ordered) if id(each) in names}
