"""nginx and HAProxy as programs of their own, which end TLS before the server's port of HTTP/1.1."""

from __future__ import annotations

import contextlib
import getpass
import socket
from collections.abc import Generator
from pathlib import Path

from fedplat_server.auth.pki_folder import PkiFolder
from support import processes, programs


@contextlib.contextmanager
def nginx(
    pki: PkiFolder, folder: Path, upstream: str, *, http2: bool = False, answer: str = ""
) -> Generator[tuple[str, Path]]:
    """nginx with its default limits; its address and its log. With `http2` it takes calls of gRPC for requests.

    `answer` is what it does with all requests instead of sending them on.
    """
    address, log = f"127.0.0.1:{processes.free_port()}", folder / "access.log"
    folder.mkdir(exist_ok=True)
    text = f"""
        user {getpass.getuser()}; daemon off; worker_processes 1; pid {folder}/nginx.pid;
        error_log {folder}/error.log; events {{}}
        http {{
            access_log {log}; client_body_temp_path {folder}/body; proxy_temp_path {folder}/a;
            fastcgi_temp_path {folder}/b; uwsgi_temp_path {folder}/c; scgi_temp_path {folder}/d;
            server {{
                listen {address} ssl{" http2" * http2};
                ssl_certificate {pki.files.certificate};
                ssl_certificate_key {pki.files.key};
                location / {{ {answer or f"proxy_pass https://{upstream};"} }}
            }}
        }}
    """
    file = folder / "nginx.conf"
    file.write_text(text)
    command = [programs.require("nginx"), "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(file)]
    with processes.processes([command], folder / "nginx.out"):
        _wait_until_open(address)
        yield address, log


@contextlib.contextmanager
def haproxy(pki: PkiFolder, folder: Path, upstream: str) -> Generator[tuple[str, Path]]:
    """HAProxy that speaks HTTP/1.1 only, with the timeouts of its examples; its address and its log."""
    address, log = f"127.0.0.1:{processes.free_port()}", folder / "haproxy.log"
    folder.mkdir(exist_ok=True)
    pair = folder / "pair.pem"
    pair.write_bytes(pki.files.certificate.read_bytes() + pki.files.key.read_bytes())
    text = f"""
global
    log stdout format raw local0
defaults
    mode http
    log global
    option httplog
    timeout connect 5s
    timeout client 50s
    timeout server 50s
frontend clients
    bind {address} ssl crt {pair} alpn http/1.1
    default_backend fedplat
backend fedplat
    server one {upstream} ssl verify required ca-file {pki.ca} verifyhost localhost
"""
    file = folder / "haproxy.cfg"
    file.write_text(text)
    with processes.processes([[programs.require("haproxy"), "-f", str(file)]], log):
        _wait_until_open(address)
        yield address, log


def _wait_until_open(address: str) -> None:
    host, _, port = address.rpartition(":")

    def is_open() -> bool:
        with socket.socket() as opened:
            return opened.connect_ex((host, int(port))) == 0

    processes.until(is_open, f"a program that listens at {address}")
