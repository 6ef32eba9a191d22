"""Calls on a channel, of gRPC or HTTP: the only module that handles gRPC's options, deadlines and errors.

Messages are serialized before gRPC sees them, so that a client signs exactly the bytes that it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message

from fedplat import wire
from fedplat.wire import auth, http_channel, messages, proxies
from fedplat.wire.v1 import fleet_pb2, model_pb2, peer_pb2
from fedplat_client import cancellation, errors

Metadata = tuple[tuple[str, str | bytes], ...]
Response = TypeVar("Response", bound=Message)

_CHANNEL_OPTIONS = (
    *wire.CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The client has its own back-off; the channel's default of up to two minutes would only add to it.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A restarted container has another address: do not keep the old one for gRPC's default of 30 seconds.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # Otherwise all clients of a process share one connection and its limit of concurrent streams.
    ("grpc.use_local_subchannel_pool", 1),
)
_TRY_LATER = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        # A connection that breaks during a call results in one of these, depending on the stage of the call.
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


_BY_CODE: dict[str, type[errors.CallError]] = {
    "TOO_MANY_UPLOADS": errors.ServerBusyError,
    "NOT_SENT_YET": errors.NotSentYetError,
    "SESSION_UNKNOWN": errors.SessionLostError,
    "REPLAYED": errors.SessionLostError,
    "CHALLENGE_EXPIRED": errors.ServerUnavailableError,
    "CLIENT_UNKNOWN": errors.UnknownClientError,
    "FENCED": errors.FencedError,
    "REVOKED": errors.RevokedError,
    "CERTIFICATE_EXPIRED": errors.CertificateExpiredError,
    "NO_CERTIFICATES": errors.IdentityError,
    "TOO_LARGE": errors.TooLargeError,
    "STALE_ASSIGNMENT": errors.AssignmentEndedError,
}
_SERVICE = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
PEER_SERVICE = peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name


GRPC, HTTP, AUTO = "grpc", "http", "auto"
TRANSPORTS = (AUTO, GRPC, HTTP)
"""The values of the option `transport`."""


class Channel(Protocol):
    """A way to make calls: what `grpc.Channel`, `HttpChannel` and `fedplat_client.link.ServerLink` have."""

    def unary_unary(self, method: str, /, *, response_deserializer: Any) -> Any:
        """Return a function that makes calls of a method."""
        ...

    def unary_stream(self, method: str, /, *, response_deserializer: Any) -> Any:
        """Return a function that makes calls with several responses."""
        ...

    def stream_unary(self, method: str, /, *, response_deserializer: Any) -> Any:
        """Return a function that makes calls with several requests."""
        ...


OpenChannel: TypeAlias = grpc.Channel | http_channel.HttpChannel
"""A connection to a server."""


@dataclass(frozen=True)
class ServerRoute:
    """The way to a server: its `host:port`, the authorities to trust (PEM), and the proxy, as for `connect`."""

    server: str
    tls: bool
    ca: str
    proxy: str = ""
    hint: str = ""
    """What to check if something else answers there."""
    transport: str = GRPC
    """`GRPC` or `HTTP`."""

    def open(self) -> OpenChannel:
        """Open a channel."""
        connect_to = http_channel.connect if self.transport == HTTP else connect
        return connect_to(self.server, tls=self.tls, ca=self.ca, proxy=self.proxy)

    def __str__(self) -> str:
        """Return it for a message."""
        return f"{'HTTP/1.1' if self.transport == HTTP else 'gRPC'} at {self.server}"


def connect(
    server: str,
    *,
    tls: bool = False,
    ca: str = "",
    client_certificate: tuple[bytes, bytes] | None = None,
    expected_host: str = "",
    proxy: str = "",
) -> grpc.Channel:
    """Open a channel to `host:port`; with TLS, trust `ca` (PEM) instead of the platform's authorities.

    `client_certificate`: the client's private key and certificate, PEM. `expected_host`: the DNS name that the server's
    certificate must have, instead of the host. `proxy`: its URL, or "none"; by default that of the environment.
    """
    options = (*_CHANNEL_OPTIONS, *proxies.channel_options(server, proxy))
    if not tls:
        return grpc.insecure_channel(server, options=options, compression=grpc.Compression.NoCompression)
    credentials = grpc.ssl_channel_credentials(ca.encode() or None, *(client_certificate or ()))
    if expected_host:
        options += (("grpc.ssl_target_name_override", expected_host),)
    return grpc.secure_channel(server, credentials, options, grpc.Compression.NoCompression)


@dataclass(frozen=True)
class Method(Generic[Response]):
    """A method of `fleet.proto`, or of another service, and its response type."""

    name: str
    response: type[Response]
    service: str = _SERVICE

    @property
    def path(self) -> str:
        """The method's name in gRPC and in signatures."""
        return f"/{self.service}/{self.name}"

    def start(self, channel: Channel, request: bytes, timeout_s: float, metadata: Metadata) -> PendingCall[Response]:
        """Start the call; the future's result is its response."""
        method = channel.unary_unary(self.path, response_deserializer=self.response.FromString)
        return method.future(request, timeout=timeout_s, metadata=metadata)

    def start_sending(
        self, channel: Channel, requests: Iterator[bytes], timeout_s: float, metadata: Metadata
    ) -> PendingCall[Response]:
        """Start the call with a stream of requests."""
        method = channel.stream_unary(self.path, response_deserializer=self.response.FromString)
        return method.future(requests, timeout=timeout_s, metadata=metadata)

    def start_receiving(self, channel: Channel, request: bytes, timeout_s: float, metadata: Metadata) -> Any:
        """Start the call; return an iterator over the bytes of the pieces of a file."""
        method = channel.unary_stream(self.path, response_deserializer=_decode_piece)
        return method(request, timeout=timeout_s, metadata=metadata)


def _decode_piece(message: bytes) -> messages.Bytes:
    data = messages.unframe_field(messages.CHUNK, message)
    return data if data is not None else model_pb2.Chunk.FromString(message).data


Response_co = TypeVar("Response_co", covariant=True)


class PendingCall(Protocol[Response_co]):
    """A call in flight, as gRPC returns it: `grpc.Future` and `grpc.Call`."""

    def result(self) -> Response_co:
        """Wait for the response."""
        ...

    def cancel(self) -> object:
        """Cancel the call, unless it has ended."""
        ...

    def code(self) -> grpc.StatusCode:
        """Wait for the status."""
        ...

    def add_done_callback(self, fn: Callable[[Any], None], /) -> object:
        """Call a function with this object once the call has ended."""
        ...


def result(future: PendingCall[Response_co], signal: cancellation.StopSignal) -> Response_co:
    """Return the response of a call; cancel the call when the signal is set. Raises `CallError` or `Cancelled`."""
    with signal.attach(future.cancel):
        try:
            return future.result()
        except grpc.FutureCancelledError as exc:
            signal.check()
            raise errors.ServerUnavailableError("CANCELLED", "the server or the connection ended the call") from exc
        except grpc.RpcError as exc:
            signal.check()
            raise translate_error(exc) from exc


def translate_error(exc: grpc.RpcError) -> errors.CallError:
    """Translate a gRPC error into a `CallError`."""
    error_code = {entry.key: entry.value for entry in exc.trailing_metadata() or ()}.get(auth.METADATA_CODE)
    found = _translate(exc, error_code)
    found.error_code = str(error_code or "")
    return found


def _translate(exc: grpc.RpcError, error_code: str | bytes | None) -> errors.CallError:
    status, text = exc.code(), proxies.explain_status(exc.details() or "no details")
    if (error_type := _BY_CODE.get(str(error_code))) is not None:
        return error_type(status.name, text, _retry_window(exc))
    if error_code is None and (status is grpc.StatusCode.UNAVAILABLE or proxies.is_foreign(exc.details() or "")):
        return errors.UnreachableError(status.name, text, _retry_window(exc))
    if status in _TRY_LATER:
        return errors.ServerUnavailableError(status.name, text, _retry_window(exc))
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return errors.IdentityError(status.name, text)
    return errors.CallRefusedError(status.name, text)


def _retry_window(exc: grpc.RpcError) -> model_pb2.RetryWindow | None:
    """Return the retry window of a refusal; None if it has none or it cannot be parsed."""
    for key, value in cast("Iterable[tuple[str, str | bytes]]", exc.trailing_metadata() or ()):
        if key == wire.METADATA_RETRY:
            try:
                earliest, latest = map(float, str(value).split())
            except ValueError:
                return None
            return model_pb2.RetryWindow(min_s=earliest, max_s=latest)
    return None
