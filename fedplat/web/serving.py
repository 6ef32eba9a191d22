"""Serving pages with uvicorn, also on a person's own machine: on loopback, signed in by a single-use code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import html
import ipaddress
import os
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from typing_extensions import override

from fedplat import errors, http_connections
from fedplat.http_connections import ConnectionLimits
from fedplat.web.sessions import LoginCodes

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
STOP_S = 1
"""Seconds for requests in progress when the process ends; streams end at once."""
LIMITS = ConnectionLimits(total=512)
"""Of the connections: the pages stream, so responses have no deadline."""


class ServingError(errors.FedplatError):
    """The pages cannot be served as requested; the message has the reason."""


class WebApp(Protocol):
    """Pages. `stop` ends their streams and sessions."""

    app: Starlette

    def stop(self) -> None:
        """End all streams and sessions."""
        ...


class _Server(uvicorn.Server):
    """Leaves signals to its caller, and ends the streams when it stops: uvicorn would wait for them."""

    def __init__(self, config: uvicorn.Config, pages: WebApp, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._pages, self._on_started = pages, on_started

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pages.stop()
        await super().shutdown(sockets)


def split_address(text: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`. Raises `ServingError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ServingError(f"{text!r} is not an address to listen on; expected HOST:PORT, for instance 127.0.0.1:7480")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ServingError` if the address is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as exc:
        listening.close()
        raise ServingError(
            f"the pages cannot be served on {host}:{port} ({exc.strerror}); choose another address with --listen"
        ) from exc
    return listening


def make_server(
    pages: WebApp,
    tls: ssl.SSLContext | None,
    on_started: Callable[[], None] = lambda: None,
    limits: ConnectionLimits = LIMITS,
) -> uvicorn.Server:
    """Return the server of an app. Its `serve` needs the socket of `bind`."""
    config = uvicorn.Config(
        pages.app,
        lifespan="off",
        ws="none",
        http=http_connections.make_protocol(limits, tls),
        loop="asyncio",
        log_config=None,
        log_level="error",  # warnings are about requests, which anyone can send
        access_log=False,  # addresses may have filters that operators typed
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return _Server(config, pages, on_started)


@dataclasses.dataclass(frozen=True)
class LocalPageOptions:
    """Where to listen, and what to do with each address that signs in: print it with `announce`.

    `open_browser` opens the first one: it is called with the URL of a file that leads to it. The pages also end when
    the pipe with the descriptor `parent_pipe` is closed, because the parent has ended. `instead` is what to use for an
    address that is not one of loopback.
    """

    listen: str
    announce: Callable[[str], object]
    open_browser: Callable[[str], object] | None = None
    parent_pipe: int | None = None
    instead: str = "use 127.0.0.1 and an SSH tunnel"


def serve_locally(create: Callable[[LoginCodes, frozenset[str], int], WebApp], options: LocalPageOptions) -> None:
    """Serve pages until Ctrl-C or SIGTERM. Raises `ServingError` for an address that cannot be used.

    `create` returns the pages for the codes that are announced, the names of the host, and the port.
    """
    host, port = split_address(options.listen)
    if not is_loopback(host):
        raise ServingError(
            f"these pages are served on loopback only, because they have no TLS, and {host} is not a loopback address; "
            f"{options.instead}"
        )
    with contextlib.ExitStack() as stack, bind(host, port) as listening:
        port = listening.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        codes = LoginCodes(time.monotonic)

        def announce() -> str:
            address = f"http://{name}:{port}/login?code={codes.make()}"
            options.announce(address)
            return address

        def begin(address: str) -> None:
            if options.open_browser is not None:
                page = _write_page(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedplat-")), address)
                asyncio.get_running_loop().run_in_executor(None, options.open_browser, page)

        async def run() -> None:
            pages = create(codes, LOOPBACK_NAMES | {host.lower()}, port)
            server = make_server(pages, None, lambda: begin(announce()))

            def stop() -> None:
                server.should_exit = True

            with _signals(stop, announce), _watch_parent(options.parent_pipe, stop):
                await server.serve(sockets=[listening])

        asyncio.run(run())


def _write_page(folder: str, address: str) -> str:
    """Write a page that leads to an address to a private folder, and return its URL.

    The arguments of a browser are visible to other users of the machine, and the address has a code.
    """
    path = Path(folder) / "pages.html"
    link = html.escape(address, quote=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(
            '<!doctype html><meta charset="utf-8"><title>fedplat</title><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={link}"><a href="{link}">The pages</a>\n'
        )
    return path.as_uri()


@contextlib.contextmanager
def _watch_parent(pipe: int | None, stop: Callable[[], None]) -> Generator[None]:
    """Stop when the other end of a pipe, to which nothing is written, is closed."""
    if pipe is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe, stop)
    try:
        yield
    finally:
        loop.remove_reader(pipe)


@contextlib.contextmanager
def _signals(stop: Callable[[], None], announce: Callable[[], object]) -> Generator[None]:
    """Stop on SIGINT and SIGTERM; announce a new code on SIGUSR1, and on Enter in a terminal."""
    loop = asyncio.get_running_loop()
    handlers: dict[signal.Signals, Callable[[], object]] = {
        signal.SIGINT: stop,
        signal.SIGTERM: stop,
        signal.SIGUSR1: announce,
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    def on_input() -> None:
        assert descriptor is not None
        if os.read(descriptor, 1024):
            announce()
        else:
            loop.remove_reader(descriptor)  # the terminal is closed

    if descriptor is not None:
        loop.add_reader(descriptor, on_input)
    try:
        yield
    finally:
        if descriptor is not None:
            loop.remove_reader(descriptor)
        for number in handlers:
            loop.remove_signal_handler(number)
