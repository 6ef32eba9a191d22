"""The options that several commands of `fedplat-server` take."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fedplat_server.database import engine
from fedplat_server.database.ports import Store
from fedplat_server.database.store import open_store
from fedplat_server.errors import ConfigError
from fedplat_server.storage import data_dir as folder


def _database(context: typer.Context, parameter: typer.CallbackParam, given: str | None) -> str | None:
    """Return the URL that `--database` gives, or that is in the file which it names; None without the option."""
    if given is None or not given.startswith("@"):
        source = context.get_parameter_source(parameter.name or "")
        if given is not None and source is not None and source.name == "COMMANDLINE":
            _warn_of_password(given)
        return given
    path = Path(given[1:])
    try:
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no text"
        raise ConfigError(f"--database @{path}: the file cannot be read ({reason}); expected one line, a URL") from exc
    if not url or "\n" in url:
        raise ConfigError(f"--database @{path}: the file holds no database URL; expected one line, a URL")
    return url


def _warn_of_password(url: str) -> None:
    if "://" in url and engine.async_url(url).password:
        print(
            "fedplat-server: warning: --database has a password, which all users of this host can see in the list of "
            "processes; set FEDPLAT_DATABASE, or write the URL into a file of yours and give --database @FILE",
            file=sys.stderr,
        )


DataDir = Annotated[
    Path, typer.Option(envvar="FEDPLAT_DATA_DIR", help="Folder for models, updates and the SQLite database.")
]
Database = Annotated[
    str | None,
    typer.Option(
        envvar="FEDPLAT_DATABASE",
        metavar="URL|@FILE",
        callback=_database,
        help="Database URL, e.g. postgresql://user@host/name, or @FILE, a file that holds it. Keep a password in that "
        "file, in FEDPLAT_DATABASE or in PGPASSFILE: arguments are visible to all users of the host. "
        "Default: DATA_DIR/fedplat.sqlite.",
    ),
]
DEFAULT_DATA_DIR = Path("fedplat-data")

_T = TypeVar("_T")


def database_url(data_dir: Path, database: str | None) -> str:
    """Return the database that the options name; the data folder is made if its database is meant."""
    if database is not None:
        return database
    folder.make(data_dir)
    return f"sqlite:///{data_dir.resolve() / 'fedplat.sqlite'}"


def protect(data_dir: Path, url: str) -> None:
    """Close the data folder and a SQLite database to other users of the host; warn of what stays open."""
    for warning in folder.protect(data_dir.resolve(), engine.sqlite_path(engine.async_url(url))):
        print(f"fedplat-server: warning: {warning}", file=sys.stderr)


def with_store(url: str, work: Callable[[Store], Awaitable[_T]]) -> _T:
    """Does something with the database, beside a daemon that may be running."""

    async def run() -> _T:
        store = await open_store(url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
