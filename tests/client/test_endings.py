"""Tasks that end early: stopped by the server, failed by the trainer, given back by the owner."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from fedplat.wire.v1 import model_pb2
from fedplat_client import (
    Cancelled,
    Client,
    EvaluateResult,
    Task,
    TrainResult,
)
from fedplat_client.cancellation import StopSignal
from support.clients import add_one
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]


@pytest.mark.fault("F34")
def test_the_servers_stop_reaches_the_trainer_and_the_client_continues(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.assign(model)
    fleet.assign(model)
    caught: list[Cancelled] = []
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        if caught:
            return add_one(task)
        fleet.say_stop(model_pb2.REASON_SURPLUS)
        task.control.signal.wait(60)
        assert task.cancelled
        try:
            task.progress(0.5)
        except Cancelled as exc:
            caught.append(exc)
            raise
        raise AssertionError("progress did not raise")

    client.run(max_tasks=2)
    assert caught[0].reason == "SURPLUS"
    assert caught[0].text == "no longer needed"
    assert "Fail" not in fleet.calls  # the server already knows
    assert [request.token for request in fleet.requests["Report"]] == ["token-2"]


@pytest.mark.parametrize("swallow", ["returns a result", "raises something else"])
def test_nothing_is_sent_after_the_stop_whatever_the_trainer_does(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, swallow: str
) -> None:
    fleet.assign(model)
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        fleet.say_stop(model_pb2.REASON_JOB_CANCELLED)
        task.control.signal.wait(60)
        if swallow == "raises something else":
            raise RuntimeError("interrupted")
        return add_one(task)

    client.run(max_tasks=1)
    assert not {"Upload", "Report", "Fail"} & set(fleet.calls)


def test_an_error_of_the_trainer_is_reported_and_the_client_continues(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    delays: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet.assign(model)
    fleet.assign(model)
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        if task.round == 1:
            raise RuntimeError("out of paper " * 100)
        return add_one(task)

    client.run(max_tasks=2)
    (fail,) = fleet.requests["Fail"]
    assert (fail.token, fail.reason) == ("token-1", model_pb2.REASON_TRAINER_ERROR)
    assert fail.text == ("RuntimeError: " + "out of paper " * 100)[:500]
    assert "Traceback" in caplog.text
    assert [request.token for request in fleet.requests["Report"]] == ["token-2"]
    assert len(delays) == 1


def no_result(task: Task) -> Any:
    return None


def another_result(task: Task) -> Any:
    return EvaluateResult(num_examples=1, metrics={})


def tensors_missing(task: Task) -> TrainResult:
    return TrainResult(parameters={}, num_examples=1)


def another_dtype(task: Task) -> TrainResult:
    return TrainResult(parameters={**task.parameters, "bias": np.zeros(50)}, num_examples=1)


def no_examples(task: Task) -> TrainResult:
    return TrainResult(parameters=task.parameters, num_examples=0)


def diverged(task: Task) -> TrainResult:
    return TrainResult(parameters=task.parameters, num_examples=1, metrics={"loss": float("nan")})


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (no_result, "TypeError: 'digits' returned NoneType; expected TrainResult"),
        (another_result, "returned EvaluateResult; expected TrainResult"),
        (tensors_missing, "tensor 'steps' is missing"),
        (another_dtype, "tensor 'bias' is float64 [50]; expected float32 [50]"),
        (no_examples, "num_examples is 0"),
        (diverged, "metric 'loss' is nan"),
    ],
)
def test_an_unusable_result_is_reported(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    result: Callable[[Task], TrainResult],
    text: str,
) -> None:
    fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", result)
    client.run(max_tasks=1)
    (fail,) = fleet.requests["Fail"]
    assert fail.reason == model_pb2.REASON_TRAINER_ERROR
    assert text in fail.text
    assert "Upload" not in fleet.calls


def test_an_unknown_trainer_is_reported(fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef) -> None:
    fleet.assign(model, trainer="letters")
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    (fail,) = fleet.requests["Fail"]
    assert fail.reason == model_pb2.REASON_UNKNOWN_TRAINER
    assert fail.text == "the client has no trainer 'letters'; available: digits"
    assert "Download" not in fleet.calls


@pytest.mark.parametrize("when", ["progress", "heartbeat"])
@pytest.mark.fault("F19")
def test_a_deadline_cancels_even_when_the_server_is_out_of_reach(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    when: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = [0.0]
    fleet.failures["Heartbeat"] = [grpc.StatusCode.UNAVAILABLE] * 100_000
    fleet.assign(model, training_timeout_s=100.0, upload_timeout_s=10.0)
    client = make_client(clock=lambda: times[0])

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        times[0] = 99.0
        task.progress(0.1)
        times[0] = 101.0 if when == "progress" else 111.0
        if when == "heartbeat":
            task.control.signal.wait(60)
        task.progress(0.2)
        raise AssertionError("progress did not raise")

    with caplog.at_level("WARNING"):
        client.run(max_tasks=1)
    assert "the deadline of the assignment has passed" in caplog.text
    assert not {"Upload", "Report", "Fail"} & set(fleet.calls)  # the server has already dropped it


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["stop", "SIGTERM", "SIGINT"])
def test_stopping_in_the_midst_of_training_gives_the_task_back(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, how: str
) -> None:
    fleet.assign(model)
    client = make_client()
    before = signal.getsignal(signal.SIGTERM)

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        if how == "stop":
            client.stop()
        else:
            signal.raise_signal(signal.Signals[how])
        task.control.signal.wait(60)
        task.progress(0.5)
        raise AssertionError("progress did not raise")

    client.run()
    (fail,) = fleet.requests["Fail"]
    assert fail.reason == model_pb2.REASON_CLIENT_STOPPED
    assert fleet.calls.count("CheckIn") == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("interruptible")
def test_the_second_interrupt_breaks_into_a_trainer_that_does_not_listen(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.assign(model)
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the interrupt did not come")

    with pytest.raises(KeyboardInterrupt):
        client.run()
    (fail,) = fleet.requests["Fail"]
    assert fail.reason == model_pb2.REASON_CLIENT_STOPPED


def test_stop_wakes_a_pending_check_in(fleet: FakeFleet, make_client: MakeClient) -> None:
    client = make_client(check_in_wait_s=3600.0)
    client.add_trainer("digits", add_one)
    thread = threading.Thread(target=client.run)
    thread.start()
    fleet.wait_for("CheckIn")
    client.stop()
    thread.join(60)
    assert not thread.is_alive()
    client.run()  # stays stopped


def test_stop_wakes_a_back_off(make_client: MakeClient, fleet: FakeFleet) -> None:
    fleet.refuse(model_pb2.REASON_NO_WORK, (3600.0, 3600.0))
    waiting = threading.Event()

    def wait(stop: StopSignal, seconds: float) -> bool:
        waiting.set()
        return stop.wait(seconds)

    client = make_client(wait=wait)
    client.add_trainer("digits", add_one)
    thread = threading.Thread(target=client.run)
    thread.start()
    assert waiting.wait(60)
    client.stop()
    thread.join(60)
    assert not thread.is_alive()
