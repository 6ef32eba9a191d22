"""`fedplat dashboard`: the pages of the profile's server, or of a run folder, in a browser."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedplat import errors, extras
from fedplat.cli.options import ServerOption
from fedplat.cli.output import Output
from fedplat.cli.session import Settings, reporting

if TYPE_CHECKING:
    from fedplat.dashboard.source import PageSource

DEFAULT_LISTEN = "127.0.0.1:7480"


def dashboard(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Folder of a simulation to show, such as runs/digits. Default: a server."),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Loopback address to serve the pages on.")
    ] = DEFAULT_LISTEN,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address only.")] = False,
    parent_pipe: Annotated[int | None, typer.Option(hidden=True)] = None,
    server: ServerOption = None,
) -> None:
    """Show a server, or the run folder of a simulation, in a browser.

    The printed address signs in once, within 60 seconds. Press Enter for a new one. Ctrl-C ends the pages.
    """
    with reporting(context, False) as output:
        try:
            from fedplat.dashboard import serving
            from fedplat.web.serving import LocalPageOptions
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] not in ("starlette", "jinja2", "uvicorn"):
                raise
            raise errors.MissingExtraError(
                f"the dashboard needs {exc.name}; install it with: {extras.install_command('dashboard')}"
            ) from exc
        options = LocalPageOptions(
            listen,
            lambda address: _announce(output, address, is_child=parent_pipe is not None),
            None if no_browser else webbrowser.open,
            parent_pipe,
            instead="use 127.0.0.1 (and an SSH tunnel), or fedplat-server run --dashboard HOST:PORT",
        )
        serving.serve_locally(_source(context, run, server), options)


def _source(context: typer.Context, run: Path | None, server: str | None) -> PageSource:
    if run is not None:
        from fedplat.dashboard.run_source import RunFolderSource

        return RunFolderSource(run)
    from fedplat.dashboard.source import AdminSource

    settings = context.find_object(Settings) or Settings()
    try:
        return AdminSource(settings.resolve(server))
    except ValueError as exc:
        raise errors.ProfileError(str(exc)) from exc


def _announce(output: Output, address: str, *, is_child: bool) -> None:
    output.line(address)
    ended = "the dashboard and the server" if is_child else "the dashboard"
    output.note(
        "The address is valid once, for 60 seconds. For a new one press Enter, or use: "
        f"kill -USR1 {os.getpid()}. Ctrl-C ends {ended}."
    )
