"""The spans of this process in OpenTelemetry, and those of ended attempts. No other module imports OpenTelemetry.

The span of a call is recorded when the call ends, and sent in the background: the queue has a limit, and what exceeds
it is dropped. The spans of attempts are made from stored rows by `export`, whose caller repeats what was not sent.

Nothing that a client sends becomes a parent of spans: its `traceparent` is a link of the call's span.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.states import AssignmentState, AttemptPhase
from fedplat_server import __version__, logs
from fedplat_server.database.sql_traces import EndedAssignment, EndedAttempt
from fedplat_server.tracing import ids

CLOSE_S = 1.0
"""Time for the spans of calls to be sent when the process ends."""
# Statuses that are faults of a server, as OpenTelemetry's conventions for gRPC define.
_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """The tracing of a process. `exporter` sends spans; it is called in threads, one call at a time."""

    def __init__(self, exporter: SpanExporter, *, schedule_delay_ms: float | None = None) -> None:
        """`schedule_delay_ms` is the interval in which spans of calls are sent; None: that of the SDK."""
        self._exporter = _LoggedExporter(exporter)
        # The SDK's variables may name the service otherwise.
        given = Resource.create({SERVICE_VERSION: __version__})
        is_named = not str(given.attributes[SERVICE_NAME]).startswith("unknown_service")
        resource = given if is_named else given.merge(Resource({SERVICE_NAME: "fedplat-server"}))
        self._calls = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._calls.add_span_processor(BatchSpanProcessor(self._exporter, schedule_delay_millis=schedule_delay_ms))
        self._call_tracer = self._calls.get_tracer(SCOPE, __version__)
        self._attempts = AttemptSpans(resource)

    @classmethod
    def open(cls, url: str) -> Tracing:
        """Return a tracing that sends spans to an OTLP/gRPC receiver; the SDK's variables have the other settings."""
        # `_LoggedExporter` logs failures, once.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(logging.CRITICAL)
        return cls(OTLPSpanExporter(endpoint=url))

    @contextlib.contextmanager
    def call(self, method: str, metadata: Mapping[str, str | bytes], find_status: Callable[[], str]) -> Generator[None]:
        """Make a span of a call. `find_status` returns the name of its gRPC status at its end.

        Log lines of the call get the ids of the span.
        """
        name = method.lstrip("/")
        attributes = {"rpc.system.name": "grpc", "rpc.method": name}
        span = self._call_tracer.start_span(
            name, Context(), trace.SpanKind.SERVER, attributes, links=_read_links(metadata)
        )
        own = span.get_span_context()
        logs.bind(trace_id=ids.format_trace_id(own.trace_id), span_id=ids.format_span_id(own.span_id))
        status = "CANCELLED"
        try:
            yield
            status = find_status()
        except Exception:
            status = find_status()
            raise
        finally:
            _end_call(span, status)

    def export(self, attempts: Sequence[EndedAttempt]) -> bool:
        """Send the traces of attempts; return whether they were received. Blocks: call it in a thread."""
        spans = self._attempts.make(attempts)
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Send what is left for up to `CLOSE_S`, and end the exporter. Blocks: call it in a thread."""
        timer = threading.Timer(CLOSE_S, self._exporter.abort)
        timer.start()
        self._calls.shutdown()
        timer.cancel()
        self._exporter.abort()


class _LoggedExporter(SpanExporter):
    """Passes spans on, one call at a time; logs when they can no longer be sent, and when they can again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._failed = self._aborted = False

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            if self._aborted:
                return SpanExportResult.FAILURE
            try:
                result = self._inner.export(spans)
            except Exception as exc:  # a task boundary: tracing must not stop the server
                self._note(failed=True, error=f"{type(exc).__name__}: {exc}")
                return SpanExportResult.FAILURE
            self._note(failed=result is not SpanExportResult.SUCCESS)
            return result

    def abort(self) -> None:
        """End the call in progress, and refuse later ones."""
        if not self._aborted:
            self._aborted = True
            self._inner.shutdown()

    @override
    def shutdown(self) -> None:
        """Do nothing: `abort` has ended the inner exporter."""

    @override
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def _note(self, *, failed: bool, error: str = "the receiver did not accept them") -> None:
        if failed and not self._failed and not self._aborted:
            logs.get().warning("traces cannot be sent; check the receiver at --traces", error=error)
        elif self._failed and not failed:
            logs.get().info("traces are sent again")
        self._failed = failed


def _read_links(metadata: Mapping[str, str | bytes]) -> list[trace.Link]:
    """Return a link to the caller's span, if the call names a valid one."""
    value = metadata.get("traceparent")
    if not isinstance(value, str):
        return []
    caller = trace.get_current_span(_PROPAGATOR.extract({"traceparent": value}, Context())).get_span_context()
    return [trace.Link(caller)] if caller.is_valid else []


def _end_call(span: trace.Span, status: str) -> None:
    """End the span of a call; what its log lines name become attributes, and a link to the assignment."""
    span.set_attribute("rpc.response.status_code", status)
    if status in _FAULTS:
        span.set_status(trace.StatusCode.ERROR)
    known = structlog.contextvars.get_contextvars()
    for name in ("job", "round", "attempt", "client"):
        if name in known:
            span.set_attribute(f"fedplat.{name}", known[name])
    if {"job", "round", "attempt", "client"} <= known.keys():
        key = AttemptKey(known["job"], known["round"], known["attempt"])
        assignment = AssignmentId(key, known["client"])
        span.add_link(span_context(key, ids.assignment_span_id(assignment)))
    span.end()


SCOPE = "fedplat_server"
"""The name of the library that makes the spans."""
_PHASES = {
    AttemptPhase.SELECTING: "select",
    AttemptPhase.ADVERTISING: "advertise",
    AttemptPhase.SHARING: "share",
    AttemptPhase.COLLECTING: "collect",
    AttemptPhase.CONFIRMING: "confirm",
    AttemptPhase.UNMASKING: "unmask",
    AttemptPhase.EXCHANGING: "exchange",
    AttemptPhase.REDUCING: "reduce",
    AttemptPhase.COMMITTING: "commit",
}
_FAILED = frozenset({AssignmentState.FAILED, AssignmentState.REJECTED, AssignmentState.LATE})


class AttemptSpans:
    """Makes the spans of attempts. All attempts are sampled: there is one trace for each."""

    def __init__(self, resource: Resource) -> None:
        self._ids, self._ended = _NextIds(), _EndedSpans()
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(SCOPE, __version__)

    def make(self, attempts: Sequence[EndedAttempt]) -> list[ReadableSpan]:
        """Return the spans of attempts; an attempt without phases has none."""
        self._ended.spans = []
        for attempt in attempts:
            if attempt.phases:
                self._add_attempt(attempt)
            for assignment in attempt.assignments:
                self._add(_describe_assignment(assignment))
        return self._ended.spans

    def _add_attempt(self, attempt: EndedAttempt) -> None:
        key, phases = attempt.key, attempt.phases
        attributes: dict[str, str | int] = {**_attributes(key), "fedplat.phase": phases[-1].phase}
        attributes |= {f"fedplat.assignments.{state.lower()}": count for state, count in attempt.counts.items()}
        abandoned = phases[-1].phase is AttemptPhase.ABANDONED
        error = "the attempt was abandoned" if abandoned else ""  # its reason may have a text of a client
        times = phases[0].unix_s, phases[-1].unix_s
        whole = _Span(f"attempt {attempt.kind}", key, ids.attempt_span_id(key), times, attributes, error)
        self._add(whole, is_root=True)
        for start, end in itertools.pairwise(phases):
            times = start.unix_s, end.unix_s
            problem = error if end.phase is AttemptPhase.ABANDONED else ""
            span_id = ids.phase_span_id(key, start.phase)
            self._add(_Span(_PHASES[start.phase], key, span_id, times, _attributes(key), problem))

    def _add(self, made: _Span, *, is_root: bool = False) -> None:
        self._ids.trace_id, self._ids.span_id = ids.trace_id(made.key), made.span_id
        context = Context()
        if not is_root:
            parent = trace.NonRecordingSpan(span_context(made.key, ids.attempt_span_id(made.key)))
            context = trace.set_span_in_context(parent, context)
        start_ns, end_ns = (int(each * 1e9) for each in made.unix_s)
        span = self._tracer.start_span(made.name, context, attributes=made.attributes, start_time=start_ns)
        if made.error:
            span.set_status(trace.StatusCode.ERROR, made.error)
        span.end(max(start_ns, end_ns))  # the wall clock may have been set back


class _Span(NamedTuple):
    """A span of an attempt: its first and its last moment, and the error that it ended with, if any."""

    name: str
    key: AttemptKey
    span_id: int
    unix_s: tuple[float, float]
    attributes: Mapping[str, str | int]
    error: str


class _NextIds(IdGenerator):
    """Gives the next span the ids that were set before."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 1

    @override
    def generate_trace_id(self) -> int:
        return self.trace_id

    @override
    def generate_span_id(self) -> int:
        return self.span_id

    @override
    def is_trace_id_random(self) -> bool:
        return True  # the bits of a hash


class _EndedSpans(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    @override
    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def span_context(key: AttemptKey, span_id: int) -> trace.SpanContext:
    """Return the context of a span in the trace of an attempt."""
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(ids.trace_id(key), span_id, is_remote=True, trace_flags=flags)


def _describe_assignment(assignment: EndedAssignment) -> _Span:
    key = assignment.id.attempt
    attributes: dict[str, str | int] = {
        **_attributes(key),
        "fedplat.client": assignment.id.client_id,
        "fedplat.state": assignment.state,
        "fedplat.base_version": assignment.base_version,
        "fedplat.update_bytes": assignment.update_bytes,
    }
    if assignment.reason:
        attributes["fedplat.reason"] = assignment.reason
    error = (assignment.reason or assignment.state) if assignment.state in _FAILED else ""
    times = assignment.assigned_unix_s, assignment.ended_unix_s
    return _Span("assignment", key, ids.assignment_span_id(assignment.id), times, attributes, error)


def _attributes(key: AttemptKey) -> dict[str, str | int]:
    return {"fedplat.job": key.job_id, "fedplat.round": key.round, "fedplat.attempt": key.number}
