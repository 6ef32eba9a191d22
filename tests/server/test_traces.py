"""Traces of attempts and calls, by a real daemon, with an exporter that keeps the spans."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from structlog.testing import capture_logs
from typing_extensions import override

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_server.cli.serving import open_tracing
from fedplat_server.database.records import AttemptFilter
from fedplat_server.errors import ConfigError
from fedplat_server.tracing import attempts as attempt_traces
from fedplat_server.tracing import ids
from fedplat_server.tracing.provider import Tracing
from support import daemons
from support.daemons import RawClient, Site, initial_model, update_of
from support.jobs import job_file
from support.processes import ROOT
from support.spans import attribute, parent_id, span_id, trace_id

CALLERS_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLERS_SPAN = "00f067aa0ba902b7"


class Receiver(SpanExporter):
    """Keeps the spans that it receives, unless it refuses them."""

    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        self.refuses = False
        self.refused = 0

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.refuses:
            self.refused += 1
            return SpanExportResult.FAILURE
        return self.memory.export(spans)

    def attempts(self) -> list[ReadableSpan]:
        """The spans of whole attempts."""
        return [span for span in self.memory.get_finished_spans() if span.name.startswith("attempt ")]

    def below(self, attempt: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self.memory.get_finished_spans() if parent_id(span) == span_id(attempt)]

    async def until_attempts(self, number: int) -> list[ReadableSpan]:
        async def there() -> bool:
            return len(self.attempts()) >= number

        await daemons.until(there, f"{number} traces of attempts")
        return self.attempts()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@asynccontextmanager
async def traced(folder: Path, receiver: Receiver) -> AsyncGenerator[Site]:
    """A daemon that sends its spans to the receiver; when it stops, those of all calls were sent."""
    tracing = Tracing(receiver)
    try:
        async with daemons.running(folder, tracing=tracing) as site:
            yield site
    finally:
        await asyncio.to_thread(tracing.close)


def trace_id_of(job: str, round_: int = 1, attempt: int = 1) -> str:
    return hashlib.sha256(f"{job}/{round_}/{attempt}".encode()).hexdigest()[:32]


async def play_round(clients: list[RawClient], assignments: list[fleet_pb2.Assignment]) -> None:
    for number, (client, assignment) in enumerate(zip(clients, assignments, strict=True)):
        await client.deliver(assignment.token, update_of(initial_model(), number))


async def test_an_attempt_of_20_clients_is_one_trace(folder: Path, receiver: Receiver) -> None:
    async with traced(folder, receiver) as site:
        job = await site.operator.start(job_file(goal=20))
        clients = await site.fleet(20)
        given = await site.assign(clients)
        await play_round(clients, given)
        await site.operator.until(job, "job", "COMPLETED")
        (attempt,) = await receiver.until_attempts(1)
        (stored,) = await site.store.inner.jobs.list_attempts(AttemptFilter(job))
    below = receiver.below(attempt)
    assert {trace_id(span) for span in [attempt, *below]} == {trace_id_of(job)}
    assert attempt.parent is None
    assert attempt.name == "attempt TRAIN"
    named = [span.name for span in below]
    assert (named.count("assignment"), set(named)) == (20, {"select", "collect", "commit", "assignment"})
    assert dict(attempt.attributes or {}) == {
        "fedplat.job": job,
        "fedplat.round": 1,
        "fedplat.attempt": 1,
        "fedplat.phase": "COMMITTED",
        "fedplat.assignments.merged": 20,
    }
    # Times are those that were stored.
    assert attempt.start_time == int(stored.opened_unix_s * 1e9)
    assert attempt.end_time == int((stored.ended_unix_s or 0.0) * 1e9)
    select, collect, commit = (
        next(span for span in below if span.name == name) for name in ("select", "collect", "commit")
    )
    assert (attempt.start_time, attempt.end_time) == (select.start_time, commit.end_time)
    assert (select.end_time, collect.end_time) == (collect.start_time, commit.start_time)
    # Each client has the id of its own span as the parent of what it records.
    by_client = {attribute(span, "fedplat.client"): span for span in below if span.name == "assignment"}
    for client, assignment in zip(clients, given, strict=True):
        span = by_client[client.client_id]
        assert assignment.traceparent == f"00-{trace_id_of(job)}-{span_id(span)}-01"
        assert attribute(span, "fedplat.state") == "MERGED"
        assert span.status.status_code is StatusCode.UNSET
    assert all(span.resource.attributes["service.name"] == "fedplat-server" for span in below)


async def test_failures_and_abandoned_attempts_are_errors(folder: Path, receiver: Receiver) -> None:
    async with traced(folder, receiver) as site:
        job = await site.operator.start(job_file(goal=2))
        clients = await site.fleet(2)
        given = await site.assign(clients)
        secret = "ValueError: the patient's name"
        await clients[0].fail(given[0].token, model_pb2.REASON_TRAINER_ERROR, secret)
        (abandoned, *_) = await receiver.until_attempts(1)
        again = await site.assign(clients)
        await play_round(clients, again)
        await site.operator.until(job, "job", "COMPLETED")
        _, second = await receiver.until_attempts(2)
    assert (trace_id(abandoned), trace_id(second)) == (trace_id_of(job), trace_id_of(job, 1, 2))
    assert (abandoned.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    below = {span.name: span for span in receiver.below(abandoned)}
    assert below["collect"].status.status_code is StatusCode.ERROR
    assert "commit" not in below
    (failed,) = (span for span in receiver.below(abandoned) if span.status.description == "TRAINER_ERROR")
    assert attribute(failed, "fedplat.client") == clients[0].client_id
    # Texts of clients stay in the server's database.
    assert all("patient" not in span.to_json() for span in receiver.memory.get_finished_spans())


async def test_a_receiver_that_is_away_delays_no_round_and_loses_no_trace(
    folder: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_traces, "RETRY_S", 0.01)
    receiver.refuses = True
    with capture_logs() as lines:
        async with traced(folder, receiver) as site:
            job = await site.operator.start(job_file(goal=1, rounds=3))
            client = await site.enroll()
            for number in range(3):
                await client.deliver((await client.assignment()).token, update_of(initial_model(), number))
            await site.operator.until(job, "job", "COMPLETED")

            async def refused_often() -> bool:
                return receiver.refused >= 3

            await daemons.until(refused_often, "several refusals")
            receiver.refuses = False
            found = await receiver.until_attempts(3)
    assert [trace_id(span) for span in found] == [trace_id_of(job, number) for number in (1, 2, 3)]
    told = [line["event"] for line in lines if line["event"].startswith("traces ")]
    assert told == ["traces cannot be sent; check the receiver at --traces", "traces are sent again"]


async def test_an_exporter_with_a_bug_stops_nothing(folder: Path, receiver: Receiver) -> None:
    async def no_round_fails(site: Site) -> None:
        job = await site.operator.start(job_file(goal=1))
        client = await site.enroll()
        await client.deliver((await client.assignment()).token, update_of(initial_model(), 0))
        await site.operator.until(job, "job", "COMPLETED")

    def fail(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("an invented bug")

    receiver.export = fail
    async with traced(folder, receiver) as site:
        await no_round_fails(site)


async def test_what_was_not_sent_is_sent_after_a_restart_and_nothing_twice(folder: Path, receiver: Receiver) -> None:
    receiver.refuses = True
    async with traced(folder, receiver) as site:
        job = await site.operator.start(job_file(goal=1, rounds=3))
        client = await site.enroll(key="the-one-client")
        await client.deliver((await client.assignment()).token, update_of(initial_model(), 0))
        await site.operator.until(job, "version", "1")
        assignment = await client.assignment()  # round 2 continues after the restart
    receiver.refuses = False
    async with traced(folder, receiver) as site:
        client = await site.enroll(key="the-one-client")
        assert trace_id((await receiver.until_attempts(1))[0]) == trace_id_of(job)
        reclaimed = await client.assignment()
        assert reclaimed.traceparent == assignment.traceparent
        await client.deliver(reclaimed.token, update_of(initial_model(), 1))
        await site.operator.until(job, "version", "2")
        await receiver.until_attempts(2)
    async with traced(folder, receiver) as site:
        client = await site.enroll(key="the-one-client")
        await client.deliver((await client.assignment()).token, update_of(initial_model(), 2))
        await site.operator.until(job, "job", "COMPLETED")
        found = await receiver.until_attempts(3)
    assert [trace_id(span) for span in found] == [trace_id_of(job, number) for number in (1, 2, 3)]
    (second,) = (span for span in receiver.below(found[1]) if span.name == "assignment")
    assert assignment.traceparent.split("-")[2] == span_id(second)


async def test_tracing_begins_with_the_attempts_after_it_was_switched_on(folder: Path, receiver: Receiver) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file(goal=1, rounds=2))
        client = await site.enroll(key="the-one-client")
        assignment = await client.assignment()
        assert assignment.traceparent == ""
        await client.deliver(assignment.token, update_of(initial_model(), 0))
        await site.operator.until(job, "version", "1")
        assert not (folder / attempt_traces.FILE_NAME).exists()
    async with traced(folder, receiver) as site:
        client = await site.enroll(key="the-one-client")
        await client.deliver((await client.assignment()).token, update_of(initial_model(), 1))
        await site.operator.until(job, "job", "COMPLETED")
        await receiver.until_attempts(1)
    assert [trace_id(span) for span in receiver.attempts()] == [trace_id_of(job, 2)]


async def test_a_damaged_mark_is_replaced(folder: Path, receiver: Receiver) -> None:
    (folder / attempt_traces.FILE_NAME).write_bytes(b"\xff" * 1000)
    async with traced(folder, receiver):
        pass
    assert (folder / attempt_traces.FILE_NAME).read_text().strip().isdigit()


async def test_each_call_is_a_trace_of_its_own_with_a_link_to_its_caller(folder: Path, receiver: Receiver) -> None:
    async with traced(folder, receiver) as site:
        job = await site.operator.start(job_file(goal=1))
        client = await site.enroll()
        assignment = await client.assignment()
        request = fleet_pb2.ReportRequest(token=assignment.token, digest="0" * 64, num_examples=1.0)
        for value in (f"00-{CALLERS_TRACE}-{CALLERS_SPAN}-01", "00-0-0-01" + "x" * 5000):
            metadata = (*client.signed("Report", request), ("traceparent", value))
            with pytest.raises(aio.AioRpcError):
                await client.stub.Report(request, metadata=metadata)
        with pytest.raises(aio.AioRpcError):
            await client.download("f" * 64)
    calls = [span for span in receiver.memory.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert all(span.parent is None for span in calls)
    assert len({trace_id(span) for span in calls}) == len(calls)
    named: Callable[[str], list[ReadableSpan]] = lambda name: [  # noqa: E731
        span for span in calls if span.name == f"fedplat.wire.v1.Fleet/{name}"
    ]
    linked, other = named("Report")
    assert [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in linked.links] == [
        (CALLERS_TRACE, CALLERS_SPAN),
        tuple(assignment.traceparent.split("-")[1:3]),
    ]
    assert len(other.links) == 1
    assert attribute(linked, "rpc.response.status_code") == "ABORTED"
    assert attribute(linked, "fedplat.job") == job
    assert attribute(linked, "fedplat.client") == client.client_id
    (check_in,) = named("CheckIn")
    assert (attribute(check_in, "rpc.response.status_code"), check_in.status.status_code) == ("OK", StatusCode.UNSET)
    (download,) = named("Download")
    assert attribute(download, "rpc.response.status_code") == "NOT_FOUND"
    assert not any("Health" in span.name for span in calls)
    assert all(assignment.token not in span.to_json() for span in calls)


def test_of_many_clients_about_a_hundred_are_asked_to_record() -> None:
    cohort = [AssignmentId(AttemptKey("j-1", 1, 1), f"c-{number}") for number in range(10_000)]
    flags = [ids.traceparent(assignment, len(cohort))[-2:] for assignment in cohort]
    assert set(flags) == {"00", "01"}
    assert abs(flags.count("01") - 100) < 5 * 10  # five standard deviations
    assert {ids.traceparent(assignment, 100)[-2:] for assignment in cohort[:100]} == {"01"}


def test_the_trace_id_is_computed_as_the_page_shows() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("printf %s j-"))
    printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == f"{ids.trace_id(AttemptKey('j-0123456789ab', 12, 1)):032x}"


def test_without_the_option_nothing_of_opentelemetry_is_imported() -> None:
    script = (
        "import sys, fedplat_server.cli.commands, fedplat_server.daemon, fedplat_client.commands\n"
        "from fedplat_server.cli.serving import open_tracing\n"
        "assert open_tracing('') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("collector:4317", {}, "expected the URL of an OTLP/gRPC receiver"),
        ("http://collector:4317/v1/traces", {}, "expected the URL of an OTLP/gRPC receiver"),
        ("http://:4317", {}, "expected the URL of an OTLP/gRPC receiver"),
        ("http://collector:port", {}, "the port is not a number"),
        ("http://user:secret@collector:4317", {}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://collector:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "by gRPC only"),
    ],
)
def test_a_wrong_receiver_is_refused(url: str, environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        open_tracing(url, environment)
    assert "secret" not in str(refused.value)


def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match=r"a variable OTEL_... is not valid .*soon"):
        open_tracing("http://collector:4317")


@pytest.mark.parametrize("environment", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_variables_of_opentelemetry_disable_it(environment: dict[str, str]) -> None:
    assert open_tracing("http://collector:4317", environment) is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedplat_server.tracing.provider", None)
    with pytest.raises(ConfigError, match="opentelemetry-sdk"):
        open_tracing("http://collector:4317", {})
