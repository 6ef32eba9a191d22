"""`fedplat dashboard`: the pages on the operator's own machine, with single-use codes instead of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import html
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

from fedplat.dashboard.app import Dashboard
from fedplat.dashboard.logins import CodeLogin
from fedplat.dashboard.serving import LOOPBACK_NAMES, DashboardError, bind, is_loopback, make_server, split_address
from fedplat.dashboard.sessions import LoginCodes
from fedplat.dashboard.source import PageSource

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


def serve(source: PageSource, options: LocalDashboardOptions) -> None:
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
                dashboard = Dashboard(CodeLogin(source, codes), LOOPBACK_NAMES | {host.lower()})
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
