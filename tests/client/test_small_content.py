"""What is small travels inside other messages, against a scripted server on a real socket."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, Task, TrainResult
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]


def test_a_small_update_travels_with_its_report(
    fleet: FakeFleet, base: Parameters, model: model_pb2.ModelRef, make_client: MakeClient
) -> None:
    fleet.assign(model)
    fleet.lost_replies["Report"] = 1  # the repetition carries the same bytes
    client = make_client(inline_limit_bytes=wire.INLINE_BYTES)

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        task.parameters["bias"] += np.float32(1)
        return TrainResult(parameters=task.parameters, num_examples=1)

    client.run(max_tasks=1)

    assert "Upload" not in fleet.calls
    first, second = fleet.requests["Report"]
    assert first == second
    assert hashlib.sha256(first.update).hexdigest() == first.digest
    update = Parameters.from_bytes(first.update)
    np.testing.assert_allclose(update["bias"], 1.0, rtol=1e-5)
    np.testing.assert_array_equal(update["weight"], 0.0)


def test_a_small_model_comes_with_its_assignment(
    fleet: FakeFleet, base: Parameters, model: model_pb2.ModelRef, make_client: MakeClient
) -> None:
    fleet.assign(model, model_bytes=base.to_bytes())
    fleet.assign(model, model_bytes=base.to_bytes()[:-1] + b"!")
    client = make_client()
    seen: list[Parameters] = []

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        seen.append(task.parameters.copy())
        task.parameters["bias"] += np.float32(1)
        return TrainResult(parameters=task.parameters, num_examples=1)

    client.run(max_tasks=2)

    assert "Download" not in fleet.calls
    assert seen == [base]
    np.testing.assert_allclose(
        Parameters.from_bytes(fleet.uploads[fleet.requests["Report"][0].digest])["bias"], 1.0, rtol=1e-5
    )
    (failure,) = fleet.requests["Fail"]
    assert failure.reason == model_pb2.REASON_TRANSFER_FAILED
    assert model.digest in failure.text


def test_also_a_small_model_that_is_larger_than_the_client_takes_is_refused(
    fleet: FakeFleet, base: Parameters, model: model_pb2.ModelRef, make_client: MakeClient
) -> None:
    """As the adapters of a language model may be, which come with the assignment."""
    fleet.assign(model, model_bytes=base.to_bytes())
    client = make_client(max_model_bytes=model.size_bytes - 1)

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        raise AssertionError("it was trained")

    client.run(max_tasks=1)

    (failure,) = fleet.requests["Fail"]
    assert failure.reason == model_pb2.REASON_TRANSFER_FAILED
    assert f"has {model.size_bytes} bytes; this client accepts at most {model.size_bytes - 1}" in failure.text
