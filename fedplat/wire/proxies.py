"""What stands between a client and its server: proxies, and the diagnosis of connections that failed.

gRPC takes a proxy from the environment without a word about it, and only from names in small letters. Here it is found
by the rules that most programs have, and given to gRPC as an option, so that messages can name it.

gRPC retries a failed connection forever, with little explanation. `problem` opens a connection of its own and
returns the cause.
"""

from __future__ import annotations

import html
import ipaddress
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The first one that is set counts, as in gRPC; each also in capital letters."""
_UNUSED = "all_proxy"
"""A variable of other programs, which gRPC ignores; messages name it."""
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
NONE = "none"
"""The value of `OPTION` for a direct connection."""
OPTION = "--proxy"
_STATUS = re.compile(r"http2 header with status: (\d{3})", re.IGNORECASE)
_CAUSE = re.compile(
    r".*last error: (?:[A-Z_]+: )?(?:(?:ipv[46]|unix):\S+ )?(?:Failed to connect to remote host: )?", re.DOTALL
)
_DISTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "certificate is not trusted")
_TOO_LARGE = 413
_NO_TRAILERS = "Data frame with END_STREAM flag received"
"""What gRPC reports of an answer with the status 200 that is a page: those of gRPC end with trailers."""
_ACCESS = "it may want a login, or refuse this address: ask its administrator to let requests to the server pass"
_UPSTREAM = "it does not reach the server: check that the server runs, and where the proxy sends its requests"
_ADVICE: Mapping[int, str] = {
    200: _ACCESS,
    **dict.fromkeys((301, 302, 303, 307, 308, 401, 403, 407, 451, 511), _ACCESS),
    404: "it does not pass this request on: check the address of the server, and the paths that the proxy passes on",
    _TOO_LARGE: "raise its limit on requests (nginx: client_max_body_size 0)",
    429: "raise its limit on the number of requests",
    **dict.fromkeys((502, 503, 504), _UPSTREAM),
}
"""What to do about a status of HTTP that is not the server's. With 200 and a redirection, a page for logins answers."""
_OTHER_ADVICE = "check what answers there"
_PAGE_BYTES, _PAGE_CHARACTERS = 4096, 80
_MARKUP = re.compile(r"<(script|style)\b.*?(</\1\s*>|\Z)|<!--.*?(-->|\Z)|<[^>]*(>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Proxy:
    """A proxy of the environment, and the variable that names it."""

    url: str
    variable: str

    def __str__(self) -> str:
        """Return it for a message, without a password."""
        scheme, _, place = self.url.partition("://")
        shown = place.rpartition("@")[2]
        return f"the proxy {shown if scheme.casefold() == 'http' else f'{scheme}://{shown}'} of {self.variable}"

    @property
    def problem(self) -> str:
        """The reason why gRPC does not use it, so that the connection is direct; empty if it does."""
        if self.variable.casefold() == _UNUSED:
            return "gRPC does not read that variable"
        scheme = self.url.partition("://")[0]
        return "" if scheme.casefold() == "http" else f"gRPC connects through proxies of http:// only, not {scheme}://"


def find(server: str, environment: Mapping[str, str] = os.environ, given: str = "") -> Proxy | None:
    """Return the proxy of the environment for `host:port`; None if it has none, as for this machine.

    `given` is a URL that replaces it, or "none".

    A proxy with a `problem` is not used.

    >>> print(find("fed.example.org:7443", {"HTTPS_PROXY": "http://user:secret@proxy:3128"}))
    the proxy proxy:3128 of HTTPS_PROXY
    >>> find("fed.example.org:7443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".example.org"})
    """
    if given:
        return None if given == NONE else Proxy(given, OPTION)
    host = server.rpartition(":")[0].strip("[]").casefold()
    if _is_own(host) or any(_matches(host, _read(name, environment)[1]) for name in _EXCEPTIONS):
        return None
    for name in (*_VARIABLES, _UNUSED):
        variable, url = _read(name, environment)
        if url:
            return Proxy(url if "://" in url else f"http://{url}", variable)
    return None


def channel_options(server: str, given: str = "") -> tuple[tuple[str, str | int], ...]:
    """Return the options of a channel to `host:port`: its proxy, or none whatever the environment has."""
    proxy = find(server, given=given)
    if proxy is None or proxy.problem:
        return (("grpc.enable_http_proxy", 0),)
    return (("grpc.http_proxy", proxy.url),)


def is_direct(server: str, given: str = "") -> bool:
    """Return whether `host:port` is reached without a proxy."""
    proxy = find(server, given=given)
    return proxy is None or bool(proxy.problem)


def explain(server: str, reason: str, given: str = "") -> str:
    """Return why a server cannot be reached, with what is between here and the server."""
    reason, proxy = shorten(reason), find(server, given=given)
    if proxy is None:
        return reason
    host = server.rpartition(":")[0]
    if proxy.problem:
        return (
            f"{reason}; {proxy} is not used, because {proxy.problem}: set grpc_proxy=http://HOST:PORT, or add {host} "
            "to no_proxy"
        )
    if given:
        return f"{reason}; the connection goes through {proxy}: check it, or use {OPTION} {NONE}"
    return f"{reason}; the connection goes through {proxy}: check it, or add {host} to no_proxy"


def explain_status(details: str) -> str:
    """Return gRPC's text of an error, in words if a proxy has answered with a status of HTTP."""
    status = _find_status(details)
    return details if status is None else explain_http(status)


def explain_http(status: int, page: bytes = b"") -> str:
    """Return an answer of HTTP that is not the server's as a sentence, with the beginning of its text.

    >>> print(explain_http(418, b"<title>A &amp; B</title>"))
    a proxy or load balancer before the server answers with the HTTP status 418 and 'A & B': check what answers there
    """
    text = _read_page(page)
    shown = f" and {text[:_PAGE_CHARACTERS]!r}" if text else ""
    advice = _ADVICE.get(status, _OTHER_ADVICE)
    return f"a proxy or load balancer before the server answers with the HTTP status {status}{shown}: {advice}"


def _read_page(page: bytes) -> str:
    """Return the text of a page of HTML, in one line without characters that move a cursor."""
    text = html.unescape(_MARKUP.sub(" ", page[:_PAGE_BYTES].decode(errors="ignore")))
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def explain_tunnel(error: str) -> str:
    """Return why a proxy opens no connection, from the text of `http.client`; empty if it is another error."""
    found = re.search(r"Tunnel connection failed: (\d{3})", error)
    if found is None:
        return ""
    advice = ", it wants a user and a password: http://USER:PASSWORD@HOST:PORT" * (found[1] == "407")
    return f"failed to connect: the proxy refuses with the HTTP status {found[1]}{advice}"


def is_cut(details: str) -> bool:
    """Return whether gRPC's text of an error reports a call that was ended between here and the server.

    nginx ends a stream that was silent for too long in this way, with the status INTERNAL of a server that failed.
    """
    return "RST_STREAM" in details


def is_foreign(details: str) -> bool:
    """Return whether gRPC's text of an error comes from what is between here and the server, whatever its status.

    A status of HTTP becomes one of gRPC: 401, for example, would look as if the server refused the caller.
    """
    return is_cut(details) or _find_status(details) is not None


def is_too_large(details: str) -> bool:
    """Return whether gRPC's text of an error reports a request that is too large for what is before the server."""
    return _find_status(details) == _TOO_LARGE


def _find_status(details: str) -> int | None:
    """Return the status of HTTP in gRPC's text of an error; None if it has none."""
    if _NO_TRAILERS in details:
        return 200
    found = _STATUS.search(details)
    return None if found is None else int(found[1])


def is_distrusted(details: str) -> bool:
    """Return whether an error's text names a certificate that was refused: what answered may be another server."""
    return any(sign in details for sign in _DISTRUSTED)


def shorten(details: str) -> str:
    """Return the part of gRPC's text of a failed connection that helps a reader.

    >>> shorten("failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7443: Connection refused")
    'Connection refused'
    """
    if "lookup failed" in details or "resolution failed" in details:
        return "the host name is not known"
    if details in ("Cancelling all calls", "Socket closed", "CANCELLED") or is_cut(details):
        return "the connection was closed"
    if "selected ALPN" in details or "http1.x server" in details:
        return "what answers there does not speak gRPC: it may be a proxy, or the server's port of HTTP/1.1"
    if (explained := explain_status(details)) != details:
        return explained
    return _CAUSE.sub("", details)


def _read(name: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable of that name, in small letters or else in capital ones, and its value."""
    variable = name if environment.get(name) else name.upper()
    return variable, environment.get(variable, "").strip()


def _is_own(host: str) -> bool:
    """Return whether a host is this machine, which a proxy takes for itself."""
    address = _parse(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def _matches(host: str, exceptions: str) -> bool:
    """Return whether a host is among exceptions: `*`, names with their subdomains, addresses and networks."""
    address = _parse(host)
    for each in exceptions.replace(",", " ").casefold().split():
        name = each.removeprefix("*").removeprefix(".")
        if not name or host == name or host.endswith(f".{name}") or _without_port(each) == host:
            return True
        if address is not None and "/" in each and _is_in(address, each):
            return True
    return False


def _without_port(text: str) -> str:
    host, colon, port = text.rpartition(":")
    return host.strip("[]") if colon and port.isdecimal() and (":" not in host or "[" in host) else text


def _is_in(address: ipaddress.IPv4Address | ipaddress.IPv6Address, network: str) -> bool:
    try:
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _parse(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


_EXPIRED = frozenset({9, 10})
_WRONG_NAME = frozenset({62, 64})


def describe_failure(server: str, *, ca: str = "", insecure: bool = False, timeout_s: float = 3.0) -> str:
    """Return why a connection to `host:port` cannot be set up, as a sentence; empty if the cause is a different one.

    `ca` has the trusted certificates as PEM; if it is empty, those of this machine are trusted.
    """
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            if insecure:
                return _speaks_tls(connection)
            context = ssl.create_default_context(cadata=ca or None)
            context.set_alpn_protocols(["h2", "http/1.1"])  # a proxy may refuse the handshake for lack of its own
            _shake_hands(context, connection, host)
            return ""
    except ssl.SSLCertVerificationError as exc:
        return _of_certificate(exc, host)
    except (ssl.SSLEOFError, ConnectionResetError):
        return ""  # the server went away, or a proxy has no server behind it; a plaintext server answers with frames
    except ssl.SSLError:
        return "it uses plaintext, but TLS was expected (was it started with --insecure?)"
    except (OSError, ValueError):
        return ""  # no server is listening, which gRPC reports better


def _speaks_tls(connection: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _shake_hands(context, connection, None)
    except OSError:  # ssl.SSLError is one
        return ""
    return "it uses TLS, but plaintext was expected; remove insecure"


def _shake_hands(context: ssl.SSLContext, connection: socket.socket, host: str | None) -> None:
    """Do a TLS handshake within the connection's timeout. Raises the errors of `SSLSocket`.

    `wrap_socket` is not used, because it leaves its socket open if the server dies during the handshake.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname=host)
    ends_at = time.monotonic() + (connection.gettimeout() or 0.0)
    while True:
        try:
            session.do_handshake()
        except ssl.SSLWantReadError:
            connection.sendall(outgoing.read())
            connection.settimeout(max(ends_at - time.monotonic(), 0.001))
            if data := connection.recv(1 << 16):
                incoming.write(data)
            else:
                incoming.write_eof()
        else:
            connection.sendall(outgoing.read())
            return


def _of_certificate(exc: ssl.SSLCertVerificationError, host: str) -> str:
    if exc.verify_code in _EXPIRED:
        return (
            "its certificate has expired or is not valid yet (check this machine's clock); on the server's machine: "
            "fedplat-server certificates renew"
        )
    if exc.verify_code in _WRONG_NAME:
        return (
            f"its certificate is not valid for {host}; use one of its names, or on the server's machine: "
            f"fedplat-server certificates renew --host {host}"
        )
    return (
        f"its certificate was not issued by a trusted authority ({exc.verify_message}); expected the ca.pem of this "
        "server"
    )
