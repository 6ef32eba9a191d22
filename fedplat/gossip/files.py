"""The files that silos exchange: the entries of a model as one vector, which does not depend on its tensors.

Plain gossip: the tensor "model", float32 [entries]; with a codec it is the public copy. Push-sum: "sum", float64
[entries], and "weight", float64 [1]; the model is their quotient. The mean of a ring is a model file of the job.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from fedplat.errors import GossipError, ModelError
from fedplat.gossip.messages import MAX_ENTRY
from fedplat.model import FLOATING, ModelFile, Parameters, Schema, TensorSpec, Vector, is_finite

Sum = npt.NDArray[np.float64]
MAX_WEIGHT = 2.0**20
"""The weights of all silos add up to their number. With a larger one, sums could exceed the range of float64."""


def make_model_file(vector: Vector) -> Parameters:
    """Return the file of a model, float32 [entries]; it shares the memory of the vector.

    Raises `GossipError` if an entry is NaN or infinite.
    """
    _check_model(vector)
    return Parameters(_model_schema(vector.size), np.ascontiguousarray(vector, np.float32).view(np.uint8))


def make_sum_file(total: Sum, weight: float) -> Parameters:
    """Return the file of a sum, float64 [entries], and its weight in push-sum.

    Raises `GossipError` unless their quotient, the model, is finite.
    """
    _check_sum(total, weight)
    file = Parameters.zeros(_sum_schema(total.size))
    file["sum"], file["weight"] = total, [weight]
    return file


def file_bytes(size: int, *, directed: bool) -> int:
    """Return the size of the file of a model of this many entries."""
    return (_sum_schema(size) if directed else _model_schema(size)).file_size_bytes


def read_model_file(path: str | os.PathLike[str], size: int) -> Vector:
    """Return the model in a file. Raises `GossipError` unless it is one of finite numbers with this many entries."""
    model = _open(path, _model_schema(size))["model"]
    _check_model(model)
    return model


def read_sum_file(path: str | os.PathLike[str], size: int) -> tuple[Sum, float]:
    """Return sum and weight in a file. Raises `GossipError` unless their quotient is a finite model of this size."""
    found = _open(path, _sum_schema(size))
    total, weight = found["sum"], float(found["weight"][0])
    _check_sum(total, weight)
    return total, weight


def replace_entries(base: Parameters, vector: Vector) -> Parameters:
    """Return a copy of a model with other floating-point entries, float32 [entries]; the others are kept.

    An entry beyond the range of its dtype becomes infinite.
    """
    model, start = base.copy(), 0
    with np.errstate(over="ignore"):
        for run in model.schema.segments:
            if run.dtype in FLOATING:
                model.segment(run)[:] = vector[start : start + run.count]
                start += run.count
    return model


def make_mean_file(initial: Parameters, mean: Vector) -> Parameters:
    """Return the model of a mean; it has the other entries of the initial model, so that all silos make the same file.

    Raises `GossipError` if an entry is beyond the range of its dtype.
    """
    model = replace_entries(initial, mean)
    if not is_finite(model.to_blocks()):
        raise GossipError("the mean has entries beyond the range of the model's dtype")
    return model


def read_mean_file(path: str | os.PathLike[str], schema: Schema) -> Vector:
    """Return the entries of a mean's model, float32 [entries]. Raises `GossipError` unless it has this schema."""
    model = _open(path, schema)
    if not model.is_finite():
        raise GossipError("the mean has NaN or infinite entries")
    return model.to_vector()


def _model_schema(size: int) -> Schema:
    return Schema((TensorSpec("model", "F32", (size,)),))


def _sum_schema(size: int) -> Schema:
    return Schema((TensorSpec("sum", "F64", (size,)), TensorSpec("weight", "F64", (1,))))


def _check_model(vector: Vector) -> None:
    if not np.isfinite(vector).all():
        raise GossipError("the model has NaN or infinite entries")


def _check_sum(total: Sum, weight: float) -> None:
    if not 0.0 < weight <= MAX_WEIGHT:
        raise GossipError(f"the weight of the sum is {weight}; expected more than 0, and at most {MAX_WEIGHT:g}")
    if not np.all(np.abs(total) <= MAX_ENTRY * weight):  # false for NaN, too
        raise GossipError("the sum has entries that are NaN, or too large for its weight")


def _open(path: str | os.PathLike[str], expected: Schema) -> Parameters:
    try:
        found = ModelFile.open(path)  # other than `Parameters.open` it accepts one header only
        if difference := found.schema.difference_from(expected):
            raise GossipError(f"the file is no model of this job: {difference}")
        return Parameters.open(path)
    except ModelError as exc:
        raise GossipError(f"the file is no model: {exc}") from exc
