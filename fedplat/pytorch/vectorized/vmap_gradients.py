"""The gradients of a batch as a recorded list of tensor operations, and of many clients' batches by `torch.func.vmap`.

Autograd analyzes a small network again at each step, which takes longer than the arithmetic. So a batch's forward and
backward pass are recorded (`make_fx`) once the same shapes have occurred often enough, and then replayed: the same
operations in the same order give the same bits, in 35 % (logistic regression) to 75 % (McMahan's 2NN) of the time. What
cannot be recorded, such as a `forward` that depends on values, is computed by autograd each time. A recording is
compared with autograd before it is used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import fx, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedplat.pytorch.training.learner import Loss
from fedplat.pytorch.vectorized.layout import Tensors, UnsuitableError
from fedplat.randomness import read_states, use_seeds

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


Computation: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
"""Maps parameters, other state, inputs and targets to gradients, the loss and the outputs."""

RECORD_AFTER = 30
"""Number of batches of one shape before a recording, which takes as long as some hundred batches: 10 to 100 ms."""


class BatchResult(NamedTuple):
    """The result of a batch."""

    gradients: Tensors
    loss: torch.Tensor
    outputs: torch.Tensor


class Gradients:
    """Computes the gradients of a module in training for a batch."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        names: Sequence[str],
        num_parameters: int,
        remembers: Callable[[], bool] = lambda: False,
    ) -> None:
        """`names` are those of all the module's tensors, starting with the trained parameters.

        `remembers` returns whether the module has changed in other ways, so that its computations cannot be recorded.
        """
        prepare()
        self._module, self._loss = module, loss
        self._names, self._num_parameters = list(names), num_parameters
        self._recordings: dict[tuple[torch.Size, torch.Size], Computation] = {}
        self._times: dict[tuple[torch.Size, torch.Size], int] = {}
        self.is_random = True
        """True if the computation may draw random numbers; True until a recording shows that it does not."""
        self._is_recordable, self._remembers = True, remembers

    def __call__(self, tensors: Tensors, inputs: torch.Tensor, targets: torch.Tensor) -> BatchResult:
        """Return the gradients of a batch's loss; `tensors` are in the order of `names`.

        The tensors that are not parameters may change in place.
        """
        shapes = (inputs.shape, targets.shape)
        computation = self._recordings.get(shapes)
        if computation is None:
            computation = self._choose(shapes, tensors, inputs, targets)
        with torch.no_grad():
            *gradients, loss, outputs = computation(*tensors, inputs, targets)
        return BatchResult(gradients, loss, outputs)

    def _choose(
        self, shapes: tuple[torch.Size, torch.Size], tensors: Tensors, inputs: torch.Tensor, targets: torch.Tensor
    ) -> Computation:
        self._times[shapes] = times = self._times.get(shapes, 0) + 1
        if times < RECORD_AFTER:
            return self._by_autograd
        recording = None if self._remembers() else trace_graph(self._by_autograd, (*tensors, inputs, targets))
        if recording is None:
            self._recordings[shapes], self._is_recordable = self._by_autograd, False
        else:
            self._recordings[shapes] = recording.forward
        self.is_random = not self._is_recordable or (recording is not None and draws(recording))
        return self._recordings[shapes]

    def _by_autograd(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, targets = tensors[-2:]
        parameters = [tensor.detach().requires_grad_() for tensor in tensors[: self._num_parameters]]
        named = dict(zip(self._names, (*parameters, *tensors[self._num_parameters : -2]), strict=True))
        with torch.enable_grad():
            outputs = functional_call(self._module, named, (inputs,))
            if not isinstance(outputs, torch.Tensor):
                raise UnsuitableError(f"the module returns a {type(outputs).__name__}; expected a tensor")
            loss = self._loss(outputs, targets)
            optional = cast(list[torch.Tensor | None], torch.autograd.grad(loss, parameters, allow_unused=True))
        gradients = [_densify(gradient) for gradient in optional if gradient is not None]
        if len(gradients) < len(optional):
            raise UnsuitableError("the loss does not depend on every parameter of the module")
        return (*gradients, loss.detach(), outputs.detach())


def _densify(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an `nn.Embedding(sparse=True)` as that of a dense one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


@functools.cache
def prepare() -> None:
    """Import PyTorch's modules for recording, which takes a second: once before workers start, rather than in each."""
    make_fx(torch.neg)(torch.zeros(1))


def trace_graph(computation: Computation, tensors: Tensors) -> fx.GraphModule | None:
    """Record a computation's operations for tensors of these shapes.

    Returns None if the operations depend on the tensors' values or on anything besides these tensors, such as numbers
    that Python or NumPy draw.
    """
    copies = [_clone_with_strides(tensor) for tensor in tensors]
    with use_seeds(0):  # the numbers that a recording draws are not those of the training
        before = read_states()
        try:
            graph_module = make_fx(computation)(*copies)
        except RuntimeError:  # PyTorch raises it when a computation reads a value during the recording
            return None
        if read_states() != before:
            return None
    graph = graph_module.graph
    graph.set_codegen(CodeGen())  # plain arguments instead of pytrees
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph_module.recompile()
    try:
        return graph_module if _agree(graph_module.forward, computation, tensors) else None
    except RuntimeError:  # an operation that cannot be called as it was recorded, such as that of an LSTM
        return None


def draws(recording: fx.GraphModule) -> bool:
    """Return whether a recording draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in recording.graph.nodes)


def _agree(one: Computation, other: Computation, tensors: Tensors) -> bool:
    results: list[list[torch.Tensor]] = []
    for computation in (one, other):
        copies = [_clone_with_strides(tensor) for tensor in tensors]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            results.append([*computation(*copies), *copies])
    return all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def _clone_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, since a recording depends on them."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
