"""Reading a model's values in blocks gives the same values as a conversion of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import ModelError
from fedplat.model import BLOCK, WINDOW, Blocks, ModelFile, Parameters, Vector, VectorBlocks, is_finite, windows

FLOATS: tuple[Any, ...] = (np.float64, np.float32, ml_dtypes.bfloat16, np.float16)
AROUND_A_BLOCK = st.sampled_from([0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7])


def joined(values: Blocks) -> Vector:
    """All blocks in one vector; each but the last must be of the full size."""
    parts = [block.copy() for block in values]
    assert all(part.size == BLOCK for part in parts[:-1])
    assert all(0 < part.size <= BLOCK and part.dtype == np.float32 for part in parts)
    return np.concatenate([np.empty(0, np.float32), *parts])


def reference(parameters: Parameters) -> Vector:
    """The floating-point tensors in the order of the file, converted by NumPy."""
    parts = [array.reshape(-1) for array in parameters.values() if array.dtype in FLOATS]
    with np.errstate(over="ignore"):
        return np.concatenate([np.empty(0, np.float32), *(part.astype(np.float32) for part in parts)])


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.tuples(AROUND_A_BLOCK, AROUND_A_BLOCK, AROUND_A_BLOCK, AROUND_A_BLOCK),
    num_integers=AROUND_A_BLOCK,
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_are_the_entries_of_every_dtype(sizes: tuple[int, ...], num_integers: int, seed: int):
    rng = np.random.default_rng(seed)
    arrays: dict[str, npt.NDArray[Any]] = {
        str(dtype): (rng.normal(size=size) * 1e3).astype(dtype) for size, dtype in zip(sizes, FLOATS, strict=True)
    }
    arrays["counters"] = rng.integers(0, 100, num_integers)
    parameters = Parameters.from_arrays(arrays)
    values = parameters.to_blocks()
    expected = reference(parameters)
    assert values.size == expected.size == sum(sizes)
    assert joined(values).tobytes() == joined(values).tobytes() == expected.tobytes()
    assert np.concatenate([expected[:0], *(part.copy() for part in windows(values))]).tobytes() == expected.tobytes()
    assert parameters.to_vector().tobytes() == expected.tobytes()
    for run in parameters.schema.segments:
        if run.dtype == "I64":
            counters = [np.empty(0, np.int64), *(part.copy() for part in parameters.read_carried(run))]
            assert np.array_equal(np.concatenate(counters), arrays["counters"])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_value_of_half_precision_is_converted_exactly(dtype: Any):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    values = joined(Parameters.from_arrays({"w": every}).to_blocks())
    expected = every.astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    numbers = ~np.isnan(expected)
    assert values[numbers].tobytes() == expected[numbers].tobytes()


def test_float32_is_not_copied():
    parameters = Parameters.from_arrays({"w": np.ones(BLOCK + 1, np.float32), "n": np.ones(3, np.int64)})
    assert all(np.shares_memory(block, parameters.buffer) for block in parameters.to_blocks())


def test_two_readers_do_not_disturb_each_other():
    parameters = Parameters.from_arrays({"w": np.arange(BLOCK + 1).astype(np.float64)})
    values = parameters.to_blocks()
    first = iter(values)
    block = next(first)
    assert joined(values).tobytes() == np.arange(BLOCK + 1).astype(np.float32).tobytes()
    assert block[1] == 1
    assert next(first).tolist() == [BLOCK]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [0, BLOCK - 1, BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found(dtype: Any, index: int, value: float):
    array = np.full(2 * BLOCK + 1, np.finfo(np.float16).max).astype(dtype)
    parameters = Parameters.from_arrays({"w": array, "n": np.array([-1])})
    assert is_finite(parameters.to_blocks())
    parameters["w"][index] = value
    assert not is_finite(parameters.to_blocks())
    assert not parameters.is_finite()


@pytest.mark.parametrize("value", [np.finfo(np.float32).max, np.finfo(np.float32).tiny, 1e-45, 0.0, -0.0])
def test_the_largest_and_smallest_numbers_are_finite(value: float):
    array = np.full(BLOCK + 3, value, np.float32)
    array[::2] *= -1
    assert is_finite(Parameters.from_arrays({"w": array}).to_blocks())
    array[:] = value  # their sum is infinite
    assert is_finite(Parameters.from_arrays({"w": array}).to_blocks())


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 2, 3), (BLOCK + 1, WINDOW - 5, 9), (3, 2 * WINDOW, WINDOW + BLOCK)])
def test_a_file_is_read_as_memory_is(tmp_path: Path, sizes: tuple[int, int, int]):
    rng = np.random.default_rng(1)
    parameters = Parameters.from_arrays(
        {
            "d": rng.normal(size=sizes[0]),
            "n": rng.integers(0, 100, sizes[2]),
            "w": rng.normal(size=sizes[1]).astype(np.float32),
            "h": rng.normal(size=sizes[2]).astype(np.float16),
        }
    )
    (tmp_path / "m").write_bytes(parameters.to_bytes())
    file = ModelFile.open(tmp_path / "m")
    assert file.schema == parameters.schema
    expected = reference(parameters).tobytes()
    assert joined(file.to_blocks()).tobytes() == joined(file.to_blocks()).tobytes() == expected
    assert b"".join(part.tobytes() for part in windows(file.to_blocks())) == expected
    for run in parameters.schema.segments:
        parts = [part.copy() for part in file.read_carried(run)]
        assert [part.tobytes() for part in parts] == [part.tobytes() for part in parameters.read_carried(run)]


@pytest.mark.parametrize("content", [b"", bytes(7), bytes(8), b"\xff" * 100])
def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(ModelError):
        ModelFile.open(tmp_path / "m")


def test_a_file_of_other_software_and_one_that_shrinks_are_refused(tmp_path: Path):
    parameters = Parameters.from_arrays({"w": np.ones(1000, np.float32)})
    content, path = parameters.to_bytes(), tmp_path / "m"
    size = int.from_bytes(content[:8], "little")
    path.write_bytes((size + 8).to_bytes(8, "little") + content[8 : 8 + size] + b" " * 8 + content[8 + size :])
    assert Parameters.open(path) == parameters
    with pytest.raises(ModelError, match="fedplat did not write the header"):
        ModelFile.open(path)
    path.write_bytes(content)
    file = ModelFile.open(path)
    path.write_bytes(content[:-4])
    with pytest.raises(ModelError, match=r"ends after \d+ bytes"):
        joined(file.to_blocks())


def test_windows_of_what_has_none_are_its_blocks():
    class Plain:
        size = WINDOW + 1

        def __iter__(self) -> Iterator[Vector]:
            return iter(VectorBlocks(np.zeros(self.size, np.float32)))

    assert [part.size for part in windows(Plain())] == [BLOCK] * 4 + [1]
    assert [part.size for part in windows(VectorBlocks(np.zeros(WINDOW + 1, np.float32)))] == [WINDOW, 1]
