from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.aggregate import (
    Accumulator,
    FedAdam,
    FedAvg,
    clip_by_norm,
    state_from_bytes,
    state_to_bytes,
    weighted_mean,
)
from fedplat.errors import ModelError
from fedplat.model import Carry, Parameters, Schema

RULE = weighted_mean()


def make_model(seed: int, carry: Carry = "keep") -> Parameters:
    """Every floating dtype, BatchNorm's counter and a mask of booleans."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, npt.NDArray[Any]] = {
        "half": rng.normal(size=(2, 3)).astype(np.float16),
        "bf16": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "single": rng.normal(size=(4, 2)).astype(np.float32),
        "double": rng.normal(size=3),
        "num_batches_tracked": np.array(100 * seed, np.int64),
        "mask": rng.random(6) < 0.3,
    }
    return Parameters.from_arrays(arrays, carry)


def finish(base: Parameters, models: list[Parameters], weights: list[float]) -> Parameters:
    accumulator = Accumulator(base.schema, RULE)
    for model, weight in zip(models, weights, strict=True):
        accumulator.fold(model.minus(base), weight)
    assert accumulator.num_updates == len(models)
    assert accumulator.total_weight == sum(weights)
    return accumulator.finish(base, RULE.init(base.schema.num_floating))[0]


def test_the_mean_of_models_of_every_dtype():
    base, models, weights = make_model(0), [make_model(1), make_model(2), make_model(3)], [1.0, 5.0, 2.0]
    result = finish(base, models, weights)
    for name, precision in {"half": 2e-3, "bf16": 2e-2, "single": 1e-6, "double": 1e-6}.items():
        values = [model[name].astype(np.float64) for model in models]
        expected = np.average(values, axis=0, weights=weights)
        assert result[name].dtype == base[name].dtype
        np.testing.assert_allclose(result[name].astype(np.float64), expected, atol=precision * 3, rtol=0)


def test_keep_leaves_the_base_versions_counters():
    base = make_model(7)
    result = finish(base, [make_model(1), make_model(9)], [1.0, 1.0])
    assert result["num_batches_tracked"] == 700
    assert (result["mask"] == base["mask"]).all()


def test_max_takes_the_largest_value_of_the_updates():
    base, models = make_model(7, "max"), [make_model(seed, "max") for seed in (1, 3, 2)]
    result = finish(base, models, [1.0, 1.0, 0.0])
    assert result["num_batches_tracked"] == 300  # the base's 700 is not an update
    assert (result["mask"] == models[0]["mask"] | models[1]["mask"] | models[2]["mask"]).all()


def test_finish_changes_nothing_and_may_be_repeated():
    rule = FedAdam().build()
    base = make_model(0, "max")
    accumulator, state = Accumulator(base.schema, rule), rule.init(base.schema.num_floating)
    accumulator.fold(make_model(1, "max").minus(base), 3.0)
    before, state_before = base.to_bytes(), state_to_bytes(state)
    first, first_state = accumulator.finish(base, state)
    second, second_state = accumulator.finish(base, state)
    assert first == second
    assert state_to_bytes(first_state) == state_to_bytes(second_state) != state_before
    assert (base.to_bytes(), state_to_bytes(state)) == (before, state_before)
    first["single"][...] = 0
    assert accumulator.finish(base, state)[0] == second


def test_a_read_only_base_version_is_fine():
    base = Parameters.from_bytes(make_model(0).to_bytes())
    update = Parameters.from_bytes(make_model(1).minus(base).to_bytes())
    accumulator = Accumulator(base.schema, RULE)
    accumulator.fold(update, 1.0)
    np.testing.assert_allclose(accumulator.finish(base, {})[0]["single"], make_model(1)["single"], rtol=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        {"weight": np.zeros(3, np.float32)},
        {"weight": np.zeros(2, np.float16)},
        {"other": np.zeros(2, np.float32)},
        {"weight": np.zeros(2, np.float32), "more": np.zeros(1, np.float32)},
    ],
)
def test_another_schema_is_refused(other: dict[str, npt.NDArray[Any]]):
    schema = Schema.of({"weight": np.zeros(2, np.float32)})
    accumulator = Accumulator(schema, RULE)
    with pytest.raises(ModelError, match="the update does not fit the attempt"):
        accumulator.fold(Parameters.from_arrays(other), 1.0)
    accumulator.fold(Parameters.zeros(schema), 1.0)
    with pytest.raises(ModelError, match="the base version does not fit the attempt"):
        accumulator.finish(Parameters.from_arrays(other), {})


def test_a_refused_update_leaves_no_trace():
    base = make_model(0, "max")
    rule = clip_by_norm(1.0)(RULE)
    accumulator = Accumulator(base.schema, rule)
    poison = make_model(9, "max")
    poison["single"][0, 0] = np.nan
    for update, weight in ((poison, 1.0), (make_model(9, "max"), -1.0)):
        with pytest.raises(ValueError, match=r"NaN|weight"):
            accumulator.fold(update, weight)
    with pytest.raises(ValueError, match="no update"):
        accumulator.finish(base, {})
    accumulator.fold(make_model(1, "max").minus(base), 1.0)
    assert accumulator.finish(base, {})[0]["num_batches_tracked"] == 100


def test_a_model_of_integers_only():
    base = Parameters.from_arrays({"count": np.array([1, 2], np.int32)}, "max")
    accumulator = Accumulator(base.schema, FedAvg().build())
    for counts in ([5, 0], [0, 9]):
        accumulator.fold(Parameters.from_arrays({"count": np.array(counts, np.int32)}, "max"), 1.0)
    assert accumulator.finish(base, {})[0]["count"].tolist() == [5, 9]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_memory_does_not_grow_with_the_updates(dtype: Any):
    update = Parameters.from_arrays({"w": np.ones(10**6, dtype), "n": np.ones(1000, np.int64)}, "max")
    accumulator = Accumulator(update.schema, RULE)
    accumulator.fold(update, 1.0)
    tracemalloc.start()
    try:
        accumulator.fold(update, 1.0)
        held, peak = tracemalloc.get_traced_memory()
        for _ in range(48):
            accumulator.fold(update, 1.0)
        held_after, peak_after = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_after - held < 10_000
    assert peak_after - peak < 10_000
    assert accumulator.num_updates == 50


def test_the_state_as_bytes():
    state = {"velocity": np.array([1, -0.0, np.nan], np.float32), "second": np.arange(3, dtype=np.float32)}
    restored = state_from_bytes(state_to_bytes(state))
    assert list(restored) == ["velocity", "second"]
    assert all(restored[name].tobytes() == state[name].tobytes() for name in state)
    assert state_to_bytes(restored) == state_to_bytes(state)


def test_an_empty_state_is_no_bytes():
    assert state_to_bytes({}) == b""
    assert state_from_bytes(b"") == {}


@pytest.mark.parametrize("array", [np.zeros(2, np.float64), np.zeros((1, 2), np.float32), np.array(1, np.int64)])
def test_bytes_that_hold_no_state_are_refused(array: npt.NDArray[Any]):
    with pytest.raises(ModelError, match="expected a float32 vector"):
        state_from_bytes(Parameters.from_arrays({"x": array}).to_bytes())
    with pytest.raises(ModelError):
        state_from_bytes(b"nonsense")
