"""Serving the dashboard: on the operator's own machine, or as a child process of a daemon.

The daemon writes `ChildOptions` as one line of JSON to its standard input and keeps that open: when it closes, the
daemon has ended, and so does this process. It prints one line, the port, when it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from fedplat import admin, errors
from fedplat.config.decoding import prepare_type
from fedplat.dashboard import app
from fedplat.dashboard.source import AdminSource, PageSource
from fedplat.dashboard.token_login import TokenLogin
from fedplat.web import serving, sessions


def serve_locally(source: PageSource, options: serving.LocalPageOptions) -> None:
    """Serve the pages until Ctrl-C or SIGTERM. Raises `ServingError` for an address that cannot be used."""

    def create(codes: sessions.LoginCodes, hosts: frozenset[str], port: int) -> app.Dashboard:
        return app.Dashboard(sessions.CodeLogin(source, codes), hosts)

    try:
        serving.serve_locally(create, options)
    finally:
        source.close()


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
    """Serve the pages until the parent has ended, or SIGTERM. Raises `ServingError`."""
    with serving.bind(*serving.split_address(options.listen)) as listening:
        dashboard = app.Dashboard(TokenLogin(AdminSource(options.profile)), frozenset(options.hosts))
        files = (Path(options.certificate), Path(options.key)) if options.certificate else None
        port = listening.getsockname()[1]
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if files else None
        if tls is not None and files is not None:
            tls.load_cert_chain(*files)
        server = serving.make_server(dashboard, tls, lambda: print(port, flush=True))

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
