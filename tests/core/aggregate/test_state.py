"""A rule's state in a file: column by column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedplat.aggregate import FedAdam, first_columns, read_columns, state_from_bytes, state_schema, state_to_bytes
from fedplat.aggregate.state import columns_of, concatenate_columns
from fedplat.errors import ModelError
from fedplat.model import WINDOW, Parameters

RULE = FedAdam().build()


@pytest.mark.parametrize("size", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 5])
def test_a_state_as_bytes_and_column_by_column(size: int, tmp_path: Path):
    rng = np.random.default_rng(size)
    state = {name: rng.normal(size=size).astype(np.float32) for name in RULE.init(0)}
    content = state_to_bytes(state)
    assert content.startswith(state_schema(state, size).header)
    (tmp_path / "state").write_bytes(content)
    for restored in (
        state_from_bytes(content)[0],
        concatenate_columns(read_columns(tmp_path / "state", RULE, size)),
        concatenate_columns(columns_of(state, size)),
    ):
        assert list(restored) == ["first_moment", "second_moment"]
        assert all(restored[name].tobytes() == state[name].tobytes() for name in state)


def test_bits_that_are_no_numbers_are_kept():
    state = {"velocity": np.array([1, -0.0, np.nan], np.float32)}
    assert state_from_bytes(state_to_bytes(state))[0]["velocity"].tobytes() == state["velocity"].tobytes()


def test_an_empty_state_is_no_bytes():
    assert state_to_bytes({}) == b""
    assert state_from_bytes(b"") == ({}, {})


def test_the_first_state_column_by_column():
    size = WINDOW + 3
    assert state_to_bytes(concatenate_columns(first_columns(RULE, size))) == state_to_bytes(RULE.init(size))


@pytest.mark.parametrize(
    "arrays",
    [
        {"x.0": np.zeros(2, np.float64)},
        {"x.0": np.zeros((1, 2), np.float32)},
        {"x.0": np.array(1, np.int64)},
        {"x": np.zeros(2, np.float32)},
        {"x.1": np.zeros(2, np.float32)},
        {"x.0": np.zeros(2, np.float32), "x.1": np.zeros(1, np.float32)},
        {"x.0": np.zeros(2, np.float32), "y.0": np.zeros(1, np.float32)},
        {"x.0": np.zeros(2, np.float32), "w": np.zeros(2, np.float32)},
    ],
)
def test_bytes_that_hold_no_state_are_refused(arrays: dict[str, npt.NDArray[Any]]):
    with pytest.raises(ModelError, match="not a state file"):
        state_from_bytes(Parameters.from_arrays(arrays).to_bytes())
    with pytest.raises(ModelError):
        state_from_bytes(b"nonsense")


@pytest.mark.parametrize("other", [{"velocity": 3}, {"first_moment": 3}, {"first_moment": 4, "second_moment": 4}, {}])
def test_the_state_of_another_rule_or_model_is_refused(other: dict[str, int], tmp_path: Path):
    state = {name: np.zeros(size, np.float32) for name, size in other.items()}
    (tmp_path / "state").write_bytes(state_to_bytes(state))
    with pytest.raises(ModelError):
        list(read_columns(tmp_path / "state", RULE, 3))
