"""Whole tasks against a scripted server on a real socket."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import fedplat_client
from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import (
    Client,
    EnrollmentError,
    EvaluateResult,
    IncompatibleServerError,
    Task,
    TrainResult,
)
from fedplat_client.cancellation import StopSignal
from support.clients import add_one
from support.fake_fleet import FakeFleet, serving

MakeClient = Callable[..., Client]


def update_of(fleet: FakeFleet, index: int = 0) -> Parameters:
    return Parameters.from_bytes(fleet.uploads[fleet.requests["Report"][index].digest])


def test_one_whole_task(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, delays: list[float]
) -> None:
    config = {
        "epochs": model_pb2.Value(int_value=3),
        "learning_rate": model_pb2.Value(double_value=0.5),
        "nesterov": model_pb2.Value(bool_value=True),
        "mode": model_pb2.Value(string_value="fast"),
    }
    assignment = fleet.assign(model, round=4, attempt=2, config=config)
    seen: list[Task] = []
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        seen.append(task)
        np.testing.assert_array_equal(task.parameters["weight"], base["weight"])
        assert 0 < task.remaining_s <= 60
        assert not task.cancelled
        task.progress(0.5)
        task.parameters["weight"] *= np.float32(3)
        task.parameters["steps"] += 5
        loss: Any = np.float32(0.25)
        return TrainResult(parameters=task.parameters, num_examples=12, metrics={"loss": loss})

    client.run(max_tasks=1)

    (task,) = seen
    assert (task.name, task.job_id, task.job_name, task.round, task.attempt) == ("digits", "job-1", "digits", 4, 2)
    assert task.config == {"epochs": 3, "learning_rate": 0.5, "nesterov": True, "mode": "fast"}
    assert [call for call in fleet.calls if call != "Heartbeat"] == [
        "Enroll",
        "CheckIn",
        "Download",
        "Upload",
        "Report",
    ]
    (enroll,) = fleet.requests["Enroll"]
    assert (enroll.population, dict(enroll.labels), enroll.protocol_version) == (
        "demo",
        {"region": "eu"},
        wire.PROTOCOL_VERSION,
    )
    (check_in,) = fleet.requests["CheckIn"]
    assert (check_in.trainers, check_in.evaluators, check_in.software_version) == (
        ["digits"],
        [],
        fedplat_client.__version__,
    )
    (report,) = fleet.requests["Report"]
    assert (report.token, report.num_examples, dict(report.metrics)) == (assignment.token, 12, {"loss": 0.25})
    update = update_of(fleet)
    np.testing.assert_array_equal(update["weight"], base["weight"] * np.float32(3) - base["weight"])
    np.testing.assert_array_equal(update["bias"], np.zeros(50, np.float32))
    assert update["steps"] == 12  # carried, not subtracted
    assert delays == []


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_delta_is_sent_as_it_is(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, as_mapping: bool
) -> None:
    fleet.assign(model)
    delta = {name: np.full_like(value, 2) for name, value in reversed(list(base.items()))}
    client = make_client()
    given = delta if as_mapping else Parameters.from_arrays(delta)
    client.add_trainer("digits", lambda task: TrainResult(delta=given, num_examples=1))
    client.run(max_tasks=1)
    update = update_of(fleet)
    assert update.schema == base.schema
    for name, value in delta.items():
        np.testing.assert_array_equal(update[name], value)


def test_an_evaluation_uploads_nothing(fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef) -> None:
    fleet.assign(model, task=fleet_pb2.TASK_EVALUATE)
    client = make_client()

    @client.evaluator("digits")
    def evaluate(task: Task) -> EvaluateResult:
        return EvaluateResult(num_examples=7, metrics={"accuracy": 0.75})

    client.run(max_tasks=1)
    assert "Upload" not in fleet.calls
    (report,) = fleet.requests["Report"]
    assert (report.digest, report.num_examples, dict(report.metrics)) == ("", 7, {"accuracy": 0.75})
    assert fleet.requests["CheckIn"][0].evaluators == ["digits"]


def test_an_unchanged_model_is_downloaded_once_even_across_restarts(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    for _ in range(3):
        fleet.assign(model)
    for num_tasks in (2, 1):
        client = make_client()
        client.add_trainer("digits", add_one)
        client.run(max_tasks=num_tasks)
    assert fleet.calls.count("Report") == 3
    assert fleet.calls.count("Download") == 1
    assert fleet.calls.count("Enroll") == 1


@pytest.mark.fault("F32")
def test_the_retry_window_of_a_refusal_is_honoured(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, delays: list[float]
) -> None:
    for _ in range(20):
        fleet.refuse(model_pb2.REASON_NOT_SELECTED, (10.0, 30.0))
    fleet.refuse(model_pb2.REASON_NO_WORK, (0.0, 0.0))
    fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    assert len(delays) == 20
    assert all(10 <= delay <= 30 for delay in delays)
    assert max(delays) - min(delays) > 5  # drawn, not fixed


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
@pytest.mark.fault("F19")
def test_an_unusable_server_is_waited_for_with_back_off(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    delays: list[float],
    code: grpc.StatusCode,
) -> None:
    fleet.failures["Enroll"] = [code] * 3
    fleet.failures["CheckIn"] = [code] * 30
    fleet.assign(model)
    client = make_client(first_backoff_s=1.0, max_backoff_s=8.0)
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    assert len(delays) == 33
    assert all(delay <= min(8.0, 2.0**n) for n, delay in enumerate(delays))
    assert fleet.calls.count("Report") == 1
    assert len({request.idempotency_key for request in fleet.requests["Enroll"]}) == 1


@pytest.mark.parametrize(("said", "earliest"), [("20 30", 20.0), ("nonsense", 0.0), ("nan nan", 0.0), ("1 2 3", 0.0)])
@pytest.mark.fault("F7", "F9", "F32")
def test_a_server_that_says_when_to_come_back_is_not_asked_before(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    delays: list[float],
    said: str,
    earliest: float,
) -> None:
    for call in ("Enroll", "CheckIn", "Report"):
        fleet.failures[call] = [grpc.StatusCode.RESOURCE_EXHAUSTED]
    fleet.retry = said
    fleet.assign(model)
    client = make_client(first_backoff_s=1.0, max_backoff_s=8.0)
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    assert len(delays) == 3
    assert all(earliest <= delay <= max(earliest + 10.0, 1.0) for delay in delays)


def test_a_server_that_forgot_the_client_gets_it_enrolled_again(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, delays: list[float]
) -> None:
    fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    fleet.clients.clear()
    fleet.sessions.clear()
    fleet.assign(model)
    client.run(max_tasks=1)
    assert fleet.calls.count("Report") == 2
    keys = [request.idempotency_key for request in fleet.requests["Enroll"]]
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert delays == []


def test_a_client_that_stays_unknown_leads_to_back_off(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, delays: list[float]
) -> None:
    fleet.failures["CheckIn"] = [(grpc.StatusCode.UNAUTHENTICATED, "CLIENT_UNKNOWN")] * 4
    fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    assert fleet.calls.count("Enroll") == 5
    assert len(delays) == 3  # the first time, to enroll again may be all it takes


def test_a_client_that_is_known_for_check_ins_only_leads_to_back_off(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, delays: list[float]
) -> None:
    fleet.failures["Download"] = [(grpc.StatusCode.UNAUTHENTICATED, "CLIENT_UNKNOWN")] * 3
    for _ in range(4):
        fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=4)
    assert fleet.calls.count("Report") == 1
    assert len(delays) == 2


@pytest.mark.fault("F28")
def test_another_protocol_version_ends_the_client_with_the_servers_text(
    fleet: FakeFleet, make_client: MakeClient
) -> None:
    fleet.failures["CheckIn"] = [grpc.StatusCode.FAILED_PRECONDITION]
    client = make_client()
    client.add_trainer("digits", add_one)
    with pytest.raises(IncompatibleServerError, match="planned for CheckIn"):
        client.run()


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED])
def test_a_refused_enrollment_ends_the_client(fleet: FakeFleet, make_client: MakeClient, code: grpc.StatusCode) -> None:
    fleet.failures["Enroll"] = [code]
    client = make_client()
    client.add_trainer("digits", add_one)
    with pytest.raises(EnrollmentError, match=r"population 'demo'.*planned for Enroll"):
        client.run()


@pytest.mark.parametrize("fault", ["lost reply", "unavailable"])
@pytest.mark.fault("F12")
def test_a_report_is_repeated_until_there_is_an_answer(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, fault: str
) -> None:
    if fault == "lost reply":
        fleet.lost_replies["Report"] = 2
    else:
        fleet.failures["Report"] = [grpc.StatusCode.UNAVAILABLE] * 2
    fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    first, *others = fleet.requests["Report"]
    assert others == [first, first]
    assert fleet.calls.count("Upload") == 1
    assert "Fail" not in fleet.calls


@pytest.mark.parametrize(
    "reason", [model_pb2.REASON_REJECTED_SCHEMA, model_pb2.REASON_STALE, model_pb2.REASON_TRAIN_TIMEOUT]
)
@pytest.mark.fault("F25")
def test_a_refused_report_is_not_repeated(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    delays: list[float],
    reason: model_pb2.Reason.ValueType,
) -> None:
    refusal = fleet_pb2.Refusal(reason=reason, text="no", retry=model_pb2.RetryWindow(min_s=5, max_s=6))
    fleet.receipts = [fleet_pb2.ReportResponse(refusal=refusal)]
    fleet.assign(model)
    fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=2)
    assert fleet.calls.count("Report") == 2
    assert len(delays) == 1
    assert 5 <= delays[0] <= 6


@pytest.mark.fault("F15")
def test_an_assignment_that_is_handed_out_again_is_worked_on(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.assign(model, token="same")
    fleet.assign(model, token="same")
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=2)
    assert [request.token for request in fleet.requests["Report"]] == ["same", "same"]


def test_a_restarted_server_is_found_again_by_a_client_that_waits(
    fleet: FakeFleet, make_client: MakeClient, base: Parameters
) -> None:
    """Real time: the first server goes away under a pending check-in, another comes back at its address."""
    first = FakeFleet()
    with serving(first) as there:
        fleet.port = there.port
        client = make_client(wait=StopSignal.wait, first_backoff_s=0.02, max_backoff_s=0.1)
        client.add_trainer("digits", add_one)
        thread = threading.Thread(target=client.run, args=[1])
        thread.start()
        first.wait_for("CheckIn")
    second = FakeFleet()
    second.clients = first.clients
    second.assign(second.add_model(base))
    with serving(second, first.port):
        thread.join(60)
        assert not thread.is_alive()
    assert second.calls.count("Report") == 1
    assert "Enroll" not in second.calls


def test_mistakes_in_the_callers_code_are_named(make_client: MakeClient) -> None:
    client = make_client()
    with pytest.raises(ValueError, match="no trainer and no evaluator"):
        client.run()
    client.add_trainer("digits", add_one)
    with pytest.raises(ValueError, match="trainer 'digits' exists already"):
        client.add_trainer("digits", add_one)
    with pytest.raises(ValueError, match="needs a name and a function"):
        client.add_trainer("letters", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tasks is -1"):
        client.run(max_tasks=-1)
    labels: Any = {"memory_mb": 4096}
    with pytest.raises(ValueError, match="label 'memory_mb' is 4096; expected text"):
        Client("localhost:1", population="demo", labels=labels)
    with pytest.raises(ValueError, match="is not a valid server or population name"):
        Client("localhost:1", population="")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"labels": {"city": "M\udcfcnchen"}}, r"the label 'city=M\xfcnchen' is not valid UTF-8"),
        ({"population": "M\udcfcnchen"}, r"the population 'M\xfcnchen' is not valid UTF-8"),
        ({"server": "M\udcfcnchen:1"}, r"the server 'M\xfcnchen:1' is not valid UTF-8"),
        ({"trainer": "M\udcfcnchen"}, r"the name of the trainer 'M\xfcnchen' is not valid UTF-8"),
    ],
)
def test_text_of_another_encoding_is_refused_in_a_sentence(fields: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"server": "localhost:1", "population": "demo", "trainer": "digits"} | fields
    trainer = given.pop("trainer")
    with pytest.raises(ValueError, match=f"^{re.escape(text)}; write it in UTF-8$"):
        Client(**given).add_trainer(trainer, add_one)


def test_a_trainer_may_change_the_current_folder(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        fleet.assign(model)
    monkeypatch.chdir(tmp_path)
    client = make_client(Path("data"))

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        os.chdir("/")
        return add_one(task)

    client.run(max_tasks=2)
    assert (fleet.calls.count("Download"), fleet.calls.count("Report")) == (1, 2)
