"""The connection to a server, of gRPC or HTTP/1.1: sends the token, sets deadlines, and translates errors."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import grpc

from fedplat import texts, wire
from fedplat._version import __version__
from fedplat.admin.profile import DEFAULT_SERVER, HTTP, Profile
from fedplat.errors import ServerRefusedError, ServerUnreachableError
from fedplat.wire import auth, http_channel, proxies

_CHANNEL_OPTIONS = (
    *wire.CHANNEL_OPTIONS,
    # A watch may be silent for hours; pings detect whether the server is still reachable.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A person waits for the server, so reconnect often. (min_reconnect_backoff_ms would also limit the time to connect,
    # and a distant server needs its default of 20 seconds.)
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A restarted container may have another address: do not cache the old one for gRPC's default of 30 seconds.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)
_GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,  # by a stopping server: a call cancelled here is never awaited
    }
)


class Paged(Protocol):
    """A page of a list."""

    next_page_token: str


Page = TypeVar("Page", bound=Paged)
Row = TypeVar("Row")
Response = TypeVar("Response")


class AdminConnection:
    """A connection to the server of a profile, with TLS unless the profile is `insecure`.

    It is opened by the first call. Raises `ValueError` if the profile's server is not `host:port`.
    """

    def __init__(self, profile: Profile, timeout_s: float) -> None:
        if not auth.is_address(profile.server):
            raise ValueError(f"server is {profile.server!r}; expected host:port, for instance {DEFAULT_SERVER}")
        self.metadata = ((wire.METADATA_AUTHORIZATION, f"Bearer {profile.token}"),) if profile.token else ()
        self.channel = _open_channel(profile)
        self._profile = profile
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Close the connection; pending calls are cancelled."""
        self.channel.close()

    def call(self, method: Callable[..., Response], request: object, timeout_s: float | None = None) -> Response:
        """Return the response to a request, within `timeout_s` instead of the connection's default."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self.translate_errors(limit_s):
            return method(request, timeout=limit_s, metadata=self.metadata)

    def stream(self, method: Callable[..., Any], request: object, timeout_s: float | None = None) -> Any:
        """Start a call that returns a stream; iterate over its responses within `translate_errors`."""
        with defer_interrupt():
            return method(request, timeout=timeout_s, metadata=self.metadata)

    def pages(self, method: Callable[..., Page], request: Any) -> Iterator[Page]:
        """Yield the pages of a list, one call each; `request` is modified."""
        while True:
            page = self.call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def rows(
        self, method: Callable[..., Page], request: Any, rows_of: Callable[[Page], Iterable[Row]], limit: int | None
    ) -> Iterator[Row]:
        """Yield the rows of a list, at most `limit` of them, as its pages arrive; `request` is modified."""
        request.page_size = min(limit or 0, 2**31)
        return itertools.islice((row for page in self.pages(method, request) for row in rows_of(page)), limit)

    @contextlib.contextmanager
    def translate_errors(self, timeout_s: float | None) -> Generator[None]:
        """Translate gRPC errors to `ServerUnreachableError` or `ServerRefusedError`, for a call within `timeout_s`."""
        try:
            yield
        except grpc.RpcError as exc:
            raise self._translate(exc, timeout_s) from exc

    def _translate(self, exc: Any, timeout_s: float | None) -> ServerUnreachableError | ServerRefusedError:
        server, code, details = self._profile.server, exc.code(), exc.details() or exc.code().name
        trailers = {entry.key: entry.value for entry in exc.trailing_metadata() or ()}
        if auth.METADATA_CODE in trailers:  # the message is fedplat's own
            retry = _format_retry(str(trailers.get(wire.METADATA_RETRY, "")))
            if code is grpc.StatusCode.UNAVAILABLE:
                text = f"the fedplat server at {server} is not available: {details}{retry}"
                return ServerUnreachableError(text, reason=details)
            return ServerRefusedError(details + retry, code=str(trailers[auth.METADATA_CODE]))
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            return self._unreachable(f"no answer within {timeout_s:g} s")
        if proxies.is_too_large(details):  # to wait for the proxy does not help
            return ServerRefusedError(
                f"the request did not reach the server at {server}: {proxies.explain_status(details)}"
            )
        if code in _GONE or proxies.is_foreign(details):
            return self._unreachable(proxies.shorten(details))
        if code is grpc.StatusCode.UNIMPLEMENTED and self._profile.transport == HTTP:
            return ServerRefusedError(
                f"{server} does not serve this request over HTTP/1.1: start the server with --http-operators, or use "
                "its address of gRPC"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ServerRefusedError(
                f"{server} does not support this request ({details}): it is not a fedplat server, or it is older than "
                f"this program, {__version__}; update the server first"
            )
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            details = f"the server at {server} failed ({details}); see its log"
        return ServerRefusedError(details)

    def _unreachable(self, reason: str) -> ServerUnreachableError:
        profile = self._profile
        if proxies.is_direct(profile.server):
            problem = proxies.describe_failure(profile.server, ca=profile.ca, insecure=profile.insecure)
            if problem:
                return ServerUnreachableError(
                    f"cannot connect to the server at {profile.server}: {problem}", reason=problem, is_lasting=True
                )
        reason = proxies.explain(profile.server, reason)
        place = "fedplat-server run"
        if profile.transport == HTTP:
            place = "fedplat-server run --http-operators, and that this is the address of its --http-listen"
        return ServerUnreachableError(
            f"no fedplat server answers at {profile.server} ({reason}); check that it is running ({place})",
            reason=reason,
        )


def _open_channel(profile: Profile) -> Any:
    """Return a channel of gRPC or of HTTP/1.1, for the stubs."""
    if profile.transport == HTTP:
        # Not every call of an operator may be repeated: some create something.
        return http_channel.connect(profile.server, tls=not profile.insecure, ca=profile.ca, repeats=False)
    none = grpc.Compression.NoCompression
    options = (*_CHANNEL_OPTIONS, *proxies.channel_options(profile.server))
    if profile.insecure:
        return grpc.insecure_channel(profile.server, options=options, compression=none)
    credentials = grpc.ssl_channel_credentials(profile.ca.encode() or None)
    return grpc.secure_channel(profile.server, credentials, options=options, compression=none)


def _format_retry(window: str) -> str:
    """Return the server's retry window in words; empty if it sent none."""
    try:
        earliest_s, latest_s = map(float, window.split())
    except ValueError:
        return ""
    return f"; try again in {texts.duration(earliest_s)} to {texts.duration(latest_s)}"


@contextlib.contextmanager
def defer_interrupt() -> Generator[None]:
    """Handle a SIGINT that arrives within the block at its end. Only the main thread receives signals.

    gRPC first starts a streaming call and then the thread that ends it. After a `KeyboardInterrupt` between the two,
    closing the channel never returns (grpcio 1.85.1).
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
