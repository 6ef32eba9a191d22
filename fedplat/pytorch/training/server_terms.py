"""Adapters whose products a rule of the server aggregates: the server's own term, and factors of a smaller rank.

FedEx-LoRA and FLoRA send a model with the tensors of `fedplat.aggregate.factors`. Their values are added to the outputs
of the adapted layers, in float32 and apart from the weights: in a base of bfloat16 or quantised weights most of them
would be rounded away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy.typing as npt
import torch
from torch import nn

from fedplat.aggregate import factors
from fedplat.errors import ModelError
from fedplat.model import SERVER

Tensors = Mapping[str, torch.Tensor]


class ServerTerms:
    """The terms s · lora_BA of a module's adapted layers, which follow from the model that was loaded last."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._terms: dict[str, tuple[str, torch.Tensor]] = {}
        self._hooked = set[str]()

    def load(self, values: Tensors, device: torch.device) -> None:
        """Take the terms of a model; none if it has no tensors of the server. Raises `ModelError` for a misfit."""
        self._terms.clear()
        own = {name: value for name, value in values.items() if name.startswith(SERVER)}
        if not own:
            return
        scaling = own.pop(factors.SCALING, None)
        if scaling is None:
            raise ModelError(f"the job's model has {min(own)!r}, but no {factors.SCALING!r}; expected both")
        for name, value in own.items():
            path, adapter = factors.split_product_name(name)
            layer = self._find_layer(name, path, value)
            _check_scaling(layer, path, adapter, float(scaling))
            if value.any():  # the first rounds have none, and it would cost as much as the layer itself
                self._terms[path] = adapter, float(scaling) * value.to(device, torch.float32)
            if path not in self._hooked:
                self._hooked.add(path)
                self._add_hook(layer, path)

    def fit_ranks(self, values: Tensors, names: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """Return the values, of which factors of a larger rank than the module's are cut to that of the module.

        `names` are the shapes of the module's tensors. The columns of B that are cut off have to be 0, since the client
        would train without their part of the product. Raises `ModelError` otherwise.
        """
        fitted = dict(values)
        for product in (name for name in values if name.startswith(SERVER) and name != factors.SCALING):
            a, b = factors.factor_names(product)
            if not {a, b} <= names.keys() or not {a, b} <= values.keys():
                continue
            rank, full = names[a][0], values[a].shape[0]
            if rank >= full:
                continue
            if values[b][:, rank:].any():
                raise ModelError(
                    f"the tensor {b!r} has the rank {full} in the job's model, all of it in use, and the module has "
                    f'{rank}; expected adapters of the rank {full}, or a job with the rule "flora"'
                )
            fitted |= {a: values[a][:rank], b: values[b][:, :rank]}
        return fitted

    def _find_layer(self, name: str, path: str, value: torch.Tensor) -> nn.Module:
        try:
            layer = self._module.get_submodule(path)
        except AttributeError:
            raise ModelError(f"the job's model has {name!r}, and the module has no layer {path!r}") from None
        base: Any = getattr(layer, "get_base_layer", lambda: layer)()
        if not isinstance(base, nn.Linear) and type(base).__name__ != "Conv1D":
            raise ModelError(f"the layer {path!r} adapts a {type(base).__name__}; {name!r} is for linear layers only")
        shape = [getattr(layer, "out_features", None), getattr(layer, "in_features", None)]
        if shape != list(value.shape):
            raise ModelError(f"the tensor {name!r} is {list(value.shape)}; the layer {path!r} needs {shape}")
        return layer

    def _add_hook(self, layer: nn.Module, path: str) -> None:
        terms = self._terms

        def add_term(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor | None:
            adapter, term = terms.get(path, ("", None))
            if term is None or not _is_active(module, adapter):
                return None
            inputs: torch.Tensor = args[0] if args else kwargs["x"]
            with torch.autocast(inputs.device.type, enabled=False):
                wide = torch.promote_types(output.dtype, torch.float32)
                added = nn.functional.linear(inputs.to(wide), term.to(wide))
                return (output.to(wide) + added).to(output.dtype)

        layer.register_forward_hook(add_term, with_kwargs=True)


def widen_ranks(
    trained: Mapping[str, npt.NDArray[Any]], received: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """Return trained arrays, of which factors of a smaller rank have the received values in their other entries."""
    widened = dict(trained)
    for name, array in trained.items():
        if array.shape != received[name].shape:
            widened[name] = received[name].copy()
            widened[name][tuple(map(slice, array.shape))] = array
    return widened


def _is_active(layer: nn.Module, adapter: str) -> bool:
    """Return whether the adapter takes part in the output: it does not in the reference model of DPO, for instance."""
    if getattr(layer, "disable_adapters", False):
        return False
    active = getattr(layer, "active_adapters", None)
    return not adapter or active is None or adapter in active


def _check_scaling(layer: nn.Module, path: str, adapter: str, expected: float) -> None:
    found: Any = getattr(layer, "scaling", None)
    if isinstance(found, Mapping):
        found = cast(Mapping[str, Any], found).get(adapter)
    if not isinstance(found, float | int) or not math.isclose(found, expected, rel_tol=1e-6):
        raise ModelError(
            f"the adapter of the layer {path!r} has the scaling {found}, and the job states {expected:g} "
            "(aggregation.scaling); expected lora_alpha / r = scaling, the same for all clients and layers"
        )
