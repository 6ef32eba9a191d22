"""The files that silos exchange."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.errors import GossipError
from fedplat.gossip import mixing
from fedplat.gossip.messages import MAX_ENTRY
from fedplat.model import Parameters


def write(path: Path, file: Parameters) -> Path:
    path.write_bytes(file.to_bytes())
    return path


def test_files_of_models_and_sums_are_read_back(tmp_path: Path) -> None:
    vector = np.arange(5, dtype=np.float32)
    path = write(tmp_path / "model", mixing.make_model_file(vector))
    np.testing.assert_array_equal(mixing.read_model_file(path, 5), vector)
    assert path.stat().st_size == mixing.file_bytes(5, directed=False)
    path = write(tmp_path / "sum", mixing.make_sum_file(vector.astype(np.float64) / 3, 0.25))
    total, weight = mixing.read_sum_file(path, 5)
    np.testing.assert_array_equal(total, vector.astype(np.float64) / 3)
    assert (weight, path.stat().st_size) == (0.25, mixing.file_bytes(5, directed=True))


@pytest.mark.parametrize("weight", [1.0, 2.0**-60, 1e-300, mixing.MAX_WEIGHT])
def test_the_largest_models_have_sums_with_any_weight(tmp_path: Path, weight: float) -> None:
    total = np.array([MAX_ENTRY, -MAX_ENTRY, 0.0]) * weight
    found, its_weight = mixing.read_sum_file(write(tmp_path / "sum", mixing.make_sum_file(total, weight)), 3)
    assert (found.tobytes(), its_weight) == (total.tobytes(), weight)


@pytest.mark.parametrize(
    ("total", "weight"),
    [
        (0.0, 0.0),
        (0.0, -1.0),
        (0.0, np.nan),
        (0.0, np.inf),
        (0.0, 2 * mixing.MAX_WEIGHT),
        (np.nan, 1.0),
        (np.inf, 1.0),
        (1.0, 1e-300),
        (2 * MAX_ENTRY, 1.0),
        (1e308, mixing.MAX_WEIGHT),
    ],
)
def test_sums_of_which_the_model_is_not_finite_are_refused(tmp_path: Path, total: float, weight: float) -> None:
    """Such as one of a hostile neighbour, with a weight so small that the quotient is beyond float32."""
    with pytest.raises(GossipError, match="weight"):
        mixing.make_sum_file(np.full(5, total), weight)
    content = Parameters.from_arrays({"sum": np.full(5, total), "weight": np.array([weight])})
    with pytest.raises(GossipError, match="weight"):
        mixing.read_sum_file(write(tmp_path / "sum", content), 5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_models_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    vector = np.array([1.0, value], np.float32)
    with pytest.raises(GossipError, match="NaN or infinite"):
        mixing.make_model_file(vector)
    with pytest.raises(GossipError, match="NaN or infinite"):
        mixing.read_model_file(write(tmp_path / "model", Parameters.from_arrays({"model": vector})), 2)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    path = write(tmp_path / "model", mixing.make_model_file(np.ones(4, np.float32)))
    with pytest.raises(GossipError, match="no model of this job"):
        mixing.read_model_file(path, 5)
    with pytest.raises(GossipError, match="no model of this job"):
        mixing.read_sum_file(path, 4)
    path.write_bytes(b"")
    with pytest.raises(GossipError, match="no model"):
        mixing.read_model_file(path, 4)


def test_all_silos_make_the_same_file_of_a_mean(tmp_path: Path) -> None:
    """It has the initial model's integers, although silos have counted on."""
    initial = Parameters.from_arrays(
        {"half": np.ones(3, np.float16), "weight": np.ones(2, np.float32), "steps": np.array([7])}
    )
    mean = np.array([1.5, 2.5, 0.1, 0.2, 0.3], np.float32)  # in the canonical order of the tensors
    file = mixing.make_mean_file(initial, mean)
    assert file["steps"].tolist() == [7]
    np.testing.assert_array_equal(file["weight"], mean[:2])
    np.testing.assert_array_equal(file["half"], mean[2:].astype(np.float16))
    path = write(tmp_path / "mean", file)
    np.testing.assert_array_equal(mixing.read_mean_file(path, initial.schema), file.to_vector())
    with pytest.raises(GossipError, match="beyond the range"):
        mixing.make_mean_file(initial, np.full(5, 1e6, np.float32))
    file["weight"][0] = np.inf
    with pytest.raises(GossipError, match="NaN or infinite"):
        mixing.read_mean_file(write(path, file), initial.schema)
