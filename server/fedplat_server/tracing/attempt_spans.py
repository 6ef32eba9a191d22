"""The spans of an ended attempt, with the ids of `ids` and with stored times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from typing_extensions import override

from fedplat.rounds import AttemptKey
from fedplat.rounds.states import AssignmentState, AttemptPhase
from fedplat_server import __version__
from fedplat_server.database.traces import EndedAssignment, EndedAttempt
from fedplat_server.tracing import ids

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
