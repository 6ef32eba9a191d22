"""What a client's listener serves, to whom, and what it refuses: raw calls over real connections."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_client import ListenerError
from fedplat_client._auth.mtls import PeerCredentials
from fedplat_client._work.peers.listener import ListenerLimits, PeerListener, utc_now
from fedplat_client.transport import connect
from fedplat_server.auth.pki_folder import Authority
from support.mtls import DAY, signed_by
from support.peers import Silos, client_id, credentials_of, refusal, silos_in
from support.polling import until

S = grpc.StatusCode
LARGE = 64_000_000
"""Far more bytes than gRPC sends before anything is read."""


@pytest.fixture
def silos(tmp_path: Path) -> Generator[Silos]:
    with silos_in(tmp_path) as made:
        yield made


class Cut:
    """A timer of a listener, which fires when a test lets it."""

    all: ClassVar[list[Cut]] = []

    def __init__(self, seconds: float, cancel: Callable[[], object]) -> None:
        self.seconds = seconds
        self.fire = cancel
        self.all.append(self)

    def start(self) -> None: ...

    def cancel(self) -> None: ...


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[Cut]:
    monkeypatch.setattr(Cut, "all", [])
    monkeypatch.setattr(threading, "Timer", Cut)
    return Cut.all


def content_of(call: Any) -> bytes:
    return b"".join(chunk.data for chunk in call)


@contextlib.contextmanager
def half_sent(silos: Silos, number: int, num_calls: int) -> Generator[list[Any]]:
    """Calls of Fetch of which the requests are not sent."""
    ended = threading.Event()

    def send_nothing() -> Generator[bytes]:
        ended.wait()
        yield from ()

    with credentials_of(number, silos.authority).connect(silos.address, client_id(1)) as channel:
        method = channel.stream_stream("/fedplat.wire.v1.Peer/Fetch")
        calls: list[Any] = [method(send_nothing(), timeout=60.0) for _ in range(num_calls)]
        try:
            yield calls
        finally:
            ended.set()
            for call in calls:
                call.cancel()


def test_a_file_is_served_from_an_offset_on(silos: Silos) -> None:
    with silos.offer(2):
        for offset in (0, 1, 2_999_999, 3_000_000):
            with silos.stream(offset=offset) as call:
                assert content_of(call) == silos.content[offset:]
        with silos.stream(offset=3_000_001) as call:
            assert refusal(call) == (S.OUT_OF_RANGE, "WRONG_OFFSET")


def test_who_may_fetch_what(silos: Silos, tmp_path: Path) -> None:
    """A neighbour of one exchange learns nothing about the files of another one."""
    other = tmp_path / "other"
    other.write_bytes(b"other")
    digest = hashlib.sha256(b"other").hexdigest()
    with silos.offer(2), silos.listener.offer(digest, other, [client_id(3)]):
        for number, requested, expected in (
            (3, silos.digest, (S.NOT_FOUND, "NOT_OFFERED")),
            (2, digest, (S.NOT_FOUND, "NOT_OFFERED")),
            (2, "0" * 64, (S.NOT_FOUND, "NOT_OFFERED")),
            (2, silos.digest[:-1], (S.NOT_FOUND, "NOT_OFFERED")),
            (4, silos.digest, (S.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")),
        ):
            with silos.stream(number, requested) as call:
                assert refusal(call) == expected
        with silos.stream(3, digest) as call:
            assert content_of(call) == b"other"
    with silos.stream(2) as call:
        assert refusal(call) == (S.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")


def test_nothing_else_is_reachable(silos: Silos) -> None:
    with silos.offer(2), credentials_of(2, silos.authority).connect(silos.address, client_id(1)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            fleet_pb2_grpc.FleetStub(channel).GetChallenge(fleet_pb2.GetChallengeRequest())
        assert caught.value.code() is S.UNIMPLEMENTED
        raw = channel.unary_stream("/fedplat.wire.v1.Peer/Fetch")
        for message, expected in ((b"\xff" * 10, S.INVALID_ARGUMENT), (bytes(2000), S.RESOURCE_EXHAUSTED)):
            assert refusal(raw(message))[0] is expected


def test_a_caller_without_a_certificate_does_not_connect(silos: Silos) -> None:
    credentials = grpc.ssl_channel_credentials(credentials_of(2, silos.authority).authorities)
    options = [("grpc.ssl_target_name_override", f"{client_id(1)}.peer.fedplat.invalid")]
    with silos.offer(2), grpc.secure_channel(silos.address, credentials, options) as channel:
        assert refusal(channel.unary_stream("/fedplat.wire.v1.Peer/Fetch")(b""))[0] is S.UNAVAILABLE


def test_a_certificate_of_the_authority_without_a_client_is_refused(silos: Silos) -> None:
    """Such as that of the server, which is for servers only, or one with another name."""
    key, certificate = signed_by(silos.authority, "no client/")
    options = [("grpc.ssl_target_name_override", f"{client_id(1)}.peer.fedplat.invalid")]
    trusted = credentials_of(2, silos.authority).authorities
    credentials = grpc.ssl_channel_credentials(trusted, key, certificate)
    with silos.offer(2), grpc.secure_channel(silos.address, credentials, options) as channel:
        call = channel.unary_stream("/fedplat.wire.v1.Peer/Fetch")(b"")
        assert refusal(call) == (S.UNAUTHENTICATED, "CERTIFICATE_UNKNOWN")


def test_the_certificate_of_a_listener_is_not_that_of_a_server(silos: Silos) -> None:
    """A client that pretends to be the server, or another client that has no listener, is not believed."""
    own = credentials_of(2, silos.authority)
    shown = own.key, own.certificate
    with (
        silos.offer(2),
        connect(silos.address, tls=True, ca=own.authorities.decode(), client_certificate=shown) as channel,
    ):
        assert refusal(channel.unary_stream("/fedplat.wire.v1.Peer/Fetch")(b""))[0] is S.UNAVAILABLE
    key, certificate = signed_by(silos.authority, client_id(5))
    with PeerListener("127.0.0.1:0", lambda: PeerCredentials(key, certificate, own.authorities)) as listener:
        listener.open()
        with own.connect(f"127.0.0.1:{listener.port}", client_id(5)) as channel:
            assert refusal(channel.unary_stream("/fedplat.wire.v1.Peer/Fetch")(b""))[0] is S.UNAVAILABLE


def test_a_certificate_that_expires_on_an_open_connection_is_refused(tmp_path: Path) -> None:
    ahead = [datetime.timedelta()]
    with silos_in(tmp_path, now=lambda: utc_now() + ahead[0]) as silos, silos.offer(2):
        with silos.stream() as call:
            assert content_of(call) == silos.content
        ahead[0] = 2 * DAY
        with silos.stream() as call:
            assert refusal(call) == (S.UNAUTHENTICATED, "CERTIFICATE_EXPIRED")


def test_a_new_certificate_is_used_at_the_next_handshake(tmp_path: Path) -> None:
    """Also one of another authority, of which the client then trusts peers."""
    old, new = Authority.new(utc_now()), Authority.new(utc_now())
    current = [credentials_of(1, old)]
    with PeerListener("127.0.0.1:0", lambda: current[0]) as listener:
        listener.open()
        silos = Silos(old, listener, tmp_path, b"content")
        with silos.offer(2):
            with silos.stream() as call:
                assert content_of(call) == b"content"
            current[0] = credentials_of(1, new)
            with silos.stream() as call:
                assert refusal(call)[0] is S.UNAVAILABLE
            silos.authority = new
            with silos.stream() as call:
                assert content_of(call) == b"content"


def test_streams_are_limited_in_total_and_for_each_peer(tmp_path: Path) -> None:
    limits = ListenerLimits(streams=2, streams_per_peer=1)
    other = tmp_path / "other"
    other.write_bytes(bytes(10))
    digest = hashlib.sha256(bytes(10)).hexdigest()
    with silos_in(tmp_path, LARGE, limits=limits) as silos, silos.offer(2, 3, 4):
        with silos.stream(2) as first, silos.stream(3) as second:
            next(first)
            next(second)
            with silos.stream(4) as third:
                assert refusal(third) == (S.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
            second.cancel()
            with silos.listener.offer(digest, other, [client_id(2)]), silos.stream(2, digest) as third:
                assert refusal(third) == (S.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        until(lambda: silos.listener.num_streams == 0, "the streams have ended")
        with silos.stream(4, offset=LARGE - 10) as call:
            assert content_of(call) == silos.content[-10:]


@pytest.mark.parametrize(
    ("caller", "num_refused", "status"),
    [(4, 8, S.PERMISSION_DENIED), (3, 6, S.RESOURCE_EXHAUSTED)],
    ids=["stranger", "neighbour"],
)
def test_calls_without_a_request_keep_no_one_out(
    caller: int, num_refused: int, status: grpc.StatusCode, tmp_path: Path
) -> None:
    """A thread for each, until it arrives: any client of the server could close a listener to its neighbours so."""
    limits = ListenerLimits(streams=4, streams_per_peer=2, request_s=60.0)
    with silos_in(tmp_path, limits=limits) as silos, silos.offer(2, 3), half_sent(silos, caller, 8) as calls:
        until(lambda: sum(call.done() for call in calls) == num_refused, "the calls are refused")
        assert {call.code() for call in calls if call.done()} == {status}
        with silos.stream(2) as call:
            assert content_of(call) == silos.content


def test_a_call_without_a_request_is_cut(cuts: list[Cut], tmp_path: Path) -> None:
    limits = ListenerLimits(streams_per_peer=1, request_s=7.0)

    def is_served() -> bool:
        with contextlib.suppress(grpc.RpcError), silos.stream(2) as call:
            return content_of(call) == silos.content
        return False

    with silos_in(tmp_path, limits=limits) as silos, silos.offer(2), half_sent(silos, 2, 1) as calls:
        until(lambda: [cut.seconds for cut in cuts] == [7.0], "a call without a request")
        cuts[0].fire()
        assert refusal(calls[0])[0] is S.CANCELLED
        until(is_served, "the place of the call")


def test_a_peer_replaces_its_own_stream_of_a_file(tmp_path: Path) -> None:
    """Its connection broke, and the listener has not noticed."""
    limits = ListenerLimits(streams=1, streams_per_peer=1)
    with silos_in(tmp_path, LARGE, limits=limits) as silos, silos.offer(2), silos.stream() as first:
        next(first)
        with silos.stream(offset=LARGE - 10) as second:
            assert content_of(second) == silos.content[-10:]
        with pytest.raises(grpc.RpcError) as caught:
            content_of(first)
        assert caught.value.code() is S.CANCELLED


def test_a_stream_that_is_not_read_is_cut(cuts: list[Cut], tmp_path: Path) -> None:
    with silos_in(tmp_path, LARGE, limits=ListenerLimits(stream_s=7.0)) as silos, silos.offer(2):
        with silos.stream() as call:
            next(call)
            (cut,) = [each for each in cuts if each.seconds == 7.0]
            assert silos.listener.num_streams == 1
            cut.fire()
            until(lambda: silos.listener.num_streams == 0, "the stream is cut")
            with pytest.raises(grpc.RpcError) as caught:
                content_of(call)
        assert caught.value.code() is S.CANCELLED


def test_the_bytes_for_one_peer_are_limited(tmp_path: Path) -> None:
    with silos_in(tmp_path, limits=ListenerLimits(sends_per_peer=2.0)) as silos, silos.offer(2, 3):
        for _ in range(2):
            with silos.stream(2) as call:
                content_of(call)
        with silos.stream(2) as call:
            assert refusal(call) == (S.FAILED_PRECONDITION, "TOO_MANY_BYTES")
        with silos.stream(3) as call:
            assert content_of(call) == silos.content


def test_the_end_of_an_offer_ends_its_streams(tmp_path: Path) -> None:
    with silos_in(tmp_path, LARGE) as silos, contextlib.ExitStack() as stack:
        with silos.offer(2):
            call = stack.enter_context(silos.stream())
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            content_of(call)
        assert (caught.value.code(), caught.value.details()) == (S.NOT_FOUND, "this file is not offered any more")


def test_a_file_that_is_gone_is_refused(silos: Silos) -> None:
    with silos.offer(2) as path:
        path.unlink()
        with silos.stream() as call:
            assert refusal(call) == (S.NOT_FOUND, "NOT_OFFERED")


def test_an_offer_needs_a_digest_and_a_file(silos: Silos, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 64"), silos.offer(2, digest="digest"):
        pass
    with pytest.raises(FileNotFoundError), silos.listener.offer("0" * 64, tmp_path / "missing", []):
        pass


def test_a_port_that_is_taken_is_an_error(silos: Silos) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            PeerListener(address, lambda: credentials_of(1, silos.authority)) as listener,
            pytest.raises(ListenerError, match=f"cannot use {address} .*choose a free port"),
        ):
            listener.open()


# --- what is not offered yet -----------------------------------------------------------------------------------------


def test_an_expected_neighbour_waits_for_a_chunk(silos: Silos) -> None:
    sent: list[int] = []
    name, chunk = "c" * 64, bytes(range(256)) * 1000
    with silos.listener.expect([client_id(2)]), silos.stream(digest=name) as call:
        until(lambda: silos.listener.num_waits == 1, "a call that waits")
        with silos.listener.offer(name, chunk, [client_id(2)], on_sent=sent.append):
            assert content_of(call) == chunk
            assert sum(sent) == len(chunk)
            with silos.stream(3, digest=name) as another:
                assert refusal(another) == (S.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")
    until(lambda: silos.listener.num_waits == 0, "no call that waits")


def test_only_expected_neighbours_wait_and_one_call_of_each(silos: Silos) -> None:
    with silos.offer(3), silos.listener.expect([client_id(2)]):
        with silos.stream(3, digest="c" * 64) as call:
            assert refusal(call) == (S.NOT_FOUND, "NOT_OFFERED")
        with silos.stream(4, digest="c" * 64) as call:
            assert refusal(call) == (S.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")
        with silos.stream(2, digest="c" * 64) as waiting:
            until(lambda: silos.listener.num_waits == 1, "a call that waits")
            with silos.stream(2, digest="d" * 64) as call:
                assert refusal(call) == (S.NOT_FOUND, "NOT_OFFERED")
            waiting.cancel()
        until(lambda: silos.listener.num_waits == 0, "no call that waits")


def test_a_wait_ends_in_time_or_when_the_neighbour_is_not_expected_any_more(tmp_path: Path) -> None:
    with (
        silos_in(tmp_path, limits=ListenerLimits(wait_s=0.1)) as silos,
        silos.listener.expect([client_id(2)]),
        silos.stream(digest="c" * 64) as call,
    ):
        assert refusal(call) == (S.NOT_FOUND, "NOT_OFFERED")
    with silos_in(tmp_path) as silos, silos.stream(digest="c" * 64) as early:
        assert refusal(early) == (S.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")
        with contextlib.ExitStack() as stack:
            with silos.listener.expect([client_id(2)]):
                call = stack.enter_context(silos.stream(digest="c" * 64))
                until(lambda: silos.listener.num_waits == 1, "a call that waits")
            assert refusal(call) == (S.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")
