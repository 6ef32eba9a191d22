"""The client's way to its server: a channel of gRPC or of HTTP/1.1, and the choice between them (`transport="auto"`).

gRPC comes first, since it needs less of both ends. The client changes to HTTP/1.1 if calls get no answer at all over
gRPC, and get one over HTTP/1.1. It never changes within an assignment: no upload is begun twice, and a check-in has
ended before another one begins. A refusal of the server, and a certificate that is not trusted, are no reasons.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from fedplat import durable, wire
from fedplat.config.decoding import prepare_type
from fedplat.wire import proxies
from fedplat.wire.http_channel import HttpChannel
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import errors, transport
from fedplat_client.backoff import is_cut
from fedplat_client.cancellation import StopSignal
from fedplat_client.transport import GRPC, HTTP, OpenChannel, ServerRoute

PROBE_S = 10.0
"""The longest time that the other transport has for an answer."""
LONG_S = 10.0
"""A call without an answer that took so long counts as two."""
TRIES = 2
MAX_TRIES_BETWEEN = 16
"""The other transport is asked after 2, 4, 8 and 16 calls without an answer, and then after each 16."""
REMEMBERED_S = 86_400.0
"""For how long the client begins with HTTP/1.1, in the network in which gRPC got no answer."""
_CHALLENGE = transport.Method("GetChallenge", fleet_pb2.GetChallengeResponse)
_logger = logging.getLogger(__name__)


class ServerLink(transport.Channel):
    """A channel that can be replaced by one of another route. Callers use it as they use a channel."""

    def __init__(self, route: ServerRoute) -> None:
        self.route = route
        self._current = route.open()

    def __enter__(self) -> ServerLink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def http(self) -> HttpChannel | None:
        """The channel, if it is one of HTTP/1.1."""
        return self._current if isinstance(self._current, HttpChannel) else None

    def replace(self, route: ServerRoute) -> None:
        """Take another route for the next calls. No call must be open: those of the former route end."""
        self._current.close()
        self.route, self._current = route, route.open()

    def dial(self) -> OpenChannel:
        """Open one more connection by the current route."""
        return self.route.open()

    def close(self) -> None:
        """Close the channel."""
        self._current.close()

    @override
    def unary_unary(self, method: str, /, *, response_deserializer: Any) -> Any:
        return self._current.unary_unary(method, response_deserializer=response_deserializer)

    @override
    def unary_stream(self, method: str, /, *, response_deserializer: Any) -> Any:
        return self._current.unary_stream(method, response_deserializer=response_deserializer)

    @override
    def stream_unary(self, method: str, /, *, response_deserializer: Any) -> Any:
        return self._current.stream_unary(method, response_deserializer=response_deserializer)


class _Remembered(msgspec.Struct, frozen=True):
    """That HTTP/1.1 was used in a network, until a time (Unix, in seconds)."""

    network: str
    until: float


class TransportChoice:
    """Chooses the route of a link, of which it opens the first one; with one route there is no choice.

    `file` remembers HTTP/1.1. `now` is the time of day in seconds, `is_answered` asks a server by a route.
    """

    def __init__(
        self,
        routes: Mapping[str, ServerRoute],
        file: Path,
        *,
        now: Callable[[], float] = time.time,
        is_answered: Callable[[ServerRoute, StopSignal], bool] | None = None,
        find_network: Callable[[ServerRoute], str] | None = None,
    ) -> None:
        self._routes = routes
        self._file = file
        self._now = now
        self._is_answered = is_answered or ask
        self._find_network = find_network or network_to
        self._num_silent = 0
        self._remembered: _Remembered | None = None
        first = GRPC if GRPC in routes else HTTP
        if self._may_change and self._recall():
            first = HTTP
            _logger.info("The client uses %s: gRPC got no answer in this network before.", routes[HTTP])
        self.link = ServerLink(routes[first])

    @property
    def _may_change(self) -> bool:
        return len(self._routes) > 1

    def note_answer(self) -> None:
        """Note that the server has answered a call."""
        self._num_silent = 0

    def note_failure(self, exc: errors.CallError, lasted_s: float, stop: StopSignal) -> bool:
        """Note a call that has failed after so long; return whether the link has another route now.

        No assignment must be in progress. Raises `Cancelled`.
        """
        if not _is_silent(exc):
            self._num_silent = 0
            return False
        self._num_silent += 1
        if lasted_s >= LONG_S and not is_cut(exc, lasted_s):
            self._num_silent = max(self._num_silent, TRIES)
        if not self._may_change:
            return False
        reason = proxies.shorten(exc.text)
        if self.link.route.transport == GRPC:
            # Asked last: a server that has just come back may answer over HTTP/1.1 before the channel is open again.
            is_due = self._is_due and self._is_answered(self._routes[HTTP], stop)
            if not is_due or self._is_answered(self._routes[GRPC], stop):
                return False
            self._change(HTTP, f"gRPC gets no answer from the server ({reason})")
        else:
            has_moved = self._remembered is None or self._network() != self._remembered.network
            if not (has_moved or self._is_due) or not self._is_answered(self._routes[GRPC], stop):
                return False
            self._change(GRPC, f"HTTP/1.1 gets no answer from the server ({reason})")
        return True

    def review(self, stop: StopSignal) -> None:
        """Try gRPC again if HTTP/1.1 was used for a day. No assignment must be in progress. Raises `Cancelled`."""
        if self._remembered is None or self._is_current(self._remembered):
            return
        if self._is_answered(self._routes[GRPC], stop):
            self._change(GRPC, "gRPC gets answers again")
        else:
            self._remember()

    @property
    def _is_due(self) -> bool:
        number = self._num_silent
        return number % MAX_TRIES_BETWEEN == 0 if number > MAX_TRIES_BETWEEN else number in (2, 4, 8, 16)

    def _change(self, to: str, reason: str) -> None:
        self.link.replace(self._routes[to])
        self._num_silent = 0
        again = "; it tries gRPC again in another network, and after a day" if to == HTTP else ""
        _logger.info("%s: the client uses %s from now on%s.", reason, self.link.route, again)
        if to == HTTP:
            self._remember()
        else:
            self._remembered = None
            self._file.unlink(missing_ok=True)

    def _network(self) -> str:
        return self._find_network(self._routes[GRPC])

    def _is_current(self, remembered: _Remembered) -> bool:
        return 0.0 <= remembered.until - self._now() <= REMEMBERED_S

    def _recall(self) -> bool:
        """Return whether the client begins with HTTP/1.1."""
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=prepare_type(_Remembered))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return False  # the file only saves two calls
        if not self._is_current(found) or self._network() != found.network:
            return False
        self._remembered = found
        return True

    def _remember(self) -> None:
        self._remembered = _Remembered(self._network(), self._now() + REMEMBERED_S)
        try:
            durable.write_bytes(self._file, msgspec.json.encode(self._remembered))
        except OSError as exc:
            _logger.warning("%s cannot be written: %s; the next start begins with gRPC.", self._file, exc)


def ask(route: ServerRoute, stop: StopSignal) -> bool:
    """Return whether a server answers by this route: a call that needs no identity, on a connection of its own.

    Raises `Cancelled`.
    """
    request = fleet_pb2.GetChallengeRequest(protocol_version=wire.PROTOCOL_VERSION).SerializeToString()
    with route.open() as channel:
        try:
            transport.result(_CHALLENGE.start(channel, request, PROBE_S, ()), stop)
        except errors.CallError as exc:
            return not (_is_silent(exc) or proxies.is_distrusted(exc.text))
    return True


def network_to(route: ServerRoute) -> str:
    """Return this machine's address towards a server or its proxy, which changes with the network. Nothing is sent."""
    proxy = proxies.find(route.server, given=route.proxy)
    place = route.server if proxy is None or proxy.problem else urlsplit(proxy.url).netloc.rpartition("@")[2]
    host, _, port = place.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as opened:
            opened.connect(address)
            return f"{opened.getsockname()[0]} to {place}"
    except OSError:
        return ""


def _is_silent(exc: errors.CallError) -> bool:
    """Return whether an error means that there was no answer of a server, though there was nothing to distrust."""
    is_silent = isinstance(exc, errors.UnreachableError) or exc.code == "DEADLINE_EXCEEDED"
    return is_silent and not proxies.is_distrusted(exc.text)
