"""The scripted server's port of gRPC, without TLS.

Frames and connections belong to the gRPC library of a client. What its program sees of a connection that breaks, or of
a proxy's page, is a status without `fedplat-code`: so that is what this port answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from typing_extensions import override

from fedplat import wire
from fedplat.testing.wire.calls import PATH, STATUSES, Request
from fedplat.testing.wire.fleet import ScriptedAnswer, ScriptedFleet
from fedplat.testing.wire.serving import ScriptedServer
from fedplat.wire import auth
from fedplat.wire.v1 import fleet_pb2, model_pb2

_MAX_CALLS = 32
_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)
_PAGE_STATUSES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INTERNAL,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.UNAVAILABLE,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}
"""What gRPC makes of a page's status (https://github.com/grpc/grpc, doc/http-grpc-status-mapping.md)."""


class GrpcServer(ScriptedServer):
    """Serves a fleet over gRPC."""

    def __init__(self, fleet: ScriptedFleet, kill: Callable[[], None]) -> None:
        super().__init__(fleet, kill)
        self._server = grpc.server(futures.ThreadPoolExecutor(_MAX_CALLS, "conformance"), options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_Methods(self),))
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    @override
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @contextlib.contextmanager
    @override
    def running(self) -> Generator[None]:
        self._server.start()
        try:
            yield
        finally:
            self._is_closing.set()
            self._server.stop(None).wait()


class _Methods(grpc.GenericRpcHandler):
    """The handlers of all methods, with serialized messages."""

    def __init__(self, scripted: ScriptedServer) -> None:
        self._scripted = scripted

    @override
    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any]:
        method: str = handler_call_details.method.removeprefix(PATH)

        def call(request: bytes, context: Any) -> bytes:
            return self._answer(context, self._take(method, context, request)).body

        def download(request: bytes, context: Any) -> Iterator[bytes]:
            answer = self._answer(context, self._take(method, context, request))
            body = answer.body if answer.cut_after is None else answer.body[: answer.cut_after]
            for start in range(0, len(body), wire.CHUNK_BYTES):
                yield model_pb2.Chunk(data=body[start : start + wire.CHUNK_BYTES]).SerializeToString()
            if answer.cut_after is not None:
                _break(context)

        def upload(requests: Iterator[bytes], context: Any) -> bytes:
            try:
                message = next(requests, b"")
                octets, misfit = _read_octets(requests, self._scripted.octet_limit(method))
            except grpc.RpcError:
                return b""  # the client has ended the call
            return self._answer(context, self._take(method, context, message, octets, misfit)).body

        if method == "Upload":
            return grpc.stream_unary_rpc_method_handler(upload)
        if method == "Download":
            return grpc.unary_stream_rpc_method_handler(download)
        return grpc.unary_unary_rpc_method_handler(call)

    def _take(self, method: str, context: Any, message: bytes, octets: bytes = b"", misfit: str = "") -> ScriptedAnswer:
        metadata = {each.key: each.value for each in context.invocation_metadata()}
        return self._scripted.take(Request(method, metadata, message, time.monotonic(), octets, misfit))

    @staticmethod
    def _answer(context: Any, answer: ScriptedAnswer) -> ScriptedAnswer:
        """Return an answer that has a body; end the call with the status of any other one."""
        if answer.is_lost:
            _break(context)
        if answer.proxy_status:
            status = _PAGE_STATUSES.get(answer.proxy_status, grpc.StatusCode.UNKNOWN)
            context.abort(status, f"Received http2 header with status: {answer.proxy_status}")
        if (refusal := answer.refusal) is not None:
            metadata = [(auth.METADATA_CODE, refusal.code)]
            if refusal.retry is not None:
                metadata.append((wire.METADATA_RETRY, f"{refusal.retry[0]} {refusal.retry[1]}"))
            context.set_trailing_metadata(tuple(metadata))
            context.abort(grpc.StatusCode[STATUSES[refusal.code]], f"the conformance kit answers with {refusal.code}")
        return answer


def _break(context: Any) -> None:
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def _read_octets(requests: Iterator[bytes], limit: int | None) -> tuple[bytes, str]:
    """Return the octets of an upload, or those after which the connection breaks, and what is wrong with them."""
    octets = bytearray()
    for request in requests:
        if len(request) > wire.MAX_REQUEST_BYTES:
            return b"", f"Upload has a message of {len(request)} bytes; at most {wire.MAX_REQUEST_BYTES}"
        try:
            message = fleet_pb2.UploadRequest.FromString(request)
        except DecodeError:
            return b"", "Upload has bytes that are not a message of the protocol"
        if message.WhichOneof("part") != "data":
            return b"", "Upload has a message after the first one that is not data"
        octets += message.data
        if limit is not None and len(octets) >= limit:
            return bytes(octets[:limit]), ""
    return bytes(octets), ""
