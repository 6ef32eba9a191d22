"""Recorded computations as CUDA graphs: a GPU runs all their kernels with one launch from the CPU."""

from __future__ import annotations

import torch

from fedplat.pytorch.vectorized.foreach import Tensors
from fedplat.pytorch.vectorized.gradients import Computation

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
