"""The calls of `fleet.proto` that an enrolled client makes, each authenticated by the client's method."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import grpc
from google.protobuf.message import Message

from fedplat import wire
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import spans
from fedplat_client._auth.authenticator import Access, CallCredentials
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import CallError, CallRefusedError, IncompatibleServerError, ServerUnavailableError
from fedplat_client.transport import Method, Response, result, translate_error

_CHECK_IN = Method("CheckIn", fleet_pb2.CheckInResponse)
_HEARTBEAT = Method("Heartbeat", fleet_pb2.HeartbeatResponse)
_QUERY_UPLOAD = Method("QueryUpload", fleet_pb2.QueryUploadResponse)
_REPORT = Method("Report", fleet_pb2.ReportResponse)
_STEP = Method("Step", fleet_pb2.StepResponse)
_FAIL = Method("Fail", fleet_pb2.FailResponse)
_RENEW_CERTIFICATE = Method("RenewCertificate", fleet_pb2.RenewCertificateResponse)
_DOWNLOAD = Method("Download", model_pb2.Chunk)  # `pieces` decodes its messages
_UPLOAD = Method("Upload", fleet_pb2.UploadResponse)

_MAX_TRIES = 3
"""Maximum attempts of one call: its session may be lost again while it is in flight."""


class Connection:
    """The calls of an enrolled client.

    A call with a `signal` is cancelled when the signal is set, and then raises `Cancelled`. All raise `CallError` if
    they fail.
    """

    def __init__(self, access: Access, call_timeout_s: float) -> None:
        self._access = access
        self._timeout_s = call_timeout_s

    def check_in(self, request: fleet_pb2.CheckInRequest, signal: StopSignal) -> fleet_pb2.CheckInResponse:
        """Wait for an assignment, at most `request.wait_s`."""
        with version_check():
            return self._call(_CHECK_IN, request, signal, request.wait_s + self._timeout_s)

    def heartbeat(self, request: fleet_pb2.HeartbeatRequest, signal: StopSignal) -> fleet_pb2.HeartbeatResponse:
        """Send the progress; wait for a stop order or, after `request.wait_s`, for the remaining time."""
        return self._call(_HEARTBEAT, request, signal, request.wait_s + self._timeout_s)

    def query_upload(self, request: fleet_pb2.QueryUploadRequest, signal: StopSignal) -> int:
        """Return how many bytes of an update, or of a file for another client, the server has."""
        return self._call(_QUERY_UPLOAD, request, signal, self._timeout_s).received_bytes

    def renew_certificate(
        self, request: fleet_pb2.RenewCertificateRequest, signal: StopSignal
    ) -> fleet_pb2.RenewCertificateResponse:
        """Request a TLS certificate; the server answers only a signed call."""
        return self._call(_RENEW_CERTIFICATE, request, signal, self._timeout_s)

    def report(self, request: fleet_pb2.ReportRequest) -> fleet_pb2.ReportResponse:
        """Report an update. No signal cancels it: the answer, whether it was accepted, is worth waiting for."""
        return self._call(_REPORT, request, StopSignal(), self._timeout_s)

    def step(self, request: fleet_pb2.StepRequest, signal: StopSignal) -> fleet_pb2.StepResponse:
        """Send the message of a step; wait for the input of what the client does next, at most `request.wait_s`."""
        return self._call(_STEP, request, signal, request.wait_s + self._timeout_s)

    def fail(self, request: fleet_pb2.FailRequest, timeout_s: float) -> None:
        """Give up an assignment. No signal cancels it, since a client also does this when it is stopped."""
        self._call(_FAIL, request, StopSignal(), min(timeout_s, self._timeout_s))

    def download(
        self, request: fleet_pb2.DownloadRequest, timeout_s: float, signal: StopSignal
    ) -> Generator[messages.Bytes]:
        """Yield the bytes of a model from an offset on, in pieces. Close the iterator to stop early."""
        data = request.SerializeToString()
        used = self._access.authenticate(_DOWNLOAD.path, data, signal)
        call = _DOWNLOAD.start_receiving(used.channel, data, timeout_s, used.metadata + spans.current_metadata())
        try:
            with signal.attach(call.cancel):
                yield from call
        except grpc.RpcError as exc:
            signal.check()
            raise self._translate_stream_error(used, translate_error(exc)) from exc
        finally:
            call.cancel()

    def upload(
        self, header: fleet_pb2.UploadHeader, parts: Iterator[messages.Bytes], timeout_s: float, signal: StopSignal
    ) -> int:
        """Send a header and then data; return the number of bytes that the server now has."""
        first = fleet_pb2.UploadRequest(header=header).SerializeToString()

        def requests() -> Iterator[bytes]:
            yield first
            for part in parts:
                yield messages.frame_field(messages.UPLOAD, part)

        used = self._access.authenticate(_UPLOAD.path, first, signal)
        try:
            return result(
                _UPLOAD.start_sending(used.channel, requests(), timeout_s, used.metadata + spans.current_metadata()),
                signal,
            ).received_bytes
        except CallError as exc:
            raise self._translate_stream_error(used, exc) from exc

    def _call(self, method: Method[Response], request: Message, signal: StopSignal, timeout_s: float) -> Response:
        data = request.SerializeToString()
        tries = 1
        while True:
            used = self._access.authenticate(method.path, data, signal)
            try:
                return result(
                    method.start(used.channel, data, timeout_s, used.metadata + spans.current_metadata()), signal
                )
            except CallError as exc:
                if not self._access.may_try_again(used, exc) or tries == _MAX_TRIES:
                    raise
                tries += 1

    def _translate_stream_error(self, used: CallCredentials, exc: CallError) -> CallError:
        """Return the error of a stream; a retryable one is `ServerUnavailableError`, since callers resume streams."""
        if self._access.may_try_again(used, exc):
            return ServerUnavailableError(exc.code, str(exc), exc.retry)
        return exc


@contextlib.contextmanager
def version_check() -> Generator[None]:
    """Raise `IncompatibleServerError` for FAILED_PRECONDITION: in this block it means another protocol version."""
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
