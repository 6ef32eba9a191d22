"""The norm of a file that arrives in pieces has the bits of the norm of the whole file, wherever it is cut."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.model import BLOCK, Parameters
from fedplat.model.blocks import l2_norm
from fedplat.model.running_norm import RunningNorm

RNG = np.random.default_rng(7)
CUTS = (1, 3, 7, 1000, 4 * BLOCK, 4 * BLOCK + 1, 2**20)


def normal(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return RNG.standard_normal(size).astype(dtype)


MODELS: Mapping[str, Mapping[str, npt.NDArray[Any]]] = {
    "one run": {"a": normal(BLOCK + 5, np.float32), "b": normal(BLOCK, np.float32)},
    "whole blocks": {"a": normal(2 * BLOCK, np.float32)},
    "mixed": {
        "wide": normal(BLOCK // 2, np.float64) * 1e20,
        "counter": np.arange(1001),
        "single": normal(BLOCK, np.float32),
        "half": normal(BLOCK + 3, ml_dtypes.bfloat16),
        "half too": normal(5, np.float16),
        "flags": np.ones(7, np.int8),
    },
    "small": {"a": np.array([3.0, 4.0], np.float32), "empty": np.zeros(0, np.float32)},
    "no floats": {"counter": np.arange(5)},
}


def feed(norm: RunningNorm, data: bytes, cuts: random.Random, pauses: float = 0.0) -> None:
    """Add a file in random pieces, from where the norm is. It is paused now and then."""
    while norm.position < len(data):
        norm.update(memoryview(data)[norm.position : norm.position + cuts.choice(CUTS)])
        if cuts.random() < pauses:
            norm.pause()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pauses", [0.0, 0.1])
def test_the_bits_do_not_depend_on_the_cuts(name: str, pauses: float) -> None:
    model = Parameters.from_arrays(MODELS[name])
    expected = l2_norm(model.to_blocks())
    for seed in range(4):
        norm = RunningNorm(model.schema)
        feed(norm, model.to_bytes(), random.Random(seed), pauses)
        found = norm.find(model.schema)
        assert found is not None
        assert found.hex() == expected.hex(), f"seed {seed}"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_norm_is_finite_only_if_all_entries_are(value: float) -> None:
    values = np.ones(BLOCK + 2)
    values[BLOCK] = value
    model = Parameters.from_arrays({"a": values})
    norm = RunningNorm(model.schema)
    feed(norm, model.to_bytes(), random.Random(0))
    found = norm.find(model.schema)
    assert found is not None
    assert not math.isfinite(found)


def test_only_a_whole_file_of_the_schema_has_a_norm() -> None:
    model, other = (Parameters.from_arrays({name: np.ones(3, np.float32)}) for name in ("a", "b"))
    data, norm = model.to_bytes(), RunningNorm(model.schema)
    norm.update(data[:-1])
    assert norm.find(model.schema) is None
    norm.update(data[-1:])
    assert norm.find(model.schema) == math.sqrt(3.0)
    assert norm.find(other.schema) is None
    norm.update(b"x")
    assert norm.find(model.schema) is None, "there are more bytes than the file has"
    norm.restart()
    feed(norm, other.to_bytes(), random.Random(0))
    assert norm.find(model.schema) is None
    assert norm.find(other.schema) is None, "it was measured as a file of another schema"


def test_a_pause_needs_no_memory_and_goes_back_by_less_than_a_block() -> None:
    model = Parameters.from_arrays({"a": np.ones(3 * BLOCK, np.float32)})
    data, norm = model.to_bytes(), RunningNorm(model.schema)
    assert norm.memory_bytes == 8 * BLOCK
    end = len(model.schema.header) + 4 * (2 * BLOCK - 1)
    norm.update(data[:end])
    norm.pause()
    assert norm.position == len(model.schema.header) + 4 * BLOCK
