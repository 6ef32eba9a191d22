"""The server as a client sees it: deadlines, the credential and gRPC's errors are dealt with here and nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar, cast

import grpc

from fedplat import wire
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc, model_pb2
from fedplat_client.errors import (
    CallRefusedError,
    CredentialError,
    DataDirectoryError,
    IncompatibleServerError,
    ServerError,
    ServerUnavailableError,
)
from fedplat_client.stopping import StopSignal

Response_co = TypeVar("Response_co", covariant=True)

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The client has its own back-off; a channel that waits for two minutes would only add to it.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A server in a container comes back with another address: do not trust the old one for gRPC's 30 seconds.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # Else all clients of a process share one connection and its limit of concurrent streams.
    ("grpc.use_local_subchannel_pool", 1),
)
_TRY_LATER = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        # A connection that breaks in the middle of a call shows as one of these, depending on where it was.
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


def connect(server: str, *, ca: str | os.PathLike[str] | None, insecure: bool) -> grpc.Channel:
    """Opens a channel to `host:port`; the one place where transport credentials belong.

    `ca` is a file of trusted certificates (PEM); without it those of this machine are trusted. Raises
    `DataDirectoryError` if it cannot be read.
    """
    none = grpc.Compression.NoCompression
    if insecure:
        return grpc.insecure_channel(server, options=_CHANNEL_OPTIONS, compression=none)
    try:
        trusted = Path(ca).read_bytes() if ca is not None else None
    except OSError as exc:
        raise DataDirectoryError(f"the certificates {ca} cannot be read: {exc.strerror}") from exc
    credentials = grpc.ssl_channel_credentials(trusted)
    return grpc.secure_channel(server, credentials, options=_CHANNEL_OPTIONS, compression=none)


class _Future(Protocol[Response_co]):
    """A call in flight, as the stubs return it."""

    def result(self) -> Response_co: ...
    def cancel(self) -> object: ...


class Connection:
    """The calls of `fleet.proto`.

    Every call that takes a `signal` is cancelled when the signal is set, and raises `Cancelled` then. All raise
    `ServerError` when they fail. `credential` is what the next call sends.
    """

    def __init__(self, channel: grpc.Channel, call_timeout_s: float) -> None:
        self._stub = fleet_pb2_grpc.FleetStub(channel)
        self._timeout_s = call_timeout_s
        self.credential = ""

    def enroll(self, request: fleet_pb2.EnrollRequest, signal: StopSignal) -> fleet_pb2.EnrollResponse:
        """Makes this installation a client."""
        with _version_check():
            return _result(self._stub.Enroll.future(request, timeout=self._timeout_s), signal)

    def check_in(self, request: fleet_pb2.CheckInRequest, signal: StopSignal) -> fleet_pb2.CheckInResponse:
        """Waits for work, `request.wait_s` at most."""
        with _version_check():
            return self._call(self._stub.CheckIn.future, request, signal, request.wait_s + self._timeout_s)

    def heartbeat(self, request: fleet_pb2.HeartbeatRequest, signal: StopSignal) -> fleet_pb2.HeartbeatResponse:
        """Tells the progress and waits for an order to stop, `request.wait_s` at most."""
        return self._call(self._stub.Heartbeat.future, request, signal, request.wait_s + self._timeout_s)

    def query_upload(self, token: str, digest: str, signal: StopSignal) -> int:
        """The number of bytes of an update that the server has."""
        request = fleet_pb2.QueryUploadRequest(token=token, digest=digest)
        return self._call(self._stub.QueryUpload.future, request, signal, self._timeout_s).received_bytes

    def report(self, request: fleet_pb2.ReportRequest) -> fleet_pb2.ReportResponse:
        """Commits an update. No signal cancels it: whether it was accepted is worth the wait."""
        return self._call(self._stub.Report.future, request, StopSignal(), self._timeout_s)

    def fail(self, request: fleet_pb2.FailRequest, timeout_s: float) -> None:
        """Gives an assignment up. No signal cancels it: it is what a client does when it stops."""
        self._call(self._stub.Fail.future, request, StopSignal(), min(timeout_s, self._timeout_s))

    def download(self, request: fleet_pb2.DownloadRequest, timeout_s: float, signal: StopSignal) -> Generator[bytes]:
        """The bytes of a model from an offset on, in pieces. Close the iterator when you stop early."""
        call = self._stub.Download(request, timeout=timeout_s, metadata=self._metadata())
        try:
            with signal.attached(call.cancel):
                for chunk in call:
                    yield chunk.data
        except grpc.RpcError as exc:
            signal.check()
            raise _translated(exc) from exc
        finally:
            call.cancel()

    def upload(self, requests: Iterator[fleet_pb2.UploadRequest], timeout_s: float, signal: StopSignal) -> int:
        """Sends a header and then data; the number of bytes that the server has now."""
        future = self._stub.Upload.future(requests, timeout=timeout_s, metadata=self._metadata())
        return _result(future, signal).received_bytes

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((wire.METADATA_AUTHORIZATION, f"Bearer {self.credential}"),)

    def _call(
        self,
        start: Callable[..., _Future[Response_co]],
        request: object,
        signal: StopSignal,
        timeout_s: float,
    ) -> Response_co:
        return _result(start(request, timeout=timeout_s, metadata=self._metadata()), signal)


def _result(future: _Future[Response_co], signal: StopSignal) -> Response_co:
    with signal.attached(future.cancel):
        try:
            return future.result()
        except grpc.FutureCancelledError as exc:
            signal.check()
            raise ServerUnavailableError("CANCELLED", "the server or the connection ended the call") from exc
        except grpc.RpcError as exc:
            signal.check()
            raise _translated(exc) from exc


def _translated(exc: grpc.RpcError) -> ServerError:
    code, text = exc.code(), exc.details() or "no details"
    if code in _TRY_LATER:
        return ServerUnavailableError(code.name, text, _retry_window(exc))
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return CredentialError(code.name, text)
    return CallRefusedError(code.name, text)


def _retry_window(exc: grpc.RpcError) -> model_pb2.RetryWindow | None:
    """What a refusal says about when to come back; nothing if it cannot be read."""
    for key, value in cast("Iterable[tuple[str, str | bytes]]", exc.trailing_metadata() or ()):
        if key == wire.METADATA_RETRY:
            try:
                earliest, latest = map(float, str(value).split())
            except ValueError:
                return None
            return model_pb2.RetryWindow(min_s=earliest, max_s=latest)
    return None


@contextlib.contextmanager
def _version_check() -> Generator[None]:
    """Within it, FAILED_PRECONDITION means that the server speaks another version of the protocol."""
    try:
        yield
    except CallRefusedError as exc:
        if exc.code != grpc.StatusCode.FAILED_PRECONDITION.name:
            raise
        raise IncompatibleServerError(
            exc.code,
            f"the server does not speak version {wire.PROTOCOL_VERSION} of the protocol ({exc}); "
            "update fedplat-client or the server so that their versions meet",
        ) from exc
