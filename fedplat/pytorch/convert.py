"""Conversion between PyTorch and fedplat: parameters as tensors that share the flat buffer, and a module's state.

Needs the extra "torch".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.errors import MissingExtraError, ModelError
from fedplat.extras import install_command
from fedplat.model import Carry, Parameters, read_array

try:
    import torch
except ImportError as exc:
    raise MissingExtraError(f"PyTorch is not installed; install it with: {install_command('torch')}") from exc


def to_torch(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return named tensors that share the buffer of `parameters`; a read-only buffer is copied first."""
    source = parameters if parameters.buffer.flags.writeable else parameters.copy()
    return {name: as_tensor(source[name]) for name in source}


def from_state_dict(state: Mapping[str, torch.Tensor], carry: Carry = "keep") -> Parameters:
    """Copy the values of a `state_dict` into one flat buffer on the CPU.

    A tensor with several names, such as a tied weight, is there once, with its first name: copies would count twice in
    norms, and get different noise and rounding. `load_into` gives all names their values again. Raises `ModelError` for
    an entry that is not a dense tensor with values, or has a dtype that fedplat does not support.
    """
    return Parameters.from_arrays(to_arrays(leave_out_ties(state)), carry)


def store_tensors(tensors: Mapping[str, torch.Tensor]) -> Parameters:
    """Copy all named tensors into one flat buffer on the CPU, each name by itself. Raises the errors above."""
    return Parameters.from_arrays(to_arrays(tensors))


def leave_out_ties(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a `state_dict` without other names of the same tensor."""
    ties = find_tied_names(state)
    return {name: value for name, value in state.items() if name not in ties}


def find_tied_names(state: Mapping[str, object]) -> dict[str, str]:
    """Return the further names of tensors with several, with the first name of each."""
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.numel():
            continue
        if value.is_meta:
            continue
        place = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if (known := first.setdefault(place, name)) != name:
            ties[name] = known
    return ties


def fill_ties(values: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the values of a model for a module with `ties`, with all names of a tensor.

    Raises `ModelError` if the model has several names of one tensor, with different values.
    """
    filled = dict(values)
    for name, first in ties.items():
        if first not in filled and name in filled:
            filled[first] = filled[name]
        elif first in filled and name not in filled:
            filled[name] = filled[first]
        elif first in filled and not torch.equal(filled[first], filled[name]):
            raise ModelError(
                f"the tensors {first!r} and {name!r} of the model differ, and they are one tensor in the module; "
                f"expected a model without {name!r}, such as from_state_dict(module.state_dict()) returns"
            )
    return filled


def load_into(
    module: torch.nn.Module,
    parameters: Parameters,
    check_part: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> None:
    """Copy `parameters` into a module, on any device. Raises `ModelError` if names or shapes differ.

    With `check_part` they are those of a part of the module, which it checks.
    """
    values = fill_ties(to_torch(parameters), find_tied_names(module.state_dict()))
    if check_part is not None:
        check_part(values)
    try:
        module.load_state_dict(values, strict=check_part is None)
    except RuntimeError as exc:
        raise ModelError(f"the model does not fit the module {type(module).__name__}: {exc}") from exc


def to_arrays(state: Mapping[str, object]) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a `state_dict` as arrays on the CPU, which may share their memory. Raises `ModelError`."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):  # a module's extra state may be any object
            raise ModelError(f"entry {name!r} is a {type(value).__name__}; expected a tensor")
        arrays[name] = read_array(name, value)
    return arrays


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of an array."""
    if array.dtype.name == "bfloat16":  # torch.from_numpy does not support ml_dtypes
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
