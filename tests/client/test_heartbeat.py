"""Heartbeats: they carry the progress to the server, and its deadline to the client."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, Task, TrainResult
from fedplat_client._work.heartbeat import Heartbeat
from fedplat_client.cancellation import StopSignal
from fedplat_client.task import Control
from support.clients import add_one
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]


def train_with(fleet: FakeFleet, client: Client, check: Callable[[Task], None]) -> None:
    """One task; `check` is called when the answer to a heartbeat has been taken in."""
    checked: list[Task] = []

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        task.progress(0.25)
        fleet.wait_for("Heartbeat", fleet.calls.count("Heartbeat") + 2)
        check(task)
        checked.append(task)
        return add_one(task)

    client.run(max_tasks=1)
    assert len(checked) == len(fleet.requests["Report"]) == 1


@pytest.mark.parametrize("remaining_s", [5.0, 500.0])
@pytest.mark.parametrize(("uploading", "upload_timeout_s"), [(False, 10.0), (True, 0.0)])
def test_the_servers_deadline_replaces_the_clients(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    remaining_s: float,
    uploading: bool,
    upload_timeout_s: float,
) -> None:
    """An earlier one and a later one: a server that was restarted may have either."""

    def check(task: Task) -> None:
        assert task.remaining_s == remaining_s
        assert task.control.remaining_s == remaining_s + upload_timeout_s

    fleet.proceed = fleet_pb2.Continue(remaining_s=remaining_s, uploading=uploading)
    fleet.assign(model, training_timeout_s=100.0, upload_timeout_s=10.0, heartbeat_s=0.1)
    train_with(fleet, make_client(clock=lambda: 0.0), check)


def test_a_heartbeat_carries_the_progress(fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef) -> None:
    fleet.assign(model, heartbeat_s=0.1)
    train_with(fleet, make_client(), lambda _: None)
    assert fleet.requests["Heartbeat"][-1].progress == 0.25


@pytest.mark.fault("F1")
def test_after_a_failed_heartbeat_the_server_is_asked_to_answer_at_once(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.failures["Heartbeat"] = [grpc.StatusCode.UNAVAILABLE] * 2
    fleet.assign(model, heartbeat_s=0.1)
    train_with(fleet, make_client(), lambda _: fleet.wait_for("Heartbeat", 4))
    assert [request.wait_s for request in fleet.requests["Heartbeat"][:4]] == [0.1, 0.0, 0.0, 0.1]


def test_a_training_ends_when_the_server_has_no_time_left_for_it(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.proceed = fleet_pb2.Continue(remaining_s=0.0)
    fleet.assign(model, training_timeout_s=100.0, upload_timeout_s=0.0, heartbeat_s=0.1)
    client = make_client(clock=lambda: 0.0)

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        task.control.signal.wait(60)
        task.progress(0.5)
        raise AssertionError("progress did not raise")

    with caplog.at_level("WARNING"):
        client.run(max_tasks=1)
    assert "the deadline of the assignment has passed" in caplog.text
    assert not {"Upload", "Report", "Fail"} & set(fleet.calls)


# --- trainings that may be late --------------------------------------------------------------------------------------


class Beats:
    """A connection on which a server answers heartbeats: with the planned stops, and then no more."""

    def __init__(self, *stops: model_pb2.Reason.ValueType) -> None:
        self.stops = list(stops)
        self.num_calls = 0
        self.all_said = threading.Event()

    def heartbeat(self, request: fleet_pb2.HeartbeatRequest, signal: StopSignal) -> fleet_pb2.HeartbeatResponse:
        self.num_calls += 1
        if not self.stops:
            self.all_said.set()
            signal.wait(60.0)
            signal.check()
        return fleet_pb2.HeartbeatResponse(stop=fleet_pb2.Refusal(reason=self.stops.pop(0), text="stop"))


def beat(control: Control, *stops: model_pb2.Reason.ValueType) -> Beats:
    """Heartbeats until the server has said everything, or the task is stopped."""
    beats = Beats(*stops)
    heartbeat = Heartbeat(beats, "token", 0.1, control)  # type: ignore[arg-type]
    with heartbeat, control.signal.attach(beats.all_said.set):
        assert beats.all_said.wait(60.0)
    return beats


@pytest.mark.parametrize("reason", [model_pb2.REASON_TRAIN_TIMEOUT, model_pb2.REASON_UNREACHABLE])
def test_a_training_that_may_be_late_goes_on_and_so_do_heartbeats(reason: model_pb2.Reason.ValueType) -> None:
    control = Control(0.0, 0.0, may_be_late=True)  # its deadline has passed, too
    task = Task(name="digits", parameters=Parameters.from_arrays({}), control=control)
    assert beat(control, reason, reason, reason).num_calls == 4
    assert (control.is_late, task.cancelled, task.remaining_s) == (True, False, 0.0)
    task.progress(1.0)


def test_other_orders_stop_it() -> None:
    control = Control(may_be_late=True)
    beat(control, model_pb2.REASON_TRAIN_TIMEOUT, model_pb2.REASON_JOB_CANCELLED, model_pb2.REASON_STALE)
    assert control.signal.stop is not None
    assert control.signal.stop.reason == model_pb2.REASON_JOB_CANCELLED


def test_after_it_the_steps_of_the_exchange_say_when_to_stop() -> None:
    control = Control(may_be_late=True, trained=True)
    beat(control, model_pb2.REASON_STALE, model_pb2.REASON_STALE)
    assert not control.signal.is_set()


def test_other_trainings_end_at_their_deadline() -> None:
    control = Control()
    beat(control, model_pb2.REASON_TRAIN_TIMEOUT)
    assert control.signal.is_set()


def test_a_trainer_that_does_not_return_after_the_deadline_is_named_and_the_server_knows_that_the_client_is_there(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.proceed = fleet_pb2.Continue(remaining_s=0.0)
    fleet.assign(model, training_timeout_s=100.0, upload_timeout_s=0.0, heartbeat_s=0.1)
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        task.control.signal.wait(60)
        fleet.wait_for("Heartbeat", fleet.calls.count("Heartbeat") + 2)
        return add_one(task)

    with caplog.at_level("WARNING"):
        client.run(max_tasks=1)
    assert "The task has ended (the deadline of the assignment has passed), but its trainer has not returned" in (
        caplog.text
    )
    assert not {"Report", "Fail"} & set(fleet.calls)


def test_the_server_is_told_of_a_stop_while_the_trainer_runs(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.assign(model)
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        client.stop()
        fleet.wait_for("Fail")
        return add_one(task)

    with caplog.at_level("INFO"):
        client.run()
    assert [request.reason for request in fleet.requests["Fail"]] == [model_pb2.REASON_CLIENT_STOPPED]
    assert "a second signal ends it at once" in caplog.text
    assert "Report" not in fleet.calls
