"""The gradients of many clients' batches at once, by `torch.func.vmap`, and recorded as CUDA graphs on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedplat.pytorch.training.learner import Loss
from fedplat.pytorch.vectorized.gradients import RECORD_AFTER, Computation, trace_graph
from fedplat.pytorch.vectorized.layout import Tensors, UnsuitableError
from fedplat.randomness import read_states

_TRIALS = 2
"""Timed runs of each implementation of convolutions, before one is chosen."""


class Stack(NamedTuple):
    """One batch for each client: inputs [clients, batch, ...], targets, and the number of examples of each.

    The rest is padding. `sizes` is None without padding.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    sizes: torch.Tensor | None


class StackResult(NamedTuple):
    """The result of a stack of batches: the gradients, the loss and the outputs of each client."""

    gradients: Tensors
    losses: torch.Tensor
    outputs: torch.Tensor


class StackedGradients:
    """Computes gradients of a module in training, for stacked weights.

    The module must not change its own state, nor draw random numbers.
    """

    def __init__(self, module: nn.Module, loss: Loss, names: Sequence[str], state: Mapping[str, torch.Tensor]) -> None:
        """`names` are those of the trained parameters, `state` contains the module's other tensors."""
        self._module, self._loss, self._names, self._state = module, loss, list(names), dict(state)
        self._has_convolutions = any(isinstance(part, nn.Conv2d) for part in module.modules())
        self._unfolds: dict[tuple[object, ...], bool] = {}
        self._computations: dict[tuple[object, ...], Computation] = {}
        self._times: dict[tuple[object, ...], int] = {}
        self._is_mean = False

    def __call__(self, parameters: Sequence[torch.Tensor], stack: Stack) -> StackResult:
        """Return the gradients of the clients' losses. Raises `UnsuitableError` if `vmap` rejects the module."""
        tensors = (*parameters, *(part for part in stack if part is not None))
        key = (stack.inputs.shape, stack.targets.shape, stack.sizes is None)
        with torch.no_grad():
            computation, before = self._computations.get(key), None
            if computation is None:
                computation, before = self._choose(key, tensors, stack), read_states()
            try:
                *gradients, losses, outputs = computation(*tensors)
            except RuntimeError as exc:
                raise UnsuitableError(f"vmap does not support it: {str(exc).splitlines()[0]}") from exc
            if before is not None and read_states() != before:
                raise UnsuitableError("it draws random numbers of Python or NumPy, which are not those of one client")
        return StackResult(gradients, losses, outputs)

    def _choose(self, key: tuple[object, ...], tensors: Tensors, stack: Stack) -> Computation:
        self._times[key] = times = self._times.get(key, 0) + 1
        if stack.sizes is not None and not self._is_mean:
            self._check_mean(tensors, stack)
        computation = self._computation(self._is_better_unfolded(key, tensors))
        if times < RECORD_AFTER:
            return computation
        recording = trace_graph(computation, tensors)
        self._computations[key] = computation if recording is None else capture_graph(recording.forward, tensors)
        return self._computations[key]

    def _computation(self, unfold: bool) -> Computation:
        count = len(self._names)

        def loss_of(
            parameters: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor, *size: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            named = {**dict(zip(self._names, parameters, strict=True)), **self._state}
            with _UnfoldedConvolutions() if unfold else nullcontext():
                outputs = functional_call(self._module, named, (inputs,))
            if not isinstance(outputs, torch.Tensor):
                raise UnsuitableError(f"the module returns a {type(outputs).__name__}; expected a tensor")
            if not size:
                return self._loss(outputs, targets), outputs
            return _masked_mean(self._losses_per_example(outputs, targets), size[0]), outputs

        def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            batched = vmap(grad_and_value(loss_of, has_aux=True), randomness="error")
            gradients, (losses, outputs) = batched(list(tensors[:count]), *tensors[count:])
            return (*gradients, losses, outputs)

        return compute

    def _losses_per_example(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        def compute_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self._loss(output.unsqueeze(0), target.unsqueeze(0))

        return vmap(compute_one)(outputs, targets)

    def _check_mean(self, tensors: Tensors, stack: Stack) -> None:
        """Raise `UnsuitableError` unless the loss is a mean over the batch: padding is excluded from the mean."""
        assert stack.sizes is not None
        size, parameters = int(stack.sizes[0]), [tensor[0] for tensor in tensors[: len(self._names)]]
        named = {**dict(zip(self._names, parameters, strict=True)), **self._state}
        outputs, targets = functional_call(self._module, named, (stack.inputs[0, :size],)), stack.targets[0, :size]
        whole, mean = self._loss(outputs, targets), self._losses_per_example(outputs, targets).mean()
        if not torch.allclose(whole, mean, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise UnsuitableError("the loss is not a mean over examples, and so is undefined for a padded batch")
        self._is_mean = size > 1

    def _is_better_unfolded(self, key: tuple[object, ...], tensors: Tensors) -> bool:
        """Return whether convolutions are faster as matrix products than grouped; measured once per shape."""
        if not self._has_convolutions:
            return False
        if key not in self._unfolds:
            seconds = {unfold: _seconds(self._computation(unfold), tensors) for unfold in (False, True)}
            self._unfolds[key] = seconds[True] < seconds[False]
        return self._unfolds[key]


class _UnfoldedConvolutions(TorchFunctionMode):
    """Within the block, a two-dimensional convolution is one matrix product per client."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.conv2d:
            return _unfold(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _unfold(  # noqa: PLR0913 -- the parameters of `torch.conv2d`
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    if groups != 1 or isinstance(padding, str):
        return torch.conv2d(inputs, weight, bias, stride, padding, dilation, groups)
    columns = functional.unfold(inputs, weight.shape[2:], dilation, padding, stride)  # [batch, entries, positions]
    batch, entries, positions = columns.shape
    product = weight.reshape(len(weight), entries) @ columns.transpose(0, 1).reshape(entries, batch * positions)
    if bias is not None:
        product = product + bias.unsqueeze(1)
    height, width = _sides(inputs.shape[2:], weight.shape[2:], _pair(stride), _pair(padding), _pair(dilation))
    return product.reshape(len(weight), batch, height, width).transpose(0, 1)


def _sides(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    numbers = zip(size, kernel, stride, padding, dilation, strict=True)
    return [(side + 2 * pad - step * (width - 1) - 1) // jump + 1 for side, width, jump, pad, step in numbers]


def _pair(value: Any) -> Sequence[int]:
    return (value, value) if isinstance(value, int) else value


def _masked_mean(losses: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Return the mean of the first `size` losses; 0 if `size` is 0."""
    mask = torch.arange(len(losses), device=losses.device) < size
    return (losses * mask).sum() / size.clamp(min=1)


def _seconds(computation: Computation, tensors: Tensors) -> float:
    best = float("inf")
    for _ in range(1 + _TRIALS):
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        computation(*tensors)
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


_WARM_UP = 3


def capture_graph(computation: Computation, tensors: Tensors) -> Computation:
    """Return the computation as a CUDA graph for tensors of these shapes; unchanged if they are not on a GPU.

    The next run of a graph overwrites its result.
    """
    return _Graph(computation, tensors) if tensors[0].is_cuda else computation


class _Graph:
    """A captured computation. Uses tensors in place if their addresses are those of the capture; copies the others."""

    def __init__(self, computation: Computation, tensors: Tensors) -> None:
        self._inputs = list(tensors)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries choose their kernels and allocate at the first runs
            for _ in range(_WARM_UP):
                computation(*tensors)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = computation(*self._inputs)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for own, tensor in zip(self._inputs, tensors, strict=True):
            if own.data_ptr() != tensor.data_ptr():
                own.copy_(tensor)
        self._graph.replay()
        return self._outputs
