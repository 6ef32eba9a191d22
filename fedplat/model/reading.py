"""Reading what someone's code gives as the values of a tensor: an array, a tensor of PyTorch, or what is like one."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fedplat import texts
from fedplat.errors import ModelError


def read_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return the values of a tensor as an array on the CPU, which may share their memory.

    A tensor of PyTorch may require gradients, be on any device, and be of bfloat16. Raises `ModelError`, whatever the
    type of the value raises.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise ModelError(f"tensor {name!r} is a masked array; expected one without a mask, such as its filled()")
    torch = sys.modules.get("torch")  # else there are no tensors of it
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    try:
        return _read_tensor(torch, value) if is_tensor else np.asarray(value)
    except Exception as exc:  # any type may raise anything
        kind = value.dtype if is_tensor else type(value).__name__
        raise ModelError(f"tensor {name!r} ({kind}) has no dense values in NumPy: {texts.describe(exc)}") from exc


def _read_tensor(torch: Any, tensor: Any) -> npt.NDArray[Any]:
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()
