"""The choice between gRPC and HTTP/1.1: when a client changes, what it remembers, and when it goes back."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from fedplat.wire.http_requests import HttpError
from fedplat_client import ClientOptions
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import CallError, CallRefusedError, ServerUnavailableError, UnreachableError
from fedplat_client.link import REMEMBERED_S, TransportChoice, network_to
from fedplat_client.transport import GRPC, HTTP, ServerRoute, translate_error

ROUTE = ServerRoute("127.0.0.1:1", tls=False, ca="")
ROUTES = {GRPC: ROUTE, HTTP: replace(ROUTE, server="127.0.0.1:2", transport=HTTP)}
NO_H2 = UnreachableError("UNAVAILABLE", "last error: Cannot check peer: missing selected ALPN property.")
STOP = StopSignal()


@dataclass
class Network:
    """What answers in a network, and what was asked."""

    answers: set[str]
    name: str = "office"
    asked: list[str] = field(default_factory=list[str])

    def is_answered(self, route: ServerRoute, stop: StopSignal) -> bool:
        self.asked.append(route.transport)
        return route.transport in self.answers

    def choose(self, folder: Path, now: float = 0.0, routes: dict[str, ServerRoute] = ROUTES) -> TransportChoice:
        return TransportChoice(
            routes,
            folder / "transport.json",
            now=lambda: now,
            is_answered=self.is_answered,
            find_network=lambda route: self.name,
        )


def transport_after(choice: TransportChoice, *failures: CallError, lasted_s: float = 0.1) -> str:
    for each in failures:
        choice.note_failure(each, lasted_s, STOP)
    choice.link.close()
    return choice.link.route.transport


def test_two_calls_without_an_answer_change_to_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = Network({HTTP})
    choice = network.choose(tmp_path)
    with caplog.at_level(logging.INFO):
        assert not choice.note_failure(NO_H2, 0.1, STOP)
        assert network.asked == []
        assert choice.note_failure(NO_H2, 0.1, STOP)
    assert network.asked == [HTTP, GRPC]
    assert choice.link.http is not None
    (line,) = (record.getMessage() for record in caplog.records)
    assert "does not speak gRPC" in line
    assert "HTTP/1.1 at 127.0.0.1:2" in line
    choice.link.close()


def test_one_long_call_counts_as_two_unless_it_was_cut(tmp_path: Path) -> None:
    silent = ServerUnavailableError("DEADLINE_EXCEEDED", "Deadline Exceeded")
    assert transport_after(Network({HTTP}).choose(tmp_path), silent, lasted_s=30.0) == HTTP
    cut = UnreachableError("UNAVAILABLE", "Socket closed")  # a poll, as when the server restarts
    assert transport_after(Network({HTTP}).choose(tmp_path / "other"), cut, lasted_s=60.0) == GRPC


@pytest.mark.parametrize(
    "text",
    [
        "Tls handshake failed: SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
        "Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed.",
    ],
)
def test_a_certificate_that_is_not_trusted_is_no_reason(tmp_path: Path, text: str) -> None:
    network = Network({HTTP})
    assert transport_after(network.choose(tmp_path), *[UnreachableError("UNAVAILABLE", text)] * 4) == GRPC
    assert network.asked == []


def test_answers_and_refusals_are_no_reasons(tmp_path: Path) -> None:
    network = Network({HTTP})
    busy = ServerUnavailableError("RESOURCE_EXHAUSTED", "too many calls")
    refused = CallRefusedError("PERMISSION_DENIED", "no")
    choice = network.choose(tmp_path)
    assert transport_after(choice, NO_H2, busy, NO_H2, refused, NO_H2) == GRPC
    choice.note_answer()
    assert transport_after(choice, NO_H2) == GRPC
    assert network.asked == []


def test_a_server_that_restarts_keeps_its_clients_on_grpc(tmp_path: Path) -> None:
    """HTTP/1.1 answers first, and gRPC does when it is asked again."""
    network = Network({HTTP, GRPC})
    assert transport_after(network.choose(tmp_path), NO_H2, NO_H2) == GRPC
    assert network.asked == [HTTP, GRPC]


def test_a_server_without_http_is_asked_seldom(tmp_path: Path) -> None:
    network = Network(set())
    assert transport_after(network.choose(tmp_path), *[NO_H2] * 48) == GRPC
    assert network.asked == [HTTP] * 6  # after 2, 4, 8, 16, 32 and 48 calls


def test_one_route_leaves_no_choice(tmp_path: Path) -> None:
    network = Network({HTTP})
    for name, route in ROUTES.items():
        choice = network.choose(tmp_path, routes={name: route})
        assert transport_after(choice, *[NO_H2] * 4) == name
    assert network.asked == []


def test_http_is_remembered_for_a_day_in_its_network(tmp_path: Path) -> None:
    def begins_with(network: Network, now: float) -> str:
        return transport_after(network.choose(tmp_path, now))

    office = Network({HTTP})
    transport_after(office.choose(tmp_path), NO_H2, NO_H2)
    assert begins_with(office, REMEMBERED_S - 1.0) == HTTP
    assert begins_with(office, REMEMBERED_S + 1.0) == GRPC
    assert begins_with(office, -1.0) == GRPC  # the clock was set back
    assert begins_with(Network({GRPC, HTTP}, name="home"), 0.0) == GRPC
    (tmp_path / "transport.json").write_text("{")
    assert begins_with(office, 0.0) == GRPC


def test_it_goes_back_to_grpc(tmp_path: Path) -> None:
    network = Network({HTTP})
    choice = network.choose(tmp_path)
    transport_after(choice, NO_H2, NO_H2)
    broken = UnreachableError("UNAVAILABLE", "the connection was closed")
    assert transport_after(choice, broken) == HTTP  # once, in the same network
    network.name, network.answers = "home", {GRPC, HTTP}
    assert transport_after(choice, broken) == GRPC
    assert not (tmp_path / "transport.json").exists()


def test_it_asks_for_grpc_once_a_day(tmp_path: Path) -> None:
    network = Network({HTTP})
    transport_after(network.choose(tmp_path), NO_H2, NO_H2)
    time = [REMEMBERED_S - 1.0]
    choice = TransportChoice(
        ROUTES,
        tmp_path / "transport.json",
        now=lambda: time[0],
        is_answered=network.is_answered,
        find_network=lambda route: "office",
    )
    network.asked.clear()
    for _ in range(3):
        choice.review(STOP)
        time[0] += 2.0
    assert network.asked == [GRPC]
    network.answers = {GRPC}
    time[0] += REMEMBERED_S
    choice.review(STOP)
    assert choice.link.route.transport == GRPC
    choice.link.close()


def test_which_transports_a_client_may_use() -> None:
    assert ClientOptions().transports == (GRPC, HTTP)
    assert ClientOptions(transport="http").transports == (HTTP,)
    assert ClientOptions(mtls=True).transports == (GRPC,)
    assert ClientOptions(peer_listen="127.0.0.1:7445").transports == (GRPC,)


def test_the_network_is_this_machines_address() -> None:
    assert network_to(ROUTE) == "127.0.0.1 to 127.0.0.1:1"
    proxied = replace(ROUTE, server="fed.example.org:7443", proxy="http://anna:secret@127.0.0.1:3128")
    assert network_to(proxied) == "127.0.0.1 to 127.0.0.1:3128"
    assert network_to(replace(ROUTE, server="[::ffff:127.0.0.1]:nonsense")) == ""


def test_a_status_of_http_is_not_the_servers_answer() -> None:
    """gRPC makes UNAUTHENTICATED of a proxy's 401, at which a client would end."""
    for code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN):
        assert isinstance(translate_error(HttpError(code, "Received http2 header with status: 401")), UnreachableError)
    assert not isinstance(translate_error(HttpError(grpc.StatusCode.UNKNOWN, "no")), UnreachableError)
