"""The models that rounds are measured with are what their names say."""

from __future__ import annotations

import math

import models


def test_resnet50_has_the_tensors_that_torchvision_gives_it() -> None:
    tensors = models.resnet50()
    values = dict.fromkeys(("parameters", "statistics", "counters"), 0)
    for name, _, shape in tensors:
        part = name.rpartition(".")[2]
        kind = "statistics" if part.startswith("running") else "counters" if part.startswith("num") else "parameters"
        values[kind] += math.prod(shape)
    assert values == {"parameters": 25_557_032, "statistics": 53_120, "counters": 53}
    assert len(tensors) == len({tensor.name for tensor in tensors}) == 320
    assert models.size_bytes(tensors) == 4 * (25_557_032 + 53_120) + 8 * 53


def test_all_models_are_models() -> None:
    for name, tensors in models.MODELS.items():
        if models.size_bytes(tensors) <= 10**6:
            assert models.parameters(tensors).schema.size_bytes == models.size_bytes(tensors), name
    assert [models.size_bytes(models.MODELS[name]) for name in ("4KB", "1MB", "100MB")] == [4096, 10**6, 10**8]
    assert len(models.MODELS["100MB"]) == 25


def test_one_tensor_has_the_bytes_of_resnet50() -> None:
    (tensor,) = models.MODELS["one-tensor"]
    assert tensor.size_bytes == models.size_bytes(models.resnet50())
