"""A receiver of OpenTelemetry's spans on a real socket (OTLP over gRPC)."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from typing_extensions import override

SERVER = "fedplat-server"


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it receives; refuses those of a server while it is `away`."""

    def __init__(self) -> None:
        self.address = ""
        self.away = threading.Event()
        self.refused = threading.Event()
        self.headers: list[dict[str, Any]] = []
        self._spans: list[tuple[str, Span]] = []

    @override
    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
        self.headers.append(dict(context.invocation_metadata()))
        for resource in request.resource_spans:
            service = next(
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            if self.away.is_set() and service == SERVER:
                self.refused.set()
                context.abort(grpc.StatusCode.UNAVAILABLE, "the receiver is away, says the test")
            self._spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def received(self) -> list[tuple[str, Span]]:
        """Every span, with the service that has sent it."""
        return list(self._spans)

    def spans(self, trace_id: bytes, service: str = SERVER) -> list[Span]:
        """The spans of a trace that a service has sent."""
        return [span for sender, span in self.received() if span.trace_id == trace_id and sender == service]


@contextmanager
def receiving() -> Generator[Receiver]:
    """A receiver that runs."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
