from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.aggregate import (
    RULES,
    Accumulator,
    Contribution,
    FedAdam,
    FedAvg,
    FedNova,
    Partial,
    Rule,
    Shard,
    State,
    clip_by_norm,
    first_columns,
    l2_norm,
    read_columns,
    state_schema,
    state_to_bytes,
    weighted_mean,
)
from fedplat.errors import ModelError
from fedplat.model import BLOCK, WINDOW, Carry, ModelFile, Parameters, Schema, Vector, VectorBlocks
from support.rules import make_rule

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
        accumulator.fold(model.minus(base), Contribution(weight))
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
    accumulator.fold(make_model(1, "max").minus(base), Contribution(3.0))
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
    accumulator.fold(update, Contribution(1.0))
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
        accumulator.fold(Parameters.from_arrays(other), Contribution(1.0))
    accumulator.fold(Parameters.zeros(schema), Contribution(1.0))
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
            accumulator.fold(update, Contribution(weight))
    with pytest.raises(ValueError, match="no update"):
        accumulator.finish(base, {})
    accumulator.fold(make_model(1, "max").minus(base), Contribution(1.0))
    assert accumulator.finish(base, {})[0]["num_batches_tracked"] == 100


def test_a_model_of_integers_only():
    base = Parameters.from_arrays({"count": np.array([1, 2], np.int32)}, "max")
    accumulator = Accumulator(base.schema, FedAvg().build())
    for counts in ([5, 0], [0, 9]):
        accumulator.fold(Parameters.from_arrays({"count": np.array(counts, np.int32)}, "max"), Contribution(1.0))
    assert accumulator.finish(base, {})[0]["count"].tolist() == [5, 9]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_memory_does_not_grow_with_the_updates(dtype: Any):
    update = Parameters.from_arrays({"w": np.ones(10**6, dtype), "n": np.ones(1000, np.int64)}, "max")
    accumulator = Accumulator(update.schema, RULE)
    accumulator.fold(update, Contribution(1.0))
    tracemalloc.start()
    try:
        accumulator.fold(update, Contribution(1.0))
        held, peak = tracemalloc.get_traced_memory()
        for _ in range(48):
            accumulator.fold(update, Contribution(1.0))
        held_after, peak_after = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # An update has 2 MB or more; threads that other tests have left allocate a little, too.
    assert held_after - held < 100_000
    assert peak_after - peak < 100_000
    assert accumulator.num_updates == 50


def wide_model(seed: int) -> Parameters:
    """Columns of the step end within tensors of every dtype, and counters lie between them."""
    rng = np.random.default_rng(seed)
    return Parameters.from_arrays(
        {
            "double": rng.normal(size=WINDOW - 7),
            "counter": rng.integers(0, 1000, WINDOW + 3),
            "single": rng.normal(size=BLOCK + 11).astype(np.float32),
            "bf16": rng.normal(size=WINDOW).astype(ml_dtypes.bfloat16),
            "half": rng.normal(size=5).astype(np.float16),
        },
        "max",
    )


@pytest.mark.parametrize("name", RULES)
def test_the_end_part_by_part_is_the_end_of_the_whole(name: str, tmp_path: Path):
    rule, base, size = make_rule(name), wide_model(0), wide_model(0).schema.num_floating
    (tmp_path / "base").write_bytes(base.to_bytes())
    whole, contribution = rule.init(size), Contribution(3.0, metrics=dict.fromkeys(rule.metrics, 2.0))
    for seed in (1, 2):
        update = wide_model(seed)
        accumulator, partial = Accumulator(base.schema, rule), rule.start(size)
        accumulator.fold(update, contribution)
        partial = rule.fold(partial, VectorBlocks(update.to_vector()), contribution)
        if seed == 1:
            state = first_columns(rule, size)
        else:
            state = read_columns(tmp_path / "state", rule, size) if whole else iter([{}] * 3)
        step, whole = rule.apply(whole, partial)
        expected = base.plus(step)
        expected["counter"] = update["counter"]
        model, after = base.schema.header, state_schema(whole, size).header
        for part in accumulator.parts(ModelFile.open(tmp_path / "base"), state):
            model += part.model.tobytes()
            after += b"".join(vector.tobytes() for vector in (part.state or {}).values())
        assert model == expected.to_bytes()
        assert (after if whole else b"") == state_to_bytes(whole)
        (tmp_path / "state").write_bytes(after)


def by_its_norm(inner: Rule) -> Rule:
    """A step of length 1, which no rule could take that sees a part of it only; remembers the last one."""

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        step, _ = inner.apply({}, partial)
        step = step / np.float32(l2_norm(VectorBlocks(step)))
        return step, {"last": step}

    def init(size: int) -> State:
        return {"last": np.zeros(size, np.float32)}

    return dataclasses.replace(inner, init=init, apply=apply, blockwise=False)


def test_a_rule_that_is_not_blockwise_sees_the_whole_step():
    base, update = wide_model(0), wide_model(1)
    rule = clip_by_norm(1e9)(by_its_norm(weighted_mean()))
    accumulator = Accumulator(base.schema, rule)
    accumulator.fold(update, Contribution(1.0))
    parts = list(accumulator.parts(base, first_columns(rule, base.schema.num_floating)))
    last = np.concatenate([part.state["last"] for part in parts if part.state])
    assert l2_norm(VectorBlocks(last)) == pytest.approx(1.0, rel=1e-5)
    expected = base.plus(last)
    expected["counter"] = update["counter"]
    assert b"".join(part.model.tobytes() for part in parts) == expected.buffer.tobytes()


@pytest.mark.parametrize("index", [0, WINDOW + 1])
def test_a_result_that_is_not_finite_is_refused(index: int):
    base = Parameters.from_arrays({"w": np.full(WINDOW + 2, 3e38, np.float32)})
    update = Parameters.zeros(base.schema)
    update["w"][index] = 3e38
    accumulator = Accumulator(base.schema, RULE)
    accumulator.fold(update, Contribution(1.0))
    with pytest.raises(ModelError, match="not finite"):
        accumulator.finish(base, {})


def test_a_state_that_is_not_finite_is_refused():
    rule = FedAdam().build()
    base = Parameters.from_arrays({"w": np.zeros(3, np.float32)})
    accumulator = Accumulator(base.schema, rule)
    huge = Parameters.from_arrays({"w": np.full(3, 1e30, np.float32)})  # its square is infinite
    accumulator.fold(huge, Contribution(1.0))
    with pytest.raises(ModelError, match="not finite"):
        accumulator.finish(base, rule.init(3))


def test_the_end_needs_a_few_windows_of_memory(tmp_path: Path):
    base = Parameters.from_arrays({"w": np.zeros(8 * WINDOW, np.float32)})
    rule = FedAdam().build()
    (tmp_path / "base").write_bytes(base.to_bytes())
    accumulator = Accumulator(base.schema, rule)
    accumulator.fold(base, Contribution(1.0))
    tracemalloc.start()
    try:
        for _ in accumulator.parts(ModelFile.open(tmp_path / "base"), first_columns(rule, 8 * WINDOW)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 14 * 4 * WINDOW


@pytest.mark.parametrize("order", [1, -1])
def test_partial_sums_that_are_merged_are_those_of_one_accumulator(order: int) -> None:
    """With the largest carried values in any part, and a part without updates."""
    rng, rule = np.random.default_rng(3), FedNova().build()
    arrays = {"weight": np.zeros(9, np.float32), "steps": np.zeros(4, np.int64), "mask": np.zeros(4, bool)}
    base = Parameters.from_arrays(arrays, "max")
    updates: list[tuple[Parameters, Contribution]] = []
    for number in range(5):
        update = base.copy()
        update["weight"] += rng.integers(-8, 8, 9).astype(np.float32)
        update["steps"][:] = [7 - number, number, 3, 5]
        update["mask"][:] = [number == 0, number == 4, False, True]
        updates.append((update, Contribution(2.0**number, metrics={"local_steps": float(2**number)})))
    whole, *parts = [Accumulator(base.schema, rule) for _ in range(4)]
    for number, update in enumerate(updates):
        whole.fold(*update)
        parts[number % 2].fold(*update)
    total = np.zeros(9, np.float32)
    for part in parts:
        total += part.total
    shard = Shard(range(base.schema.num_floating), memory=total)
    merged = Accumulator.merge_partials(base.schema, rule, {}, [part.summary for part in parts[::order]], shard)
    assert (merged.num_updates, merged.total_weight) == (whole.num_updates, whole.total_weight) == (5, 31.0)
    model, _ = merged.finish(base, {})
    assert model == whole.finish(base, {})[0]
    assert (model["steps"].tolist(), model["mask"].tolist()) == ([7, 4, 3, 5], [True, True, False, True])
