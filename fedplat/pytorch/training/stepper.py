"""One local step: the gradients of its batches, the algorithm's correction, and the optimizer with its kept state.

Each tensor and number of the state of a parameter NAME is a tensor `NAME/KEY`, such as `weight/exp_avg`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import nn

from fedplat import local_options, model
from fedplat.aggregate.local import Arrays, Correction, LossFunction
from fedplat.errors import ModelError
from fedplat.pytorch import convert as backend

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ClipGradients: TypeAlias = Callable[[Iterable[nn.Parameter], float], object]
"""Scales the gradients of parameters so that their total L2 norm is at most a number."""


class _Optimizer(Protocol):
    """The part of `torch.optim.Optimizer` that this module and GradScaler use."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object: ...


class _PlainSgd:
    """An optimizer that uses `Sgd`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], sgd: Sgd) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters.values())}]
        self._parameters, self.sgd = parameters, sgd

    def step(self) -> None:
        gradients = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        self.sgd.step(self._parameters, gradients)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepAlgorithm:
    """What a local algorithm computes in each step: the loss, the offsets and the correction of the gradients.

    `start` are the initial weights, by name, of the parameters that the correction applies to. The weights lose
    `exchange` with the first step. `nesterov` is for the momentum of SGD.
    """

    loss: LossFunction
    correction: Correction = dataclasses.field(default_factory=Correction)
    start: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict[str, torch.Tensor])
    perturb: Callable[[Arrays], Arrays] | None = None
    exchange: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict[str, torch.Tensor])
    nesterov: bool = False


class Stepper:
    """Trains parameters step by step: `backward` for each batch of a step, `step` at its end."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: local_options.LocalOptions,
        learning_rate: float,
        algorithm: StepAlgorithm,
        make_optimizer: MakeOptimizer | None = None,
        clip: ClipGradients = nn.utils.clip_grad_norm_,
    ) -> None:
        if not parameters:
            raise ModelError("the module has no parameters that are trained; expected one with requires_grad = True")
        device = next(iter(parameters.values())).device
        self._parameters, self._max_norm = parameters, options.max_grad_norm
        self._algorithm, self._clip = algorithm, clip
        self._dtype = _dtype(options, device)
        self._device_type = device.type
        self._scaler = torch.amp.GradScaler(device.type) if self._dtype == torch.float16 else None
        if make_optimizer is not None:
            self._optimizer = _check_optimizer(make_optimizer(parameters.values()))
            if len({type(each) for each in parameters.values()}) > 1:
                _update_singly(self._optimizer)
        else:
            sgd = Sgd(
                learning_rate=learning_rate,
                momentum=options.momentum,
                weight_decay=options.weight_decay,
                nesterov=algorithm.nesterov and options.momentum > 0.0,
            )
            self._optimizer = _PlainSgd(parameters, sgd)
        self._exchange = algorithm.exchange
        # The gradients of nn.Embedding(sparse=True), for which a momentum and a norm are not defined.
        self._needs_dense = make_optimizer is None or options.max_grad_norm > 0.0

    @property
    def perturbs(self) -> bool:
        """True if a step uses the gradients at other weights."""
        return self._algorithm.perturb is not None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward passes in the job's precision."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device_type, self._dtype)

    def forward(
        self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a batch and the module's outputs, in the job's precision."""
        with self.autocast():
            return self._algorithm.loss(module, inputs, targets)

    @contextmanager
    def offset_weights(self, module: nn.Module) -> Generator[None]:
        """Add the algorithm's offsets to the weights, and remove the gradients, for a block that computes them again.

        Weights and buffers have their values again at the end of the block.
        """
        assert self._algorithm.perturb is not None
        trained = {name: weight for name, weight in self._parameters.items() if weight.grad is not None}
        offsets = self._algorithm.perturb({name: weight.grad for name, weight in trained.items()})
        changed = [*(trained[name] for name in offsets), *module.buffers()]
        before = [value.detach().clone() for value in changed]
        with torch.no_grad():
            for name, offset in offsets.items():
                trained[name].add_(offset)
        for weight in trained.values():
            weight.grad = None
        yield
        with torch.no_grad():
            for value, old in zip(changed, before, strict=True):
                value.copy_(old)

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Add the gradient of a batch, weighted by its share of the step's examples."""
        self.weigh(loss, share).backward()

    def weigh(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        """Return the loss whose gradient `backward` adds."""
        if share != 1.0:
            loss = loss * share
        return loss if self._scaler is None else self._scaler.scale(loss)

    def set_gradients(self, gradients: Iterable[torch.Tensor]) -> None:
        """Set the parameters' gradients of a step, computed elsewhere, in the order of the parameters."""
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient.to(parameter)

    def step(self) -> bool:
        """Update the parameters; return False without an update if the gradient exceeds the range of float16."""
        if self._needs_dense:
            for parameter in self._parameters.values():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
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
        with torch.no_grad():
            for name, part in self._exchange.items():
                self._parameters[name].sub_(part)
        self._exchange = {}
        return done

    def restore(self, stored: model.Parameters | None) -> None:
        """Continue with the state of an optimizer that `pack` returned, before the first step."""
        if stored is not None:
            restore_state(self._state_owner, self._parameters, stored)
        if isinstance(self._optimizer, _PlainSgd):
            self._optimizer.sgd.look_ahead(self._parameters)

    def pack(self) -> model.Parameters:
        """Return the state of the optimizer, after the last step. Raises `ValueError` if it cannot be stored."""
        if isinstance(self._optimizer, _PlainSgd):
            self._optimizer.sgd.look_ahead(self._parameters, -1.0)
        return pack_state(self._state_owner, self._parameters)

    @property
    def _state_owner(self) -> torch.optim.Optimizer | Sgd:
        if isinstance(self._optimizer, _PlainSgd):
            return self._optimizer.sgd
        return cast(torch.optim.Optimizer, self._optimizer)

    def _correct(self) -> None:
        if self._max_norm:
            self._clip(self._parameters.values(), self._max_norm)
        pull, drift = self._algorithm.correction.pull, self._algorithm.correction.drift
        if not pull and not drift:
            return
        with torch.no_grad():
            for name, start in self._algorithm.start.items():
                weight = self._parameters[name]
                if (slope := weight.grad) is None:
                    continue
                if pull:
                    slope.add_(weight - start, alpha=pull)
                if name in drift:
                    slope.add_(drift[name])


def _check_optimizer(optimizer: object) -> _Optimizer:
    """Return what the owner's function has made. Raises `ModelError` unless it can make steps."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise ModelError(
            f"the function of the optimizer returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            "LBFGS computes the loss several times in a step, from a closure; expected an optimizer that takes the "
            "gradients of a batch, such as SGD or Adam"
        )
    return cast(_Optimizer, optimizer)


def _update_singly(optimizer: _Optimizer) -> None:
    """Let an optimizer update one parameter at a time.

    On a GPU it would update many with one kernel, which takes no mixture of whole tensors and parts of divided ones.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None:  # the default
            group["foreach"] = False


def _dtype(options: local_options.LocalOptions, device: torch.device) -> torch.dtype | None:
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


class Sgd:
    """SGD with momentum, also Nesterov's, and weight decay: the same numbers as `torch.optim.SGD`.

    PyTorch's class takes two seconds to import at its first use, and its construction takes as long as a step, which
    matters for short trainings.
    """

    def __init__(
        self, *, learning_rate: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
    ) -> None:
        self._learning_rate, self._momentum, self._weight_decay = learning_rate, momentum, weight_decay
        self._nesterov = nesterov
        self.velocities: dict[str, torch.Tensor] = {}
        """The momentum of each weight, in units of gradients: -1 / learning_rate times the movement."""

    def step(self, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        """Update, in place, the weights that have a gradient. The gradients may be changed."""
        with torch.no_grad():
            for name, slope in gradients.items():
                weight = weights[name]
                if self._weight_decay:
                    slope.add_(weight, alpha=self._weight_decay)
                weight.add_(self._apply_momentum(name, slope), alpha=-self._learning_rate)

    def look_ahead(self, weights: Mapping[str, torch.Tensor], sign: float = 1.0) -> None:
        """Move weights x to x + δ v, where Nesterov's momentum computes gradients; with the sign -1, back to x.

        With u = x + δ v, the steps v ← δ v - η g(u), x ← x + v are those of PyTorch on u. Without it nothing changes.
        """
        if not self._nesterov:
            return
        with torch.no_grad():
            for name, velocity in self.velocities.items():
                weights[name].add_(velocity, alpha=-sign * self._momentum * self._learning_rate)

    def _apply_momentum(self, name: str, slope: torch.Tensor) -> torch.Tensor:
        if not self._momentum:
            return slope
        velocity = self.velocities.get(name)
        if velocity is None:
            self.velocities[name] = velocity = slope.clone()
        else:
            velocity.mul_(self._momentum).add_(slope)
        return slope.add_(velocity, alpha=self._momentum) if self._nesterov else velocity


ENTRY = "optimizer"
"""Name of the entry of the client state."""
_VELOCITY = "momentum_buffer"


def pack_state(optimizer: torch.optim.Optimizer | Sgd, parameters: Mapping[str, nn.Parameter]) -> model.Parameters:
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
    optimizer: torch.optim.Optimizer | Sgd, parameters: Mapping[str, nn.Parameter], stored: model.Parameters
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
