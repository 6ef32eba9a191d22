"""Client authentication by signed calls in a session, and the calls of `fleet.proto` that it authenticates."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf.message import Message

from fedplat import wire
from fedplat.wire import auth, http_channel, messages
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import cancellation, errors, spans
from fedplat_client._state.data_dir import SigningKey
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import CallError, CallRefusedError, IncompatibleServerError, ServerUnavailableError
from fedplat_client.link import ServerLink
from fedplat_client.transport import (
    Channel,
    Metadata,
    Method,
    OpenChannel,
    PendingCall,
    Response,
    result,
    translate_error,
)

_CHALLENGE = Method("GetChallenge", fleet_pb2.GetChallengeResponse)
_OPEN = Method("OpenSession", fleet_pb2.OpenSessionResponse)


@dataclass(frozen=True)
class CallCredentials:
    """The credentials of one call: a channel, metadata, the session that they belong to, and when the call began."""

    channel: Channel
    metadata: Metadata
    session_id: str = ""
    began_at: float = 0.0


class Access(Protocol):
    """A method of authentication."""

    def authenticate(self, method: str, request: bytes, signal: cancellation.StopSignal) -> CallCredentials:
        """Return credentials for a call. Raises `CallError`, or `Cancelled` if the signal is set."""
        ...

    def may_try_again(self, used: CallCredentials, exc: errors.CallError) -> bool:
        """Return whether a failed call may be repeated at once, with other credentials."""
        ...


class SignedAccess:
    """Signs every call; works also behind a proxy that terminates TLS. `client_id` is set by the enrollment.

    `on_session` is called with the client's id when the server has opened a session.
    """

    def __init__(
        self,
        channel: Channel,
        key: SigningKey,
        timeout_s: float,
        on_session: Callable[[str], None] = lambda client_id: None,
    ) -> None:
        self.client_id = ""
        self._on_session = on_session
        self._channel = channel
        self._key = key
        self._timeout_s = timeout_s
        self._signer = Signer(key)

    @property
    def public_key(self) -> bytes:
        """The public key that the server identifies the client by."""
        return self._key.public

    def authenticate(self, method: str, request: bytes, signal: cancellation.StopSignal) -> CallCredentials:
        """Return credentials for a call; open a session if necessary."""
        use = self._signer.use(method, request, lambda: self._open_session(signal))
        return CallCredentials(self._channel, use.metadata, use.session_id)

    def may_try_again(self, used: CallCredentials, exc: errors.CallError) -> bool:
        """Return whether a failed call may be repeated at once, in another session."""
        if isinstance(exc, errors.SessionLostError):
            self._signer.forget(used.session_id)
            return True
        # FENCED does not mean a rival if this process opened a newer session while the call was in flight.
        return isinstance(exc, errors.FencedError) and not self._signer.is_current(used.session_id)

    def prove(self, method: Method[Response], request: bytes, signal: cancellation.StopSignal) -> Response:
        """Make a call that proves possession of the key. Raises `CallError`."""
        challenge = fleet_pb2.GetChallengeRequest(protocol_version=wire.PROTOCOL_VERSION).SerializeToString()
        nonce = result(_CHALLENGE.start(self._channel, challenge, self._timeout_s, ()), signal).nonce
        metadata = sign_challenge(self._key, method.path, nonce, request)
        return result(method.start(self._channel, request, self._timeout_s, metadata), signal)

    def _open_session(self, signal: cancellation.StopSignal) -> str:
        request = fleet_pb2.OpenSessionRequest(client_id=self.client_id, protocol_version=wire.PROTOCOL_VERSION)
        session_id = self.prove(_OPEN, request.SerializeToString(), signal).session_id
        self._on_session(self.client_id)
        return session_id


@dataclass(frozen=True)
class SessionUse:
    """One call's metadata, and the id of the session that signed it."""

    session_id: str
    metadata: Metadata


class Signer:
    """Signs calls; thread-safe."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._opening = threading.Lock()
        self._session_id = ""
        self._counter = 0

    def use(self, method: str, request: bytes, open_session: Callable[[], str]) -> SessionUse:
        """Sign a serialized request with a counter that no other call of the session has.

        `open_session` requests a session from the server; of several threads that need one, only one calls it.
        """
        with self._opening:
            if not self._session_id:
                self._session_id, self._counter = open_session(), 0
            self._counter += 1
            session_id, counter = self._session_id, self._counter
        payload = auth.call_payload(method, session_id, counter, request)
        return SessionUse(
            session_id,
            (
                (auth.METADATA_SESSION, session_id),
                (auth.METADATA_COUNTER, str(counter)),
                (auth.METADATA_SIGNATURE, self._key.sign(payload)),
            ),
        )

    def is_current(self, session_id: str) -> bool:
        """Return whether the next call would use this session."""
        return self._session_id == session_id

    def forget(self, session_id: str) -> None:
        """Let the next call open another session, unless that has happened already."""
        with self._opening:
            if self._session_id == session_id:
                self._session_id = ""


def sign_challenge(key: SigningKey, method: str, nonce: bytes, request: bytes) -> Metadata:
    """Return the metadata that proves possession of the key, by a signature that covers the server's nonce."""
    signature = key.sign(auth.proof_payload(method, nonce, request))
    return (auth.METADATA_NONCE, nonce), (auth.METADATA_SIGNATURE, signature)


_CHECK_IN = Method("CheckIn", fleet_pb2.CheckInResponse)
_REVIEW_JOBS = Method("ReviewJobs", fleet_pb2.ReviewJobsResponse)
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


class UploadCall:
    """A call that sends an upload, or parts of it."""

    def __init__(
        self, call: PendingCall[fleet_pb2.UploadResponse], translate: Callable[[errors.CallError], errors.CallError]
    ) -> None:
        self._call = call
        self._translate = translate

    def result(self, signal: StopSignal) -> int:
        """Wait until the call has ended; return the number of bytes that the server then had."""
        try:
            return result(self._call, signal).received_bytes
        except CallError as exc:
            raise self._translate(exc) from exc

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        self._call.cancel()

    def on_failure(self, callback: Callable[[UploadCall], None]) -> None:
        """Call `callback`, in a thread of gRPC, if the call fails or has failed, or is cancelled."""

        def check(call: PendingCall[fleet_pb2.UploadResponse]) -> None:
            if call.code() is not grpc.StatusCode.OK:
                callback(self)

        self._call.add_done_callback(check)


class Connection:
    """The calls of an enrolled client.

    A call with a `signal` is cancelled when the signal is set, and then raises `Cancelled`. All raise `CallError` if
    they fail.
    """

    def __init__(self, access: Access, call_timeout_s: float, link: ServerLink | None = None) -> None:
        """`link` is the channel of `access`, if the same credentials are valid on other channels to the server."""
        self._access = access
        self._timeout_s = call_timeout_s
        self._link = link

    @property
    def can_dial(self) -> bool:
        """True if `dial` may be called."""
        return self._link is not None

    def dial(self) -> OpenChannel:
        """Open one more connection to the server, for `download`."""
        assert self._link is not None
        return self._link.dial()

    def check_in(self, request: fleet_pb2.CheckInRequest, signal: StopSignal) -> fleet_pb2.CheckInResponse:
        """Wait for an assignment, at most `request.wait_s`."""
        self._limit_wait(request)
        with version_check():
            return self._call(_CHECK_IN, request, signal, request.wait_s + self._timeout_s)

    def review_jobs(self, request: fleet_pb2.ReviewJobsRequest, signal: StopSignal) -> fleet_pb2.ReviewJobsResponse:
        """Return a page of the jobs of the client's population."""
        return self._call(_REVIEW_JOBS, request, signal, self._timeout_s)

    def heartbeat(self, request: fleet_pb2.HeartbeatRequest, signal: StopSignal) -> fleet_pb2.HeartbeatResponse:
        """Send the progress; wait for a stop order or, after `request.wait_s`, for the remaining time."""
        self._limit_wait(request)
        return self._call(_HEARTBEAT, request, signal, request.wait_s + self._timeout_s)

    def query_upload(self, request: fleet_pb2.QueryUploadRequest, signal: StopSignal) -> fleet_pb2.QueryUploadResponse:
        """Return how many bytes of an update, or of a file for another client, the server has, and may receive."""
        return self._call(_QUERY_UPLOAD, request, signal, self._timeout_s)

    def renew_certificate(
        self, request: fleet_pb2.RenewCertificateRequest, signal: StopSignal
    ) -> fleet_pb2.RenewCertificateResponse:
        """Request a TLS certificate; the server answers only a signed call."""
        return self._call(_RENEW_CERTIFICATE, request, signal, self._timeout_s)

    def report(self, request: fleet_pb2.ReportRequest, signal: StopSignal) -> fleet_pb2.ReportResponse:
        """Report an update; wait for the next assignment at most as long as the check-in of the request says, if any.

        Without one no signal must cancel it: the answer, whether it was accepted, is worth waiting for.
        """
        return self._call(_REPORT, request, signal, request.check_in.wait_s + self._timeout_s)

    def step(self, request: fleet_pb2.StepRequest, signal: StopSignal) -> fleet_pb2.StepResponse:
        """Send the message of a step; wait for the input of what the client does next, at most `request.wait_s`."""
        self._limit_wait(request)
        return self._call(_STEP, request, signal, request.wait_s + self._timeout_s)

    def fail(self, request: fleet_pb2.FailRequest, timeout_s: float) -> None:
        """Give up an assignment. No signal cancels it, since a client also does this when it is stopped."""
        self._call(_FAIL, request, StopSignal(), min(timeout_s, self._timeout_s))

    def download(
        self,
        request: fleet_pb2.DownloadRequest,
        timeout_s: float,
        signal: StopSignal,
        channel: Channel | None = None,
    ) -> Generator[messages.Bytes]:
        """Yield the bytes of a model from an offset on, in pieces. Close the iterator to stop early.

        `channel` is one of `dial`.
        """
        data = request.SerializeToString()
        used = self._access.authenticate(_DOWNLOAD.path, data, signal)
        call = _DOWNLOAD.start_receiving(
            channel or used.channel, data, timeout_s, used.metadata + spans.current_metadata()
        )
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
        """Send a header and then data; return the number of bytes that the server now has.

        Over HTTP the data are sent in several requests, because what is before the server may limit their size.
        """
        http = self._link.http if self._link is not None else None
        if http is None:
            return self._upload(header, parts, timeout_s, signal)
        waiting, is_over = bytearray(), False
        while True:
            while not is_over and len(waiting) < http.piece_bytes:
                part = next(parts, None)
                is_over = part is None
                waiting += part or b""
            size = min(len(waiting), http.piece_bytes)
            try:
                received = self._upload(header, iter([bytes(waiting[:size])]), timeout_s, signal)
            except errors.UnreachableError:
                if http.piece_bytes >= size:
                    raise
                continue  # a proxy has refused the size: send less at a time
            if received != header.offset + size or (is_over and size == len(waiting)):
                return received
            del waiting[:size]
            header.offset = received

    def _upload(
        self, header: fleet_pb2.UploadHeader, parts: Iterator[messages.Bytes], timeout_s: float, signal: StopSignal
    ) -> int:
        framed = (messages.frame_field(messages.UPLOAD, part) for part in parts)
        return self.start_upload(header, framed, timeout_s, signal).result(signal)

    @property
    def can_share_upload(self) -> bool:
        """True if several calls may bring an upload."""
        return self._link is None or self._link.http is None

    def start_upload(
        self, header: fleet_pb2.UploadHeader, parts: Iterator[bytes], timeout_s: float, signal: StopSignal
    ) -> UploadCall:
        """Start to send a header and then messages, which gRPC draws in a thread of its own."""
        first = fleet_pb2.UploadRequest(header=header).SerializeToString()
        used = self._access.authenticate(_UPLOAD.path, first, signal)
        requests = itertools.chain([first], parts)
        metadata = used.metadata + spans.current_metadata()
        call = _UPLOAD.start_sending(used.channel, requests, timeout_s, metadata)
        return UploadCall(call, lambda exc: self._translate_stream_error(used, exc))

    def _limit_wait(
        self, request: fleet_pb2.CheckInRequest | fleet_pb2.HeartbeatRequest | fleet_pb2.StepRequest
    ) -> None:
        """Make a call over HTTP wait shorter than proxies let requests wait."""
        if self._link is not None and self._link.http is not None:
            request.wait_s = min(request.wait_s, http_channel.MAX_WAIT_S)

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
