"""Options that several commands of `fedplat-server` share."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fedplat_server.config import DEFAULT_CACHE_BYTES
from fedplat_server.database import engine
from fedplat_server.database.ports import Store
from fedplat_server.database.store import open_store
from fedplat_server.errors import ConfigError
from fedplat_server.storage import data_dir as folder
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.storage.object_store import ObjectStore


def _read_database(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Return the URL of `--database`, or the content of the file that it names; None without the option."""
    if value is None or not value.startswith("@"):
        source = context.get_parameter_source(parameter.name or "")
        if value is not None and source is not None and source.name == "COMMANDLINE":
            _warn_of_password(value)
        return value
    path = Path(value[1:])
    try:
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise ConfigError(f"--database @{path}: the file cannot be read ({reason}); expected one line, a URL") from exc
    if not url or "\n" in url:
        raise ConfigError(f"--database @{path}: the file holds no database URL; expected one line, a URL")
    return url


def _warn_of_password(url: str) -> None:
    if "://" in url and engine.async_url(url).password:
        print(
            "fedplat-server: warning: --database has a password, which all users of this host can see in the list of "
            "processes; set FEDPLAT_DATABASE, or write the URL into a private file and use --database @FILE",
            file=sys.stderr,
        )


DataDir = Annotated[
    Path,
    typer.Option(metavar="DIR", envvar="FEDPLAT_DATA_DIR", help="Folder for models, updates and the SQLite database."),
]
Database = Annotated[
    str | None,
    typer.Option(
        envvar="FEDPLAT_DATABASE",
        metavar="URL|@FILE",
        callback=_read_database,
        help="Database URL, such as postgresql://user@host/name, or @FILE to read it from a file. Keep a password in "
        "that file, in FEDPLAT_DATABASE or in PGPASSFILE: arguments are visible to all users of the host. "
        "Default: DATA_DIR/fedplat.sqlite.",
    ),
]
Blobs = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar="FEDPLAT_BLOBS",
        help="Where models are: a folder, or an object store such as s3://bucket/prefix (needs the extra s3; keys and "
        "address come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_REGION). "
        "Default: DATA_DIR/blobs.",
    ),
]
Spool = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar="FEDPLAT_SPOOL",
        help="Where received updates are durable until their round has ended: a folder, or an object store as for "
        "--blobs, from which a daemon on another host continues the round. Default: DATA_DIR/uploads.",
    ),
]
BlobCacheMib = Annotated[
    int,
    typer.Option(
        min=1, metavar="MIB", help="Limit of the copies in DATA_DIR of models that are in an object store, in MiB."
    ),
]
DEFAULT_DATA_DIR = Path("fedplat-data")
DEFAULT_LISTEN = "127.0.0.1:7443"


def _check_level(level: str) -> str:
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level {level}: expected DEBUG, INFO, WARNING or ERROR")
    return level


LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", callback=_check_level, help="DEBUG, INFO, WARNING or ERROR.")
]
JsonLog = Annotated[
    bool | None, typer.Option("--json-log/--text-log", help="Log format. Default: text on a terminal, else JSON.")
]

_T = TypeVar("_T")


def database_url(data_dir: Path, database: str | None) -> str:
    """Return the URL of the database; create the data folder if the database is in it."""
    if database is not None:
        return database
    folder.make(data_dir)
    return f"sqlite:///{data_dir.resolve() / 'fedplat.sqlite'}"


def blob_place(data_dir: Path, blobs: str, cache_mib: int = DEFAULT_CACHE_BYTES >> 20) -> BlobPlace:
    """Return where models are. Raises `ConfigError` if the URL cannot be used."""
    url = blobs if not blobs or "://" in blobs else str(Path(blobs).resolve())
    place = BlobPlace(data_dir.resolve(), url, cache_mib << 20)
    place.check()
    return place


def protect(data_dir: Path, url: str) -> None:
    """Deny other users of the host access to the data folder and a SQLite database; print what stays accessible."""
    for warning in folder.protect(data_dir.resolve(), engine.sqlite_path(engine.async_url(url))):
        print(f"fedplat-server: warning: {warning}", file=sys.stderr)


def parse_spool(spool: str) -> str:
    """Return the folder or the URL of `--spool`, or "". Raises `ConfigError` if no daemon could use it."""
    if re.match(r"[a-z0-9]+:", spool):
        try:
            return ObjectStore(spool).url  # checks the URL and the installed packages; the leader connects
        except ConfigError as exc:
            raise ConfigError(f"--spool: {exc}") from exc
    return str(Path(spool).resolve()) if spool else ""


def parse_host(address: str, option: str) -> str:
    """Return the host of the address HOST:PORT given with `option`. Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} {address}: expected HOST:PORT, for instance {DEFAULT_LISTEN}")
    return host


def with_store(url: str, use: Callable[[Store], Awaitable[_T]]) -> _T:
    """Open the database, return the result of `use` and close it. A daemon may be running."""

    async def run() -> _T:
        store = await open_store(url)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())
