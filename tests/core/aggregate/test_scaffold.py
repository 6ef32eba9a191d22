"""SCAFFOLD's halves, on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.aggregate import Scaffold
from fedplat.aggregate.drift import client_scaffold, with_control, without_control
from fedplat.aggregate.local import UpdateDirection
from fedplat.errors import ModelError
from fedplat.model import Parameters

RNG = np.random.default_rng(2)
MODEL = Parameters.from_arrays(
    {
        "b": RNG.normal(size=(2, 3)).astype("f4"),
        "steps": np.array(3),
        "a": np.array([-1, 1], "i4"),
        "c": np.ones(2, "f4"),
    },
    carry="max",
)
MISFIT = Scaffold(num_clients=10).build().requirements.misfit


def test_controls_are_zeros_after_the_models_own_tensors() -> None:
    extended = with_control(MODEL)
    half = MODEL.schema.num_floating
    np.testing.assert_array_equal(extended.to_vector()[:half], MODEL.to_vector())
    np.testing.assert_array_equal(extended.to_vector()[half:], np.zeros(half))
    assert extended["control/b"].shape == (2, 3)
    assert extended.keys() == MODEL.keys() | {"control/b", "control/c"}
    assert with_control(extended) is extended
    assert without_control(extended) == MODEL
    assert without_control(MODEL) is MODEL


def test_the_server_knows_a_model_that_fits() -> None:
    assert MISFIT(with_control(MODEL).schema) == ""
    lacking = {name: array for name, array in with_control(MODEL).items() if name != "control/b"}
    first = {"control/b": MODEL["b"], "control/c": MODEL["c"], **MODEL}
    for arrays in (dict(MODEL), lacking, first):
        assert "a tensor control/NAME for each tensor NAME" in MISFIT(Parameters.from_arrays(arrays).schema)


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_other_types_are_named(dtype: str) -> None:
    other = Parameters.from_arrays({"w": np.ones(2, dtype), "b": np.ones(2, "f4")})
    with pytest.raises(ModelError, match=r"tensor 'w' is F(16|64); SCAFFOLD needs F32"):
        with_control(other)
    assert MISFIT(other.schema)


def test_the_clients_half_is_that_of_the_paper() -> None:
    c, c_i, moved = ({"w": RNG.normal(size=3)} for _ in range(3))
    half, way = client_scaffold(), UpdateDirection(moved, learning_rate=0.1, steps=5)
    correction = half.begin(c, c_i)
    np.testing.assert_allclose(correction.drift["w"], c["w"] - c_i["w"])
    ending = half.end(correction, c_i, way)
    expected = c_i["w"] - c["w"] + moved["w"] / (5 * 0.1)
    np.testing.assert_allclose(ending.remember["w"], expected)
    np.testing.assert_allclose(ending.update["control/w"], expected - c_i["w"])
    first = half.end(half.begin(c, {}), {}, way)
    np.testing.assert_allclose(first.update["control/w"], moved["w"] / 0.5 - c["w"])


def test_no_step_is_no_change() -> None:
    half = client_scaffold()
    ending = half.end(half.begin({"w": 1.0}, {}), {}, UpdateDirection({"w": 0.0}, 0.1, 0))
    assert not ending.remember
    assert not ending.update
