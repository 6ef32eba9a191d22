"""The models of the benchmarks: names, dtypes and shapes of tensors, without a framework."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fedplat.model import Parameters, Schema, TensorSpec

_DTYPES = {"float32": "F32", "int64": "I64"}


class Tensor(NamedTuple):
    """One named array of a model."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of its values in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Tensors = tuple[Tensor, ...]


def size_bytes(tensors: Tensors) -> int:
    """Return the size of a model's values in bytes."""
    return sum(tensor.size_bytes for tensor in tensors)


def parameters(tensors: Tensors) -> Parameters:
    """Create the model, with zeros."""
    return Parameters.zeros(Schema(tuple(TensorSpec(name, _DTYPES[dtype], shape) for name, dtype, shape in tensors)))


def alike(total_bytes: int, count: int = 1) -> Tensors:
    """Return `count` float32 vectors of the same size, with `total_bytes` in total, rounded down."""
    return tuple(Tensor(f"layer{number}.weight", "float32", (total_bytes // 4 // count,)) for number in range(count))


def resnet50() -> Tensors:
    """Return ResNet-50's 320 tensors as in torchvision: 102 MB in 25,557,032 parameters and its batch statistics.

    He et al., Deep Residual Learning for Image Recognition (arXiv 1512.03385), table 1.
    """
    return tuple(_resnet50())


def _resnet50() -> Iterator[Tensor]:
    yield from _convolution("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from _convolution(f"{name}.conv1", f"{name}.bn1", width, inputs, 1)
            yield from _convolution(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            yield from _convolution(f"{name}.conv3", f"{name}.bn3", 4 * width, width, 1)
            if block == 0:
                yield from _convolution(f"{name}.downsample.0", f"{name}.downsample.1", 4 * width, inputs, 1)
            inputs = 4 * width
    yield Tensor("fc.weight", "float32", (1000, inputs))
    yield Tensor("fc.bias", "float32", (1000,))


def _convolution(name: str, norm: str, outputs: int, inputs: int, width: int) -> Iterator[Tensor]:
    """Return a convolution and its batch normalisation."""
    yield Tensor(f"{name}.weight", "float32", (outputs, inputs, width, width))
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield Tensor(f"{norm}.{part}", "float32", (outputs,))
    yield Tensor(f"{norm}.num_batches_tracked", "int64", ())


MODELS: dict[str, Tensors] = {
    "4KB": alike(4096),
    "1MB": alike(10**6),
    "100MB": alike(10**8, 25),
    "ResNet-50": resnet50(),
    "one-tensor": alike(size_bytes(resnet50())),
}
"""The models by their names in programs and tables; `one-tensor` has the bytes of ResNet-50."""
