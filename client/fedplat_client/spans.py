"""Spans of an assignment in OpenTelemetry, as children of the span that the server made for it.

They are recorded if the program itself uses OpenTelemetry: it has imported it and set a tracer provider. Otherwise
nothing is imported.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator
from typing import TypeAlias

from fedplat_client._version import __version__

Start: TypeAlias = Callable[[str], contextlib.AbstractContextManager[object]]
"""A function that starts a span of this name."""
_TRACEPARENT = re.compile("00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_NO_SPAN = contextlib.nullcontext()
_TRACE_MODULE = "opentelemetry.trace"


def start(traceparent: str, name: str) -> contextlib.AbstractContextManager[object]:
    """Start a span of an assignment, which is the current one in this thread until the context ends."""
    if _TRACE_MODULE not in sys.modules or not read_trace_id(traceparent):
        return _NO_SPAN
    return _record(traceparent, name)


@contextlib.contextmanager
def _record(traceparent: str, name: str) -> Generator[None]:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    tracer = trace.get_tracer("fedplat_client", __version__)
    with tracer.start_as_current_span(name, parent, record_exception=False, set_status_on_exception=False) as span:
        try:
            yield
        except BaseException as exc:
            # Only the type: the text of an error may hold examples of the client's data.
            span.set_status(trace.StatusCode.ERROR, type(exc.__cause__ or exc).__name__)
            raise


def read_trace_id(traceparent: str) -> str:
    """Return the trace id of a `traceparent`; "" if that is empty or not valid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found is not None else ""


def current_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata with which a call names the current span to the server, if that is recorded."""
    if _TRACE_MODULE not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return (("traceparent", carrier["traceparent"]),) if "traceparent" in carrier else ()
