"""What tests ask of OpenTelemetry's spans; ids are in hexadecimal digits, as a `traceparent` has them."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def parent_id(span: ReadableSpan) -> str:
    """The id of the parent; "" for a first span."""
    return f"{span.parent.span_id:016x}" if span.parent is not None else ""


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)
