"""The options that several commands of `fedplat-server` take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fedplat_server.errors import ConfigError
from fedplat_server.store.port import Store
from fedplat_server.store.sql import open_store

DataDir = Annotated[
    Path, typer.Option(envvar="FEDPLAT_DATA_DIR", help="Folder for models, updates and the SQLite database.")
]
Database = Annotated[
    str | None,
    typer.Option(
        envvar="FEDPLAT_DATABASE",
        help="Database URL, e.g. postgresql://user:password@host/name. Default: DATA_DIR/fedplat.sqlite.",
    ),
]
DEFAULT_DATA_DIR = Path("fedplat-data")

_T = TypeVar("_T")


def database_url(data_dir: Path, database: str | None) -> str:
    """The database that the options name; the data folder is made if its database is meant."""
    if database is not None:
        return database
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the data folder {data_dir} cannot be made: {exc.strerror}") from exc
    return f"sqlite:///{data_dir.resolve() / 'fedplat.sqlite'}"


def with_store(url: str, work: Callable[[Store], Awaitable[_T]]) -> _T:
    """Does something with the database, beside a daemon that may be running."""

    async def run() -> _T:
        store = await open_store(url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
