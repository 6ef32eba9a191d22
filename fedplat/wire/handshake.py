"""Diagnosis of a failed connection: TLS against plaintext, or an untrusted certificate.

gRPC retries such connections forever with little explanation. `problem` opens a connection of its own and returns the
cause.
"""

from __future__ import annotations

import socket
import ssl
import time

_EXPIRED = frozenset({9, 10})
_WRONG_NAME = frozenset({62, 64})


def problem(server: str, *, ca: str = "", insecure: bool = False, timeout_s: float = 3.0) -> str:
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
            context.set_alpn_protocols(["h2"])
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
