"""The client's spans: below the span of the assignment that the server names, if the program uses OpenTelemetry."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, Task, TrainResult, spans
from support.clients import add_one
from support.fake_fleet import FakeFleet
from support.processes import ROOT
from support.spans import parent_id, span_id, trace_id

MakeClient = Callable[..., Client]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of a program that uses OpenTelemetry."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_the_work_is_recorded_below_the_assignment(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    recorded: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fleet.assign(model, traceparent=TRACEPARENT)
    client = make_client()
    inner: list[str] = []

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        with trace.get_tracer("of the trainer").start_as_current_span("epoch") as span:
            inner.append(f"{span.get_span_context().trace_id:032x}")
        return add_one(task)

    client.run(max_tasks=1)
    found = {span.name: span for span in recorded.get_finished_spans()}
    assert list(found) == ["download", "epoch", "train", "upload", "report"]
    assert {trace_id(span) for span in found.values()} == {TRACE_ID}
    assert inner == [TRACE_ID]
    parents = {name: parent_id(span) for name, span in found.items()}
    assert parents.pop("epoch") == span_id(found["train"])
    assert set(parents.values()) == {SPAN_ID}
    (done,) = (
        record
        for record in caplog.records
        if record.message == "The task is done and reported: round 1 of the job digits."
    )
    assert (vars(done)["trace_id"], vars(done)["job"]) == (TRACE_ID, "job-1")
    sent = {name: metadata.get("traceparent", "") for name, metadata in fleet.metadata}
    assert sent["Report"] == f"00-{TRACE_ID}-{span_id(found['report'])}-01"
    assert sent["CheckIn"] == ""


def test_an_error_is_recorded_without_its_text(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, recorded: InMemorySpanExporter
) -> None:
    fleet.assign(model, traceparent=TRACEPARENT)
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        raise ValueError("the patient's name")

    client.run(max_tasks=1)
    failed = recorded.get_finished_spans()[-1]
    assert (failed.name, failed.status.status_code, failed.status.description) == (
        "train",
        StatusCode.ERROR,
        "ValueError",
    )
    assert "patient" not in failed.to_json()


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"])
def test_without_a_recorded_assignment_nothing_is_recorded(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    recorded: InMemorySpanExporter,
    traceparent: str,
) -> None:
    fleet.assign(model, traceparent=traceparent)
    client = make_client()
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)
    assert len(fleet.requests["Report"]) == 1
    assert recorded.get_finished_spans() == ()


def test_a_program_without_opentelemetry_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(spans.sys.modules, "opentelemetry.trace")
    with spans.start(TRACEPARENT, "train"):
        assert spans.current_metadata() == ()
    assert "opentelemetry.trace" not in spans.sys.modules


def test_the_provider_of_the_page_is_one() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (block,) = (part for part in page.split("```")[1::2] if "set_tracer_provider" in part)
    program = f"{block.removeprefix('python')}\nprint(type(trace.get_tracer_provider()).__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "opentelemetry.sdk.trace"
