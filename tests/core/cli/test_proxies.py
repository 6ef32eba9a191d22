"""Proxies of the environment: which one a connection uses, and that messages name it."""

from __future__ import annotations

import socket
import threading

import pytest

from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.errors import ServerRefusedError, ServerUnreachableError
from fedplat.wire import proxies
from support.cli.fake_admin import FakeServer

PROXY = "http://me:secret@proxy.example.org:3128"
DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
@pytest.mark.parametrize("capital", [False, True])
def test_a_proxy_is_read_from_variables_in_both_cases(variable: str, capital: bool) -> None:
    name = variable.upper() if capital else variable
    found = proxies.find("fed.example.org:7443", {name: PROXY})
    assert found == proxies.Proxy(PROXY, name)
    assert str(found) == f"the proxy proxy.example.org:3128 of {name}"
    assert proxies.find("fed.example.org:7443", {name: "proxy:1"}) == proxies.Proxy("http://proxy:1", name)


@pytest.mark.parametrize("server", ["127.0.0.1:1", "127.8.0.1:1", "[::1]:1", "localhost:1", "LOCALHOST:1"])
def test_this_machine_is_reached_without_a_proxy(server: str) -> None:
    assert proxies.find(server, {"https_proxy": PROXY}) is None


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY", "no_grpc_proxy", "NO_GRPC_PROXY"])
@pytest.mark.parametrize(
    ("server", "exceptions", "is_direct"),
    [
        ("fed.example.org:7443", "fed.example.org", True),
        ("fed.example.org:7443", "other, example.org", True),
        ("fed.example.org:7443", ".example.org", True),
        ("fed.example.org:7443", "*.Example.org", True),
        ("fed.example.org:7443", "*", True),
        ("fed.example.org:7443", "fed.example.org:7443", True),
        ("fed.example.org:7443", "ample.org", False),
        ("fed.example.org:7443", "", False),
        ("10.1.2.3:7443", "10.0.0.0/8", True),
        ("10.1.2.3:7443", "10.1.2.3:7443", True),
        ("10.1.2.3:7443", "11.0.0.0/8,nonsense/8", False),
        ("[fd00::1]:7443", "fd00::/8", True),
        ("[fd00::1]:7443", "[fd00::1]:7443", True),
    ],
)
def test_exceptions_are_names_addresses_and_networks(
    variable: str, server: str, exceptions: str, is_direct: bool
) -> None:
    found = proxies.find(server, {"https_proxy": PROXY, variable: exceptions})
    assert (found is None) == is_direct


def test_a_server_on_this_machine_answers_whatever_proxy_the_environment_has(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", DEAD)
    with AdminClient(Profile(server.address, insecure=True)) as client:
        client.status()


def test_the_message_names_a_proxy_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_own(host: str) -> bool:
        return not host

    monkeypatch.setattr(proxies, "_is_own", is_own)
    monkeypatch.setenv("ALL_PROXY", PROXY)
    with AdminClient(Profile("127.0.0.1:9", insecure=True)) as client, pytest.raises(ServerUnreachableError) as caught:
        client.status()
    assert "the proxy proxy.example.org:3128 of ALL_PROXY is not used, because gRPC does not" in str(caught.value)


@pytest.mark.parametrize(("host", "names_it"), [("192.0.2.1", True), ("127.0.0.1", False)])
def test_the_message_names_the_proxy(host: str, names_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", DEAD)
    with AdminClient(Profile(f"{host}:9", insecure=True)) as client, pytest.raises(ServerUnreachableError) as caught:
        client.status()
    named = f"the connection goes through the proxy 127.0.0.1:9 of HTTPS_PROXY: check it, or add {host} to no_proxy"
    assert (named in str(caught.value)) == names_it


@pytest.mark.parametrize(
    ("variable", "url", "shown", "problem"),
    [
        (
            "https_proxy",
            "socks5://me:secret@proxy:1080",
            "socks5://proxy:1080",
            "proxies of http:// only, not socks5://",
        ),
        ("HTTP_PROXY", "https://proxy:3128", "https://proxy:3128", "proxies of http:// only, not https://"),
        ("all_proxy", "http://me:secret@proxy:3128", "proxy:3128", "gRPC does not read that variable"),
        ("ALL_PROXY", "socks5h://proxy:1080", "socks5h://proxy:1080", "gRPC does not read that variable"),
    ],
)
def test_a_proxy_that_grpc_cannot_use_is_named(
    variable: str, url: str, shown: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, url)
    assert proxies.channel_options("fed.example.org:7443") == (("grpc.enable_http_proxy", 0),)
    text = proxies.explain("fed.example.org:7443", "Connection refused")
    assert text.startswith(f"Connection refused; the proxy {shown} of {variable} is not used, because ")
    assert text.endswith(f"{problem}: set grpc_proxy=http://HOST:PORT, or add fed.example.org to no_proxy")
    monkeypatch.setenv("grpc_proxy", DEAD)
    assert proxies.channel_options("fed.example.org:7443") == (("grpc.http_proxy", DEAD),)


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ("Received http2 header with status: 413", "answers with the HTTP status 413: raise its limit on requests"),
        ("Received http2 header with status: 504", "answers with the HTTP status 504"),
    ],
)
def test_an_answer_of_a_proxy_is_named_as_such(details: str, text: str) -> None:
    assert proxies.explain_status(details).startswith("a proxy or load balancer before the server ")
    assert text in proxies.explain_status(details)
    assert proxies.explain_status("Socket closed") == "Socket closed"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _answer(listener: socket.socket, status: bytes) -> None:
    """Answer the first request of one connection as a proxy does that refuses it: headers with a status only."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        stream.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        connection.sendall(_frame(4, 0, 0, b""))  # SETTINGS
        while head := stream.read(9):
            stream.read(int.from_bytes(head[:3]))
            if head[3] == 1:  # HEADERS: the reply has the 8th entry of the static table, :status, as a literal
                number = int.from_bytes(head[5:9])
                connection.sendall(_frame(1, 0b101, number, b"\x08" + bytes([len(status)]) + status))


def test_a_request_that_a_proxy_refuses_as_too_large_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer, args=(listener, b"413"), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with AdminClient(Profile(address, insecure=True)) as client, pytest.raises(ServerRefusedError) as caught:
            client.status()
    assert str(caught.value) == (
        f"the request did not reach the server at {address}: a proxy or load balancer before the server answers with "
        "the HTTP status 413: raise its limit on requests (nginx: client_max_body_size 0)"
    )


@pytest.mark.parametrize(
    ("details", "text"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:1: Handshake read failed",
            "Handshake read failed",
        ),
        (
            "errors resolving fed:1: [field:hostname lookup error:address lookup failed for fed:1: not found]",
            "the host name is not known",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Cannot check peer: missing "
            "selected ALPN property.",
            "what answers there does not speak gRPC: it may be a proxy, or the server's port of HTTP/1.1",
        ),
        ("Stream removed (RST_STREAM (Received RST_STREAM with error code 2))", "the connection was closed"),
        ("no server leads the jobs at the moment", "no server leads the jobs at the moment"),
    ],
)
def test_the_text_of_a_failed_connection_is_its_cause_alone(details: str, text: str) -> None:
    assert proxies.shorten(details) == text
