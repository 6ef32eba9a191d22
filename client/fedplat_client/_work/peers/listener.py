"""The client's own port, on which its neighbours fetch what it offers, files or chunks; nothing else is served there.

Both ends authenticate by TLS with certificates of the server's authority. A call is served if the caller's certificate
has the id of a client to which the requested file is offered, or is about to be. The server is synchronous, as the rest
of the client: a second event loop beside another one in the same process received events of gRPC's poller for the
first.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, cast

import grpc
from cryptography import x509
from google.protobuf.message import DecodeError

from fedplat import wire
from fedplat.wire import auth, messages
from fedplat.wire.v1 import peer_pb2
from fedplat_client import errors, transport
from fedplat_client._auth.mtls import PeerCredentials

Context: TypeAlias = Any  # grpc.ServicerContext, of which the stubs lack `cancel`
_S = grpc.StatusCode
_METHOD = f"/{transport.PEER_SERVICE}/Fetch"
_NAME = re.compile(r"[0-9a-f]{64}")
_MAX_REQUEST_BYTES = 1024
_SPARE_THREADS = 4
"""Threads beyond those of the streams, which refuse calls."""
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", 2**13),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.so_reuseport", 0),  # a second client on the port must fail, not share it
)


@dataclass(frozen=True, kw_only=True)
class ListenerLimits:
    """What neighbours may use at most."""

    streams: int = 16
    """Concurrent streams."""
    streams_per_peer: int = 4
    """Concurrent streams of one neighbour, of different files."""
    request_s: float = 10.0
    """Seconds until a call is cut of which the request has not arrived: it holds a thread."""
    stream_s: float = 600.0
    """Seconds until a stream is cut; the neighbour resumes with another one."""
    sends_per_peer: float = 4.0
    """How many times the bytes of a file one neighbour may receive, with what it receives again after breaks."""
    wait_s: float = 10.0
    """Seconds until the call of an expected neighbour is answered that requests what is not offered yet."""
    waits_per_peer: int = 1
    """Calls of one expected neighbour that may wait so."""


@dataclass(eq=False)
class _Offer:
    name: str
    content: Path | bytes
    size_bytes: int
    neighbours: frozenset[str]
    on_sent: Callable[[int], object]
    sent_bytes: Counter[str] = field(default_factory=Counter[str])
    withdrawn: bool = False

    def open(self) -> BinaryIO:
        """Open the content for reading. Raises `OSError`."""
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb")


@dataclass(frozen=True, eq=False)
class _Stream:
    caller: str
    offer: _Offer
    context: Context


def utc_now() -> datetime.datetime:
    """Return the wall-clock time: certificates are valid by no other clock."""
    return datetime.datetime.now(datetime.UTC)


class PeerListener:
    """The listener of one client; a context manager that closes the port.

    `listen` is `host:port`; port 0 takes a free one. `credentials` returns the client's current certificate, for each
    handshake. `now` is the time by which certificates expire.
    """

    def __init__(
        self,
        listen: str,
        credentials: Callable[[], PeerCredentials],
        limits: ListenerLimits | None = None,
        now: Callable[[], datetime.datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = 0
        self._listen = listen
        self._credentials = credentials
        self._limits = limits or ListenerLimits()
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        self._offers: list[_Offer] = []
        self._streams: set[_Stream] = set()
        self._waiting = Counter[str]()
        self._expected = Counter[str]()
        self._changed = threading.Condition(self._lock)
        self._in_wait = Counter[str]()
        self._server: grpc.Server | None = None
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> PeerListener:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop(grace=None).wait()
        if self._executor is not None:
            self._executor.shutdown()

    def open(self) -> None:
        """Open the port, unless it is open already. Raises `ListenerError`."""
        if self._server is not None:
            return
        num_threads = self._limits.streams + _SPARE_THREADS
        executor = ThreadPoolExecutor(num_threads, "fedplat-peers")
        server = grpc.server(
            executor,
            handlers=[_Handler(self._fetch)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=num_threads,
            compression=grpc.Compression.NoCompression,
        )
        try:
            self.port = server.add_secure_port(self._listen, self._server_credentials())
        except RuntimeError as exc:
            executor.shutdown()
            raise errors.ListenerError(
                f"the listener for peers cannot use {self._listen} ({exc}); choose a free port and an address of this "
                "host with --peer-listen"
            ) from exc
        server.start()
        self._server, self._executor = server, executor

    @property
    def num_streams(self) -> int:
        """The number of streams now."""
        return len(self._streams)

    @property
    def num_waits(self) -> int:
        """The number of calls that wait for what is not offered yet."""
        return self._in_wait.total()

    @contextlib.contextmanager
    def offer(
        self,
        name: str,
        content: Path | bytes,
        neighbours: Collection[str],
        on_sent: Callable[[int], object] = lambda _: None,
    ) -> Generator[None]:
        """Offer a file or some bytes within the block, to the clients with these ids only; then end its streams.

        `name` has 64 hexadecimal digits: the SHA-256 of a file, which the receivers verify, or the name that both ends
        have for a chunk. The content must not change. `on_sent` is called with the number of bytes that were sent.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name is {name!r}; expected 64 lower-case hexadecimal digits")
        size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        offer = _Offer(name, content, size_bytes, frozenset(neighbours), on_sent)
        with self._changed:
            self._offers.append(offer)
            self._changed.notify_all()
        try:
            yield
        finally:
            offer.withdrawn = True
            with self._lock:
                self._offers.remove(offer)

    @contextlib.contextmanager
    def expect(self, neighbours: Collection[str]) -> Generator[None]:
        """Let the calls of these clients wait, within the block, for what is not offered yet."""
        with self._lock:
            self._expected.update(neighbours)
        try:
            yield
        finally:
            with self._changed:
                self._expected.subtract(neighbours)
                self._expected = +self._expected
                self._changed.notify_all()

    def _server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that load the client's certificate at each handshake, and require one of the peer."""
        current = self._credentials()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal current
            latest = self._credentials()
            if latest is current:
                return None
            current = latest
            return _configuration(current)

        # None means "keep the current configuration"; gRPC's type annotations lack it.
        return grpc.dynamic_ssl_server_credentials(_configuration(current), cast(Any, fetch), True)

    def _fetch(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        """Serve a call: yield the messages of a file."""
        caller = self._authenticate(context)
        self._require_neighbour(caller, context)  # a stranger must not hold a thread with a call without a request
        request = _decode(self._receive(caller, requests, context), context)
        offer = self._find(caller, request.digest, context)
        if request.offset > offer.size_bytes:
            _refuse(context, _S.OUT_OF_RANGE, "WRONG_OFFSET", f"the file has {offer.size_bytes} bytes")
        self._occupy(_Stream(caller, offer, context))
        try:
            file = offer.open()
        except OSError:
            _refuse(context, _S.NOT_FOUND, "NOT_OFFERED", "the file is gone")
        with file:
            file.seek(request.offset)
            while data := file.read(wire.UPLOAD_CHUNK_BYTES):
                self._count(offer, caller, len(data), context)
                yield messages.frame_field(messages.CHUNK, data)

    def _authenticate(self, context: Context) -> str:
        """Return the id of the caller, which TLS has verified. The expiry is checked again: connections outlive it."""
        name, expires = _read_certificate(context.auth_context().get("x509_pem_cert", ()))
        if not name:
            _refuse(context, _S.UNAUTHENTICATED, "CERTIFICATE_UNKNOWN", "the certificate names no client")
        if self._now() >= expires:
            _refuse(context, _S.UNAUTHENTICATED, "CERTIFICATE_EXPIRED", "the certificate has expired; renew it")
        return name.partition("/")[0]

    def _receive(self, caller: str, requests: Iterator[bytes], context: Context) -> bytes:
        """Return the request of a call, for which the caller has `request_s`."""
        with self._lock:
            is_free = self._waiting[caller] < self._limits.streams_per_peer
            self._waiting[caller] += is_free
        if not is_free:
            _refuse(context, _S.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", "too many calls wait for their requests")
        cut = threading.Timer(self._limits.request_s, context.cancel)
        cut.daemon = True
        cut.start()
        try:
            return next(requests, b"")
        finally:
            cut.cancel()
            with self._lock:
                self._waiting -= Counter([caller])  # drops counts of 0

    def _require_neighbour(self, caller: str, context: Context) -> None:
        with self._lock:
            is_neighbour = caller in self._expected or any(caller in offer.neighbours for offer in self._offers)
        if not is_neighbour:
            _refuse(context, _S.PERMISSION_DENIED, "NOT_A_NEIGHBOUR", "nothing is offered to this client now")

    def _find(self, caller: str, name: str, context: Context) -> _Offer:
        """Return what is offered by this name; wait for it if the caller is expected."""
        ends_at = self._clock() + self._limits.wait_s
        context.add_callback(self._wake)  # when the caller is gone
        with self._changed:
            may_wait = self._in_wait[caller] < self._limits.waits_per_peer
            self._in_wait[caller] += may_wait
            try:
                while True:
                    for offer in self._offers:
                        if offer.name == name and caller in offer.neighbours:
                            return offer
                    left_s = ends_at - self._clock()
                    if not (may_wait and caller in self._expected and left_s > 0 and context.is_active()):
                        break
                    self._changed.wait(left_s)
            finally:
                self._in_wait[caller] -= may_wait
                self._in_wait = +self._in_wait
        self._require_neighbour(caller, context)
        # Also for a file that is offered to other clients: the caller learns nothing about those.
        _refuse(context, _S.NOT_FOUND, "NOT_OFFERED", "this file is not offered")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _occupy(self, stream: _Stream) -> None:
        """Count a stream until its call ends, and cut the call after `stream_s`.

        It replaces the caller's earlier stream of the file, of which the end may not have been noticed here.
        """
        limits = self._limits
        with self._lock:
            earlier = [each for each in self._streams if (each.caller, each.offer) == (stream.caller, stream.offer)]
            self._streams.difference_update(earlier)
            num_own = sum(each.caller == stream.caller for each in self._streams)
            is_free = len(self._streams) < limits.streams and num_own < limits.streams_per_peer
            if is_free:
                self._streams.add(stream)
        for each in earlier:
            each.context.cancel()
        if not is_free:
            _refuse(stream.context, _S.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", "too many streams; try again later")
        cut = threading.Timer(limits.stream_s, stream.context.cancel)
        cut.daemon = True

        def release() -> None:
            cut.cancel()
            with self._lock:
                self._streams.discard(stream)

        cut.start()
        if not stream.context.add_callback(release):
            release()  # the call has ended already

    def _count(self, offer: _Offer, caller: str, size_bytes: int, context: Context) -> None:
        if offer.withdrawn:
            _refuse(context, _S.NOT_FOUND, "NOT_OFFERED", "this file is not offered any more")
        limit = self._limits.sends_per_peer * offer.size_bytes
        with self._lock:
            is_within = offer.sent_bytes[caller] + size_bytes <= limit
            if is_within:
                offer.sent_bytes[caller] += size_bytes
        if not is_within:
            text = f"this client has received {self._limits.sends_per_peer:g} times the bytes of the file"
            _refuse(context, _S.FAILED_PRECONDITION, "TOO_MANY_BYTES", text)
        offer.on_sent(size_bytes)


class _Handler(grpc.GenericRpcHandler):
    """Knows one method; gRPC answers all others with UNIMPLEMENTED."""

    def __init__(self, fetch: Callable[[Iterator[bytes], Context], Iterator[bytes]]) -> None:
        # On the wire it is the same as one request, for which gRPC would wait in a thread, without a limit of time and
        # before it calls `fetch`.
        self._method = grpc.stream_stream_rpc_method_handler(fetch)

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call, or None."""
        return self._method if handler_call_details.method == _METHOD else None


def _configuration(credentials: PeerCredentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], root_certificates=credentials.authorities
    )


def _decode(message: bytes, context: Context) -> peer_pb2.FetchRequest:
    try:
        return peer_pb2.FetchRequest.FromString(message)
    except DecodeError:
        _refuse(context, _S.INVALID_ARGUMENT, "INVALID_REQUEST", "the message is not a FetchRequest")


def _read_certificate(chain: Sequence[bytes]) -> tuple[str, datetime.datetime]:
    """Return the `<id>/<number>` and the expiry of a connection's certificate; an empty name if it names no client."""
    try:
        loaded = x509.load_pem_x509_certificate(chain[0])
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (IndexError, ValueError, x509.ExtensionNotFound):
        return "", datetime.datetime.min.replace(tzinfo=datetime.UTC)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    name = auth.parse_client_uri(uris[0]) if len(uris) == 1 else None
    return name or "", loaded.not_valid_after_utc


def _refuse(context: Context, status: grpc.StatusCode, code: str, text: str) -> NoReturn:
    context.set_trailing_metadata(((auth.METADATA_CODE, code),))
    context.abort(status, text)
    raise AssertionError("abort returned")
