"""The flat model: layout, views and arithmetic. The file format has its own page, test_model_file.py."""

from __future__ import annotations

import doctest
import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import fedplat.model
from fedplat.errors import ModelError
from fedplat.model import DTYPES, FLOATING, Carry, Parameters, Schema, TensorSpec
from fedplat.model import schema as schema_module

Arrays = dict[str, npt.NDArray[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)


def mixed(seed: int = 0) -> Arrays:
    """A model whose names are given in an order that is not canonical."""
    rng = np.random.default_rng(seed)
    return {
        "flag": np.array([True, False, True]),
        "half": rng.normal(size=3).astype(np.float16),
        "first": rng.normal(size=(2, 3)).astype(np.float32),
        "count": np.array(seed, np.int64),
        "wide": rng.normal(size=2),
        "bf16": rng.normal(size=5).astype(BF16),
        "empty": np.zeros((0, 4), np.float32),
        "second": rng.normal(size=1).astype(np.float32),
        "byte": np.arange(7, dtype=np.uint8),
    }


def test_tensors_lie_in_canonical_order():
    schema = Schema.of(mixed())
    assert [tensor.name for tensor in schema.tensors] == [
        *("wide", "count"),  # 8 bytes: F64, I64
        *("first", "empty", "second"),  # 4 bytes
        *("bf16", "half"),  # 2 bytes: BF16, F16
        *("flag", "byte"),  # 1 byte: BOOL, U8
    ]
    assert [segment.dtype for segment in schema.segments] == ["F64", "I64", "F32", "BF16", "F16", "BOOL", "U8"]
    assert [segment.count for segment in schema.segments] == [2, 1, 7, 5, 3, 3, 7]
    assert schema.offsets == (0, 16, 24, 48, 48, 52, 62, 68, 71)
    assert schema.size_bytes == 78
    assert schema.num_floating == 2 + 7 + 5 + 3
    assert schema.file_size_bytes == len(schema.header) + 78


def test_the_order_within_a_dtype_is_the_given_one():
    names = ["b", "a", "c"]
    assert list(Parameters.from_arrays({name: np.zeros(1, np.float32) for name in names})) == names


def test_every_view_is_aligned_and_shares_the_buffer():
    parameters = Parameters.from_arrays(mixed())
    for name, view in parameters.items():
        assert view.flags.aligned
        assert view.flags.c_contiguous
        assert np.shares_memory(view, parameters.buffer) or name == "empty"
        assert (view == mixed()[name]).all()
    parameters["first"][1, 2] = 42
    assert parameters["first"][1, 2] == 42
    assert 42 in parameters.to_vector()


def test_a_float32_model_is_its_own_vector():
    parameters = Parameters.from_arrays({"a": np.ones(3, np.float32), "n": np.ones(1, np.int64)})
    vector = parameters.to_vector()
    assert np.shares_memory(vector, parameters.buffer)
    assert (vector.dtype, vector.tolist()) == (np.float32, [1, 1, 1])


def test_the_vector_holds_the_floating_entries_in_canonical_order():
    arrays = mixed()
    expected = [arrays[name].astype(np.float32).ravel() for name in ("wide", "first", "second", "bf16", "half")]
    vector = Parameters.from_arrays(arrays).to_vector()
    assert vector.dtype == np.float32
    assert vector.tolist() == np.concatenate(expected).tolist()


def test_non_contiguous_arrays_and_scalars_are_copied_by_value():
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    parameters = Parameters.from_arrays({"t": grid.T, "step": grid[::2, ::-1], "scalar": np.array(3.0)})
    assert (parameters["t"] == grid.T).all()
    assert (parameters["step"] == grid[::2, ::-1]).all()
    assert parameters["scalar"].shape == ()
    assert not np.shares_memory(parameters.buffer, grid)


def test_a_model_without_tensors():
    parameters = Parameters.from_arrays({})
    assert (len(parameters), parameters.to_vector().size, parameters.is_finite()) == (0, 0, True)
    assert Parameters.from_bytes(parameters.to_bytes()) == parameters


def test_it_is_a_mapping():
    parameters = Parameters.from_arrays(mixed())
    assert set(parameters) == set(mixed())
    assert "first" in parameters
    assert "third" not in parameters
    with pytest.raises(KeyError):
        parameters["third"]


def test_equality_is_by_schema_and_bytes():
    assert Parameters.from_arrays(mixed()) == Parameters.from_arrays(mixed())
    assert Parameters.from_arrays(mixed(0)) != Parameters.from_arrays(mixed(1))
    assert Parameters.from_arrays(mixed(), "keep") != Parameters.from_arrays(mixed(), "max")
    assert Parameters.from_arrays({}) != {}
    assert Schema.of(mixed()) == Schema.of(mixed())
    assert hash(Schema.of(mixed())) == hash(Schema.of(mixed()))
    assert "9 tensors" in repr(Parameters.from_arrays(mixed()))


@pytest.mark.parametrize("carry", ["keep", "max"])
def test_minus_and_plus_are_inverse(carry: Carry):
    base, new = Parameters.from_arrays(mixed(0), carry), Parameters.from_arrays(mixed(1), carry)
    before = base.to_bytes(), new.to_bytes()
    update = new.minus(base)
    back = base.plus(update.to_vector())
    assert (base.to_bytes(), new.to_bytes()) == before
    for name, tolerance in {"wide": 1e-6, "first": 1e-6, "half": 1e-2, "bf16": 5e-2}.items():
        np.testing.assert_allclose(back[name].astype(float), new[name].astype(float), atol=tolerance)
    assert update["count"] == 1  # integers are taken over, not subtracted
    assert (update["flag"] == new["flag"]).all()
    assert back["count"] == base["count"]  # a step has no integers


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("scratch_bytes", [8, 24, 1 << 20])
def test_a_difference_has_the_bytes_of_minus_in_parts_of_any_size_and_from_any_byte(scratch_bytes: int, whole: bool):
    base, new = Parameters.from_arrays(mixed(0)), Parameters.from_arrays(mixed(1))
    expected = new.minus(base).to_bytes()
    difference, scratch = base.difference_to(new if whole else dict(new)), np.empty(scratch_bytes, np.uint8)
    assert difference.size_bytes == len(expected)
    for start in range(len(expected)):
        part = difference.read(start, scratch)
        assert 1 <= len(part) <= scratch_bytes
        assert part == expected[start : start + len(part)]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_difference_of_any_bits_has_the_bits_of_minus(dtype: str):
    """Also for NaN and infinity, and what rounds or overflows; the expected values are computed at once."""
    entries = np.random.default_rng(3).integers(0, 256, (2, 64, DTYPES[dtype].itemsize), np.uint8)
    if dtype == "BOOL":
        entries &= 1
    new, base = (Parameters.from_arrays({"w": each.reshape(-1).view(DTYPES[dtype])}) for each in entries)
    difference, scratch = base.difference_to(new), np.empty(16, np.uint8)
    with np.errstate(all="ignore"):
        expected, start = new.minus(base).to_bytes(), 0
        while start < len(expected):
            part = difference.read(start, scratch)
            assert part == expected[start : start + len(part)]
            start += len(part)
        if dtype == "F32":
            assert expected.endswith((new["w"] - base["w"]).tobytes())


def test_a_difference_to_arrays_is_by_name_whatever_their_order_and_memory():
    base, new = Parameters.from_arrays(mixed(0)), Parameters.from_arrays(mixed(1))
    arrays = {name: np.array(array, order="F") for name, array in reversed(list(new.items()))}
    arrays["first"] = np.stack([arrays["first"]] * 2)[0]
    scratch = np.empty(1 << 20, np.uint8)
    difference, header = base.difference_to(arrays), len(base.schema.header)
    assert difference.read(header, scratch) == new.minus(base).to_bytes()[header:]


def test_a_difference_refuses_other_arrays():
    base = Parameters.from_arrays({"first": np.zeros(1, np.float32)})
    with pytest.raises(ModelError, match="'first' is missing"):
        base.difference_to(Parameters.from_arrays({}))
    with pytest.raises(ModelError, match=r"'first' is float32 \[2\]; expected float32 \[1\]"):
        base.difference_to({"first": np.zeros(2, np.float32)})


def test_small_dtypes_are_added_in_float32():
    base = Parameters.from_arrays({"w": np.array([1], BF16), "h": np.array([1], np.float16)})
    # 1 + 2⁻⁸ + 2⁻⁹ is above the middle of bfloat16's neighbours 1 and 1 + 2⁻⁷: rounded once, it goes up;
    # with the step itself rounded to bfloat16 first it would be the same, with a sum in bfloat16 it would not.
    step = np.array([2**-8 + 2**-9, 2**-11 + 2**-12], np.float32)
    assert base.plus(step)["w"].astype(float).tolist() == [1 + 2**-7]
    assert base.plus(step)["h"].astype(float).tolist() == [1 + 2**-10]


def test_float64_keeps_its_precision():
    base = Parameters.from_arrays({"w": np.array([1 + 2**-40])})
    assert base.plus(np.array([0.5], np.float32))["w"][0] == 1.5 + 2**-40


def test_beyond_the_range_of_a_dtype_is_infinite_without_a_warning():
    large = Parameters.from_arrays({"h": np.array([60000], np.float16)})
    assert np.isinf(large.plus(np.array([60000], np.float32))["h"]).all()
    negative = Parameters.from_arrays({"h": np.array([-60000], np.float16)})
    assert not large.minus(negative).is_finite()
    extreme = Parameters.from_arrays({"s": np.array([3e38], np.float32)})
    assert not extreme.plus(np.array([3e38], np.float32)).is_finite()


def test_a_float64_that_overflows_the_average_is_not_finite():
    parameters = Parameters.from_arrays({"w": np.array([1.0, 1e300])})
    assert np.isinf(parameters.to_vector()[1])
    assert not parameters.is_finite()


@pytest.mark.parametrize("dtype", sorted(FLOATING))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_entry_is_found(dtype: str, value: float):
    array = np.zeros((1 << 18) + 3, DTYPES[dtype])
    assert Parameters.from_arrays({"w": array, "n": np.array(1)}).is_finite()
    array[-1] = value
    assert not Parameters.from_arrays({"w": array}).is_finite()


def test_a_step_of_another_length_is_refused():
    with pytest.raises(ModelError, match="expected \\(2,\\)"):
        Parameters.from_arrays({"w": np.zeros(2, np.float32)}).plus(np.zeros(1, np.float32))


def test_minus_refuses_another_schema():
    with pytest.raises(ModelError, match="'first' is missing"):
        Parameters.from_arrays({}).minus(Parameters.from_arrays({"first": np.zeros(1, np.float32)}))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": np.zeros(2, np.float32)}, r"'b' is missing \(1 in all\)"),
        ({**{name: np.zeros(2, np.float32) for name in "abc"}}, "'c' is not part"),
        ({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, r"'b' is F32 \[3\]; expected F32 \[2\]"),
        ({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.int32)}, r"'b' is I32 \[2\]; expected F32 \[2\]"),
        ({"b": np.zeros(2, np.float32), "a": np.zeros(2, np.float32)}, "another order"),
    ],
)
def test_a_difference_is_put_into_words(other: Arrays, message: str):
    expected = Schema.of({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    with pytest.raises(ModelError, match=message):
        raise ModelError(Schema.of(other).difference_from(expected))
    assert expected.difference_from(expected) == ""
    assert "carry" in Schema(expected.tensors, "max").difference_from(expected)


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": np.zeros(3, np.float32)},
        {"a": np.zeros(2, np.float64)},
        {},
        {"a": np.zeros(2, np.float32), "b": np.zeros(1)},
    ],
)
def test_assign_refuses_what_does_not_fit(arrays: Arrays):
    parameters = Parameters.from_arrays({"a": np.ones(2, np.float32)})
    with pytest.raises(ModelError):
        parameters.assign(arrays)
    assert parameters["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "array",
    [np.zeros(1, np.complex64), np.array(["x"]), np.zeros(1, ">f4"), np.array([None]), np.zeros(1, "M8[s]")],
)
def test_other_dtypes_are_refused(array: npt.NDArray[Any]):
    with pytest.raises(ModelError, match=r"'w' has dtype .*; expected one of float64"):
        Parameters.from_arrays({"w": array})


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("w", "F8_E4M3", (1,)),
        TensorSpec("w", "F32", (-1,)),
        TensorSpec("w", "F32", (1,) * 33),
        TensorSpec("w", "F32", (0, 2**62)),
        TensorSpec("w", "F32", (2**70, 0)),
        TensorSpec("", "F32", (1,)),
        TensorSpec("\ud800", "F32", (1,)),
        TensorSpec("__metadata__", "F32", (1,)),
    ],
)
def test_impossible_tensors_are_refused(spec: TensorSpec):
    with pytest.raises(ModelError):
        Schema((spec,))


def test_a_schema_refuses_twins_other_carry_rules_and_too_many_tensors(monkeypatch: pytest.MonkeyPatch):
    one = TensorSpec("w", "F32", (1,))
    with pytest.raises(ModelError, match="'w' appears twice"):
        Schema((one, TensorSpec("w", "F64", (1,))))
    with pytest.raises(ModelError, match="carry rule 'min'"):
        Schema((one,), "min")  # type: ignore[arg-type]
    monkeypatch.setattr(schema_module, "MAX_TENSORS", 1)
    with pytest.raises(ModelError, match="2 tensors; at most 1"):
        Schema((one, TensorSpec("v", "F64", (1,))))


@pytest.mark.parametrize("buffer", [np.zeros(7, np.uint8), np.zeros(8, np.int8), np.zeros((1, 8), np.uint8)])
def test_a_buffer_of_another_size_is_refused(buffer: Any):
    with pytest.raises(ModelError, match=r"expected uint8 \(8,\)"):
        Parameters(Schema.of({"w": np.zeros(2, np.float32)}), buffer)


def test_plus_and_minus_of_float32_hold_one_result_and_no_more():
    parameters = Parameters.from_arrays({"w": np.ones(1 << 20, np.float32)})
    step = parameters.to_vector()
    tracemalloc.start()
    try:
        parameters.plus(step)
        parameters.minus(parameters)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * parameters.schema.size_bytes


def test_the_examples_of_the_docstrings_are_true():
    result = doctest.testmod(fedplat.model, extraglobs={"np": np})
    assert result.attempted > 0
    assert result.failed == 0
