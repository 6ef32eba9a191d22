"""The report of a client may have its next check-in, and the answer its next assignment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client
from support.clients import add_one
from support.fake_fleet import FakeFleet
from support.polling import PATIENCE_S

MakeClient = Callable[..., Client]


def plan(fleet: FakeFleet, model: model_pb2.ModelRef, **fields: Any) -> fleet_pb2.Assignment:
    """Plan an assignment of a server that accepts check-ins with reports; return one that is not planned."""
    for _ in range(2):
        fleet.assign(model, **({"check_in_with_report": True} | fields))
    following = fleet.work.pop().assignment
    fleet.receipts = [fleet_pb2.ReportResponse(receipt=fleet_pb2.Receipt(), next=following)]
    return following


def run(make_client: MakeClient, max_tasks: int | None) -> Client:
    client = make_client()
    client.trainer("digits")(add_one)
    client.run(max_tasks=max_tasks)
    return client


def test_the_assignment_of_an_answer_is_run_without_a_check_in(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    following = plan(fleet, model)
    run(make_client, 2)
    first, second = fleet.requests["Report"]
    assert fleet.calls.count("CheckIn") == 1
    assert second.token == following.token
    asked = fleet.requests["CheckIn"][0]
    asked.wait_s = first.check_in.wait_s
    assert first.check_in == asked
    assert not second.HasField("check_in")  # the client runs no further task


def test_an_older_server_gets_no_check_in(fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef) -> None:
    plan(fleet, model, check_in_with_report=False)
    fleet.receipts.clear()
    fleet.assign(model)
    run(make_client, 2)
    assert [request.HasField("check_in") for request in fleet.requests["Report"]] == [False, False]
    assert fleet.calls.count("CheckIn") == 2


def test_a_report_that_is_repeated_has_no_check_in(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    """Its first answer may have been lost while it waited: the receipt must come at once."""
    plan(fleet, model)
    fleet.receipts.clear()
    fleet.assign(model)
    fleet.failures["Report"] = [grpc.StatusCode.UNAVAILABLE]
    run(make_client, 2)
    assert [request.HasField("check_in") for request in fleet.requests["Report"]][-2:] == [False, False]


def test_a_client_that_is_stopped_waits_for_its_receipt_only(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(fleet, model)
    client, enter = make_client(), fleet._enter  # pyright: ignore[reportPrivateUsage]

    def stop_first(call: str, request: Any, context: Any, **options: Any) -> None:
        enter(call, request, context, **options)
        if call == "Report" and request.HasField("check_in"):
            fleet.receipts.clear()
            cancelled = threading.Event()
            context.add_callback(cancelled.set)
            client.stop()
            assert cancelled.wait(PATIENCE_S)  # a server that waits for work answers no earlier

    monkeypatch.setattr(fleet, "_enter", stop_first)
    client.trainer("digits")(add_one)
    client.run()
    assert [request.HasField("check_in") for request in fleet.requests["Report"]] == [True, False]
    assert "Fail" not in fleet.calls


def test_an_assignment_that_comes_too_late_is_given_back(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = plan(fleet, model)
    client, ends = make_client(), iter([False, True])

    def stopped_within(delay_s: float) -> bool:
        return next(ends)

    monkeypatch.setattr(client, "_stopped_within", stopped_within)
    client.trainer("digits")(add_one)
    client.run()
    (given_back,) = fleet.requests["Fail"]
    assert (given_back.token, given_back.reason) == (following.token, model_pb2.REASON_CLIENT_STOPPED)
