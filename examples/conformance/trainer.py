"""The trainer and the evaluator with which fedplat's own client passes `fedplat conformance` (docs/protocol.md)."""

from __future__ import annotations

import time

from fedplat.model import FLOATING
from fedplat_client import EvaluateResult, Task, TrainResult


def train(task: Task) -> TrainResult:
    """Add 1 to each floating-point entry, rounded to its type, in the time that the job asks for."""
    if task.config.get("fail"):
        raise RuntimeError("the job asks the trainer to fail")
    seconds = float(task.config.get("seconds", 0.0))
    began = time.monotonic()
    while (done := time.monotonic() - began) < seconds:
        task.progress(done / seconds)
        time.sleep(0.02)
    for tensor in task.parameters.schema.tensors:
        if tensor.dtype in FLOATING:
            values = task.parameters[tensor.name]
            wide = values.astype("f8" if tensor.dtype == "F64" else "f4")
            values[...] = (wide + 1).astype(values.dtype)
    return TrainResult(parameters=task.parameters, num_examples=7)


def evaluate(task: Task) -> EvaluateResult:
    """Report how many tensors the model has."""
    return EvaluateResult(num_examples=7, metrics={"tensors": float(len(task.parameters))})
