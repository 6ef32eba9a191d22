"""Serving the dashboard with uvicorn: on the operator's own machine, or as a child process of a daemon.

The daemon writes `ChildOptions` as one line of JSON to its standard input and keeps that open: when it closes, the
daemon has ended, and so does this process. It prints one line, the port, when it serves.
"""

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
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

import msgspec
import uvicorn
from typing_extensions import override

from fedplat import admin, errors, http_connections
from fedplat.config.decoding import prepare_type
from fedplat.dashboard import app, sessions
from fedplat.dashboard.source import AdminSource, PageSource
from fedplat.http_connections import ConnectionLimits

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
STOP_S = 1
"""Seconds for requests in progress when the process ends; streams end at once."""
LIMITS = ConnectionLimits(total=512)
"""Of the connections: the pages stream, so responses have no deadline."""


class DashboardError(errors.FedplatError):
    """The dashboard cannot be served as requested; the message has the reason."""


class _Server(uvicorn.Server):
    """Leaves signals to its caller, and ends the streams when it stops: uvicorn would wait for them."""

    def __init__(self, config: uvicorn.Config, dashboard: app.Dashboard, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._dashboard, self._on_started = dashboard, on_started

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
        self._dashboard.stop()
        await super().shutdown(sockets)


def split_address(text: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`. Raises `DashboardError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise DashboardError(
            f"{text!r} is not an address to listen on; expected HOST:PORT, for instance 127.0.0.1:7480"
        )
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
    """Return a listening socket. Raises `DashboardError` if the address is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as exc:
        listening.close()
        raise DashboardError(
            f"the dashboard cannot listen on {host}:{port} ({exc.strerror}); choose another address with --listen"
        ) from exc
    return listening


def make_server(
    dashboard: app.Dashboard,
    tls: ssl.SSLContext | None,
    on_started: Callable[[], None] = lambda: None,
    limits: ConnectionLimits = LIMITS,
) -> uvicorn.Server:
    """Return the server of an app. Its `serve` needs the socket of `bind`."""
    config = uvicorn.Config(
        dashboard.app,
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
    return _Server(config, dashboard, on_started)


DEFAULT_LISTEN = "127.0.0.1:7480"


@dataclasses.dataclass(frozen=True)
class LocalDashboardOptions:
    """Where to listen, and what to do with each address that signs in: print it with `announce`.

    `open_browser` opens the first one: it is called with the URL of a file that leads to it.
    The dashboard also ends when the pipe with the descriptor `parent_pipe` is closed, because the parent has ended.
    """

    listen: str
    announce: Callable[[str], object]
    open_browser: Callable[[str], object] | None = None
    parent_pipe: int | None = None


def serve_locally(source: PageSource, options: LocalDashboardOptions) -> None:
    """Serve the pages until Ctrl-C or SIGTERM. Raises `DashboardError` for an address that cannot be used."""
    host, port = split_address(options.listen)
    if not is_loopback(host):
        raise DashboardError(
            f"fedplat dashboard listens on loopback only, because it has no TLS, and {host} is not a loopback address; "
            "use 127.0.0.1 (and an SSH tunnel), or fedplat-server run --dashboard HOST:PORT"
        )
    try:
        with contextlib.ExitStack() as stack, bind(host, port) as listening:
            port = listening.getsockname()[1]
            name = f"[{host}]" if ":" in host else host
            codes = sessions.LoginCodes(time.monotonic)

            def announce() -> str:
                address = f"http://{name}:{port}/login?code={codes.make()}"
                options.announce(address)
                return address

            def begin(address: str) -> None:
                if options.open_browser is not None:
                    page = _write_page(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedplat-")), address)
                    asyncio.get_running_loop().run_in_executor(None, options.open_browser, page)

            async def run() -> None:
                dashboard = app.Dashboard(sessions.CodeLogin(source, codes), LOOPBACK_NAMES | {host.lower()})
                server = make_server(dashboard, None, lambda: begin(announce()))

                def stop() -> None:
                    server.should_exit = True

                with _signals(stop, announce), _watch_parent(options.parent_pipe, stop):
                    await server.serve(sockets=[listening])

            asyncio.run(run())
    finally:
        source.close()


def _write_page(folder: str, address: str) -> str:
    """Write a page that leads to an address to a private folder, and return its URL.

    The arguments of a browser are visible to other users of the machine, and the address has a code.
    """
    path = Path(folder) / "dashboard.html"
    link = html.escape(address, quote=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(
            '<!doctype html><meta charset="utf-8"><title>fedplat</title><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={link}"><a href="{link}">The dashboard</a>\n'
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


CERTIFICATE_CHECK_S = 30.0
_MAX_LINE_BYTES = 2**20


class ChildOptions(msgspec.Struct, frozen=True):
    """Where to listen, with which certificate (both paths are empty: without TLS), and the server to show.

    `hosts` are the names under which browsers may reach it.
    """

    listen: str
    hosts: tuple[str, ...]
    profile: admin.Profile
    certificate: str = ""
    key: str = ""


async def serve_for_daemon(options: ChildOptions, parent: asyncio.StreamReader) -> None:
    """Serve the pages until the parent has ended, or SIGTERM. Raises `DashboardError`."""
    with bind(*split_address(options.listen)) as listening:
        dashboard = app.Dashboard(sessions.TokenLogin(AdminSource(options.profile)), frozenset(options.hosts))
        files = (Path(options.certificate), Path(options.key)) if options.certificate else None
        port = listening.getsockname()[1]
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if files else None
        if tls is not None and files is not None:
            tls.load_cert_chain(*files)
        server = make_server(dashboard, tls, lambda: print(port, flush=True))

        def stop() -> None:
            server.should_exit = True

        async def wait_for_end() -> None:
            while await parent.read(1024):
                pass
            stop()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop)
        async with _background(wait_for_end()), _background(_renew(tls, files)):
            await server.serve(sockets=[listening])


async def _renew(tls: ssl.SSLContext | None, files: tuple[Path, Path] | None) -> None:
    """Load the certificate again when its file has changed: new connections use it."""
    if tls is None or files is None:
        return
    stamp = _stamp(files)
    while True:
        await asyncio.sleep(CERTIFICATE_CHECK_S)
        if (changed := _stamp(files)) != stamp:
            with contextlib.suppress(OSError):  # files that are replaced one after the other do not match for a moment
                tls.load_cert_chain(*files)
                stamp = changed


def _stamp(files: tuple[Path, Path]) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in files)


@contextlib.asynccontextmanager
async def _background(coroutine: object) -> AsyncGenerator[None]:
    assert asyncio.iscoroutine(coroutine)
    task = asyncio.ensure_future(coroutine)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    options = msgspec.json.decode(await reader.readline(), type=prepare_type(ChildOptions))
    await serve_for_daemon(options, reader)


def main() -> None:
    """Run the process."""
    try:
        asyncio.run(_run())
    except errors.FedplatError as exc:
        print(f"fedplat dashboard: {exc}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
