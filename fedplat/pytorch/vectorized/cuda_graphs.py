"""Recorded computations as CUDA graphs: a GPU runs all their kernels without hearing of each from the CPU."""

from __future__ import annotations

import torch

from fedplat.pytorch.vectorized.foreach import Tensors
from fedplat.pytorch.vectorized.gradients import Computation

_WARM_UP = 3


def capture_graph(computation: Computation, tensors: Tensors) -> Computation:
    """The same computation for tensors of these shapes as a CUDA graph; as it is, where they are not on a GPU.

    What it returns is overwritten by its next run.
    """
    return _Graph(computation, tensors) if tensors[0].is_cuda else computation


class _Graph:
    """A captured computation. Tensors that lie where those at its capture lay are used in place; others are copied."""

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
        for own, given in zip(self._inputs, tensors, strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        self._graph.replay()
        return self._outputs
