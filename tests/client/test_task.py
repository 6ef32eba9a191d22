"""Tasks and results, as trainers use them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import fedplat_client
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat_client import ClientOptions, EvaluateResult, Task, TrainResult
from fedplat_client.task import Control


def parameters(**values: float) -> Parameters:
    return Parameters.from_arrays({name: np.full(3, value, np.float32) for name, value in values.items()})


def test_a_task_can_be_made_by_hand_to_test_a_trainer() -> None:
    task = Task(name="digits", parameters=parameters(w=1.0), config={"epochs": 2})
    assert (task.remaining_s, task.cancelled, task.control.fraction) == (math.inf, False, 0.0)
    task.progress(0.25)
    assert task.control.fraction == 0.25


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_progress_is_a_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match="expected a fraction between 0 and 1"):
        Task(name="digits", parameters=parameters(w=1.0)).progress(fraction)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_examples": 1}, "either parameters or delta; got neither"),
        ({"parameters": {}, "delta": {}, "num_examples": 1}, "either parameters or delta; got both"),
        ({"parameters": {}, "num_examples": -1}, "num_examples is -1; expected a number from"),
        ({"parameters": {}, "num_examples": math.inf}, "num_examples is inf"),
        ({"parameters": {}, "num_examples": None}, "num_examples is None; expected a number"),
        ({"parameters": {}, "num_examples": 1, "metrics": {"a": math.inf}}, "metric 'a' is inf"),
        ({"parameters": {}, "num_examples": 1, "metrics": {"a": "b"}}, "metric 'a' is 'b'; expected a number"),
    ],
)
def test_a_result_is_validated_where_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainResult(**fields)


@pytest.mark.parametrize(("num_examples", "metric"), [(math.nan, 1.0), (0, 1.0), (1, math.nan)])
def test_an_evaluation_is_validated_too(num_examples: float, metric: float) -> None:
    with pytest.raises(ValueError, match="expected a"):
        EvaluateResult(num_examples=num_examples, metrics={"accuracy": metric})


def test_the_update_is_the_difference_whatever_the_order_of_the_tensors() -> None:
    base = parameters(a=1.0, b=2.0)
    for trained in (parameters(b=7.0, a=5.0), dict(parameters(b=7.0, a=5.0))):
        update = TrainResult(parameters=trained, num_examples=1).to_update(base)
        assert update.schema == base.schema
        np.testing.assert_array_equal(update.to_vector(), np.repeat(np.array([4.0, 5.0], np.float32), 3))


def test_an_update_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="'c' is not part of the model"):
        TrainResult(parameters=parameters(a=1.0, c=1.0), num_examples=1).to_update(parameters(a=1.0))


def test_the_exported_names_are_pinned() -> None:
    assert fedplat_client.__all__ == [
        "CallError",
        "CallRefusedError",
        "Cancelled",
        "Client",
        "ClientError",
        "ClientOptions",
        "DataDirectoryError",
        "EnrollmentError",
        "EvaluateResult",
        "FencedError",
        "IdentityError",
        "IncompatibleServerError",
        "ListenerError",
        "MissingExtraError",
        "Parameters",
        "PrivacyLimit",
        "PrivacyLimitError",
        "RevokedError",
        "ServerUnavailableError",
        "Task",
        "TaskOutcome",
        "TicketError",
        "TrainResult",
        "TransferError",
        "UnknownClientError",
        "__version__",
    ]
    assert all(hasattr(fedplat_client, name) for name in fedplat_client.__all__)


@pytest.mark.parametrize("remaining_s", [math.nan, math.inf, -math.inf])
def test_a_deadline_that_is_not_a_number_changes_nothing(remaining_s: float) -> None:
    control = Control(training_timeout_s=100.0, upload_timeout_s=10.0, options=ClientOptions(clock=lambda: 0.0))
    control.adjust(remaining_s, uploading=False)
    assert (control.training_remaining_s, control.remaining_s) == (100.0, 110.0)
