"""Tasks that end early: stopped by the server, failed by the trainer, given back by the owner."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from fedplat.errors import ModelError
from fedplat.model import Parameters
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


@pytest.mark.parametrize("call", ["Upload", "QueryUpload"])
def test_an_upload_to_an_assignment_that_has_ended_is_no_failure(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """More clients are drawn than a round needs, so that this happens in any round."""
    fleet.failures[call] = [(grpc.StatusCode.NOT_FOUND, "STALE_ASSIGNMENT")]
    if call == "QueryUpload":
        fleet.failures["Upload"] = [grpc.StatusCode.UNAVAILABLE]
    fleet.refusal = "the assignment is no longer open: SURPLUS"
    fleet.assign(model)
    client = make_client(inline_limit_bytes=0)
    client.trainer("digits")(add_one)
    with caplog.at_level(logging.INFO):
        client.run(max_tasks=1)
    assert not {"Report", "Fail"} & set(fleet.calls)
    assert "The server stopped the task" in caplog.text
    assert "the assignment is no longer open: SURPLUS" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


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


class Lazy:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("there are no values")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("and no text")


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("and no text")


class Unusual(BaseException):
    pass


class _Names(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        return "\udcfc"


class Named(Exception, metaclass=_Names):
    def __str__(self) -> str:
        return "M"


class Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Unusual("there are no values")


def gives(**fields: Any) -> Callable[[Task], Any]:
    given: dict[str, Any] = {"num_examples": 1, **fields}
    return lambda task: TrainResult(**given)


def gives_bias(value: Any) -> Callable[[Task], Any]:
    return lambda task: TrainResult(parameters={**task.parameters, "bias": value}, num_examples=1)


def raises(exc: BaseException) -> Callable[[Task], Any]:
    def train(task: Task) -> TrainResult:
        raise exc

    return train


def keeps(name: str, value: Any) -> Callable[[Task], Any]:
    def train(task: Task) -> TrainResult:
        task.client_state.put(name, value)
        return add_one(task)

    return train


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (no_result, "TypeError: 'digits' returned NoneType; expected TrainResult"),
        (another_result, "returned EvaluateResult; expected TrainResult"),
        (tensors_missing, "tensor 'steps' is missing"),
        (another_dtype, "tensor 'bias' is float64 [50]; expected float32 [50]"),
        (no_examples, "num_examples is 0"),
        (diverged, "metric 'loss' is nan"),
        (gives(parameters=[np.ones(2)]), "parameters is a list; expected Parameters, a mapping of arrays"),
        (gives(delta=(np.ones(2),)), "delta is a tuple; expected Parameters, a mapping"),
        (gives(parameters=3), "parameters is a int; expected Parameters, a mapping"),
        (gives_bias([[1.0], [2.0, 3.0]]), "tensor 'bias' (list) has no dense values in NumPy: ValueError"),
        (gives_bias(Lazy()), "tensor 'bias' (Lazy) has no dense values in NumPy: RuntimeError: there are no values"),
        (gives_bias(np.ma.zeros(50, np.float32)), "tensor 'bias' is a masked array"),
        (gives(parameters={}, metrics=["loss"]), "metrics is a list; expected a mapping"),
        (gives(parameters={}, metrics={3: 1.0}), "3 is the name of a metric, and a int; expected text"),
        (gives(parameters={}, metrics={"M\udcfc": 1.0}), r"the metric 'M\udcfc' has 2 bytes; expected"),
        (
            gives(parameters={}, metrics={"loss": 10**400}),
            "metric 'loss' is (a number of 1329 bits); expected a number",
        ),
        (gives(parameters={}, num_examples=10**5000), "num_examples is (a number of 16610 bits); expected a number"),
        (gives(parameters={}, metrics={"loss": "x" * 1000}), "xxx...; expected a number"),
        (gives(parameters={}, num_examples=Unprintable()), "num_examples is a Unprintable; expected a number"),
        (raises(ValueError("M\udcfcller.png: no image")), r"ValueError: M\xfcller.png: no image"),
        (raises(ValueError("half \ud800 of a pair")), r"ValueError: half \ud800 of a pair"),
        (raises(Silent()), "Silent: its text cannot be read, which raises RuntimeError"),
        (raises(SystemExit(2)), "SystemExit: 2"),
        (raises(asyncio.CancelledError()), "CancelledError"),
        (raises(Unusual("mine")), "Unusual: mine"),
        (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        (raises(GeneratorExit()), "GeneratorExit"),
        (raises(BaseExceptionGroup("all", [KeyboardInterrupt(), ValueError()])), "all (2 sub-exceptions)"),
        (raises(Interrupting()), "Interrupting: its text cannot be read, which raises KeyboardInterrupt"),
        (raises(Named("\udcfc")), "Named: M"),
        (gives_bias(Unreadable()), "does not fit the model: Unusual: there are no values"),
        (raises(Cancelled("MINE")), "Cancelled: MINE"),
        (keeps("a", 3), "the client state 'a' is a int; expected Parameters"),
    ],
)
def test_an_unusable_result_is_reported_at_once_and_the_client_continues(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    result: Callable[[Task], TrainResult],
    text: str,
) -> None:
    fleet.assign(model)
    fleet.assign(model, trainer="letters")
    client = make_client()
    client.add_trainer("digits", result)
    client.add_trainer("letters", add_one)
    client.run(max_tasks=2)
    (fail,) = fleet.requests["Fail"]
    assert (fail.token, fail.reason) == ("token-1", model_pb2.REASON_TRAINER_ERROR)
    assert text in fail.text
    assert [request.token for request in fleet.requests["Report"]] == ["token-2"]


def test_tensors_are_a_result_like_arrays(base: Parameters) -> None:
    torch = pytest.importorskip("torch")
    values = {name: torch.from_numpy(array.copy()) for name, array in base.items()}
    values["bias"].requires_grad_()
    result = TrainResult(parameters=values, num_examples=1)
    assert not result.to_update(base).to_vector().any()
    module = torch.nn.Linear(2, 2).to(torch.bfloat16)  # whose parameters require gradients
    start = Parameters.from_arrays(module.state_dict())
    assert start["bias"].dtype.name == "bfloat16"
    for given in (module, dict(module.named_parameters()), module.state_dict()):
        assert not TrainResult(parameters=given, num_examples=1).to_update(start).to_vector().any()


def test_a_tied_weight_is_a_result_with_all_its_names() -> None:
    torch = pytest.importorskip("torch")
    convert = pytest.importorskip("fedplat.pytorch.convert")
    module = torch.nn.ModuleDict({"words": torch.nn.Embedding(3, 2), "o": torch.nn.Linear(2, 3, bias=False)})
    module["o"].weight = module["words"].weight
    base = convert.from_state_dict(module.state_dict())
    assert list(base) == ["words.weight"]
    convert.load_into(module, base)
    with torch.no_grad():
        module["o"].weight += 1
    other = Parameters.from_arrays({"o.weight": base["words.weight"]})  # a model of another tool
    both = Parameters.from_arrays(dict.fromkeys(("words.weight", "o.weight"), base["words.weight"]))
    views = {name: value.numpy() for name, value in module.state_dict().items()}
    for given in (module, module.state_dict(), views):
        for start in (base, other, both):
            update = TrainResult(parameters=given, num_examples=1).to_update(start)
            np.testing.assert_allclose(update.to_vector(), 1.0, rtol=1e-6)
        assert TrainResult(delta=given, num_examples=1).to_update(base).schema == base.schema
    strange = {**module.state_dict(), "o.weight": torch.ones(3, 2)}
    with pytest.raises(ModelError, match=r"'o.weight' is not part of the model"):
        TrainResult(parameters=strange, num_examples=1).to_update(base)
    copies = {name: value.copy() for name, value in views.items()}
    with pytest.raises(ModelError, match=r"'o.weight' is not part of the model"):
        TrainResult(parameters=copies, num_examples=1).to_update(base)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_that_comes_back_from_a_trainer_ends(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.assign(model)
    client = make_client()
    statuses: list[int] = []

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        for status in (0, 3):
            if (child := os.fork()) == 0:
                if status:
                    sys.exit(status)
                return add_one(task)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return add_one(task)

    client.run(max_tasks=1)
    assert statuses == [0, 3]
    assert fleet.calls.count("Report") == 1


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
