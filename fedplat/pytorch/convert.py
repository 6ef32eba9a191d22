"""Conversion between PyTorch and fedplat: parameters as tensors that share the flat buffer, and a module's state.

Needs the extra "torch".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.errors import MissingExtraError, ModelError
from fedplat.model import Carry, Parameters, read_array

try:
    import torch
except ImportError as exc:
    raise MissingExtraError(
        "PyTorch is not installed; install it with: pip install torch (or the extra: fedplat[torch])"
    ) from exc


def to_torch(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return named tensors that share the buffer of `parameters`; a read-only buffer is copied first."""
    source = parameters if parameters.buffer.flags.writeable else parameters.copy()
    return {name: as_tensor(source[name]) for name in source}


def from_state_dict(state: Mapping[str, torch.Tensor], carry: Carry = "keep") -> Parameters:
    """Copy the values of a `state_dict` into one flat buffer on the CPU.

    Raises `ModelError` for an entry that is not a dense tensor with values, or has a dtype that fedplat does not
    support.
    """
    return Parameters.from_arrays(to_arrays(state), carry)


def load_into(module: torch.nn.Module, parameters: Parameters) -> None:
    """Copy `parameters` into a module, on any device. Raises `ModelError` if names or shapes differ."""
    try:
        module.load_state_dict(to_torch(parameters), strict=True)
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
