"""The gradients of a batch, as a recorded flat list of tensor operations.

Autograd analyzes a small network again at each step, which takes longer than the arithmetic. So a batch's forward and
backward pass are recorded (`make_fx`) once the same shapes have occurred often enough, and then replayed: the same
operations in the same order give the same bits, in 35 % (logistic regression) to 75 % (McMahan's 2NN) of the time. What
cannot be recorded, such as a `forward` that depends on values, is computed by autograd each time. A recording is
compared with autograd before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from fedplat.pytorch.training.learner import Loss
from fedplat.pytorch.vectorized.layout import Tensors, UnsuitableError
from fedplat.randomness import read_states, use_seeds

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
