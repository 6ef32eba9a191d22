"""One local step: the gradients of its batches, the algorithm's correction, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import nn

from fedplat.aggregate.local import Correction
from fedplat.pytorch.training.options import LocalOptions
from fedplat.pytorch.training.sgd import Sgd

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _Optimizer(Protocol):
    """The part of `torch.optim.Optimizer` that this module and GradScaler use."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object: ...


class _PlainSgd:
    """An optimizer that uses `Sgd`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], sgd: Sgd) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters.values())}]
        self._parameters, self._sgd = parameters, sgd

    def step(self) -> None:
        gradients = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        self._sgd.step(self._parameters, gradients)


class Stepper:
    """Trains parameters step by step: `backward` for each batch of a step, `step` at its end."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: LocalOptions,
        learning_rate: float,
        correction: Correction,
        start: Mapping[str, torch.Tensor],
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        """`start`: the initial weights, by name, of the parameters that the correction applies to."""
        device = next(iter(parameters.values())).device
        self._parameters, self._max_norm = parameters, options.max_grad_norm
        self._correction, self._start = correction, start
        self._dtype = _dtype(options, device)
        self._device_type = device.type
        self._scaler = torch.amp.GradScaler(device.type) if self._dtype == torch.float16 else None
        if make_optimizer is not None:
            self._optimizer = cast(_Optimizer, make_optimizer(parameters.values()))
        else:
            sgd = Sgd(learning_rate=learning_rate, momentum=options.momentum, weight_decay=options.weight_decay)
            self._optimizer = _PlainSgd(parameters, sgd)

    def forward(self) -> AbstractContextManager[object]:
        """Return a context in which outputs and losses are computed in the job's precision."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, self._dtype)

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Add the gradient of a batch, weighted by its share of the step's examples."""
        if share != 1.0:
            loss = loss * share
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def set_gradients(self, gradients: Iterable[torch.Tensor]) -> None:
        """Set the parameters' gradients of a step, computed elsewhere, in the order of the parameters."""
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient.to(parameter)

    def step(self) -> bool:
        """Update the parameters; return False without an update if the gradient exceeds the range of float16."""
        if self._scaler is None:
            self._correct()
            self._optimizer.step()
            done = True
        else:
            optimizer, scale = cast(torch.optim.Optimizer, self._optimizer), self._scaler.get_scale()
            self._scaler.unscale_(optimizer)
            self._correct()
            self._scaler.step(optimizer)
            self._scaler.update()
            done = self._scaler.get_scale() >= scale
        for parameter in self._parameters.values():
            parameter.grad = None
        return done

    def _correct(self) -> None:
        if self._max_norm:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._max_norm)
        pull, drift = self._correction.pull, self._correction.drift
        if not pull and not drift:
            return
        with torch.no_grad():
            for name, start in self._start.items():
                weight = self._parameters[name]
                if (slope := weight.grad) is None:
                    continue
                if pull:
                    slope.add_(weight - start, alpha=pull)
                if name in drift:
                    slope.add_(drift[name])


def _dtype(options: LocalOptions, device: torch.device) -> torch.dtype | None:
    """Return the dtype of mixed precision, or None. Raises `ValueError` if the device does not support it."""
    match options.precision, device.type:
        case "fp32", _:
            return None
        case "fp16", "cpu":
            raise ValueError('precision = "fp16": expected a GPU; on a CPU there are "fp32" and "bf16"')
        case "fp16", _:
            return torch.float16
        case "bf16", "cuda" if not torch.cuda.is_bf16_supported():
            raise ValueError('precision = "bf16": this GPU does not have it; expected "fp32" or "fp16"')
        case _:
            return torch.bfloat16
