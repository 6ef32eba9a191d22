"""Why two ends do not understand each other: TLS against plaintext, or a certificate that cannot be trusted.

gRPC tries again for ever and says little of it. `problem` makes one connection of its own and names the mistake.
"""

from __future__ import annotations

import socket
import ssl
import time

_EXPIRED = frozenset({9, 10})
_WRONG_NAME = frozenset({62, 64})


def problem(server: str, *, ca: str = "", insecure: bool = False, timeout_s: float = 3.0) -> str:
    """What is wrong with how `host:port` is spoken to, as a sentence; empty when that is not the trouble.

    `ca` has the trusted certificates as PEM; when it is empty, those of this machine are trusted.
    """
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            if insecure:
                return _speaks_tls(connection)
            context = ssl.create_default_context(cadata=ca or None)
            context.set_alpn_protocols(["h2"])
            _shake_hands(context, connection, host)
            return ""
    except ssl.SSLCertVerificationError as exc:
        return _of_certificate(exc, host)
    except (ssl.SSLEOFError, ConnectionResetError):
        return ""  # it went away, or a proxy has nothing behind it; a server without TLS answers with frames
    except ssl.SSLError:
        return "it speaks plaintext, and TLS was expected (is it run with --insecure?)"
    except (OSError, ValueError):
        return ""  # nobody is there, which others say better


def _speaks_tls(connection: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _shake_hands(context, connection, None)
    except OSError:  # ssl.SSLError is one
        return ""
    return "it speaks TLS, and plaintext was expected; leave insecure out"


def _shake_hands(context: ssl.SSLContext, connection: socket.socket, host: str | None) -> None:
    """A TLS handshake within the connection's timeout; raises what `SSLSocket` would.

    Not by `wrap_socket`: it leaves its socket open when the server dies just then.
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
            "its certificate has expired or is not valid yet (is this machine's clock right?); on the server's "
            "machine: fedplat-server certificates renew"
        )
    if exc.verify_code in _WRONG_NAME:
        return (
            f"its certificate is not for {host}; use a name that it has, or on the server's machine: "
            f"fedplat-server certificates renew --host {host}"
        )
    return (
        f"its certificate was not made by an authority that is trusted here ({exc.verify_message}); "
        "give the ca.pem of this very server"
    )
