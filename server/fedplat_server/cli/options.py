"""Options that several commands of `fedplat-server` share."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypedDict, TypeVar

import click
import typer

from fedplat import texts
from fedplat.wire import auth
from fedplat_server.config import DEFAULT_CACHE_BYTES, is_postgres
from fedplat_server.database import engine, schema
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import ConfigError
from fedplat_server.storage import blob_stores, ownership
from fedplat_server.storage import data_dir as folder
from fedplat_server.storage.object_store import SCHEMES, ObjectStore

DEFAULT_DATA_DIR = Path("fedplat-data")
_GIVEN = "fedplat_server.given_options"


def repeat_options() -> str:
    """Return `--data-dir` and `--database` as they were given, for a command line in a message; "" if they were not.

    A password is left out: the message then names a file, unless the variable of the environment still has it.
    """
    context = click.get_current_context(silent=True)
    return "" if context is None else format_options(context)


def format_options(context: click.Context) -> str:
    """Return `repeat_options` of a command line."""
    given: dict[str, str] = context.meta.get(_GIVEN, {})
    return "".join(f" {option} {shlex.quote(value)}" for option, value in sorted(given.items()))


def locate_data(data_dir: Path) -> str:
    """Return the options that find this data and database, for a command that is typed in any folder of the host."""
    context = click.get_current_context(silent=True)
    database: str = context.meta.get(_GIVEN, {}).get("--database", "") if context is not None else ""
    if database and database != "@FILE" and "://" not in database:
        sign = "@" * database.startswith("@")
        database = f"{sign}{Path(database.removeprefix('@')).resolve()}"
    options = {"--data-dir": str(data_dir.resolve())} | ({"--database": database} if database else {})
    return "".join(f" {option} {shlex.quote(value)}" for option, value in options.items())


def _note_given(context: typer.Context, option: str, value: str) -> None:
    context.meta.setdefault(_GIVEN, {})[option] = value


def _note_data_dir(context: typer.Context, value: Path) -> Path:
    if value != DEFAULT_DATA_DIR:
        _note_given(context, "--data-dir", str(value))
    return value


def _read_database(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Return the URL of `--database`, or the content of the file that it names; None without the option."""
    if value is None or not value.startswith("@"):
        source = context.get_parameter_source(parameter.name or "")
        has_password = value is not None and "://" in value and engine.async_url(value).password
        if has_password and source is not None and source.name == "COMMANDLINE":
            print(
                "fedplat-server: warning: --database has a password, which all users of this host can see in the list "
                "of processes; set FEDPLAT_DATABASE, or write the URL into a private file and use --database @FILE",
                file=sys.stderr,
            )
            _note_given(context, "--database", "@FILE")
        elif value is not None and not has_password:
            _note_given(context, "--database", value)
        return value
    _note_given(context, "--database", value)
    path = Path(value[1:])
    try:
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise ConfigError(f"--database @{path}: the file cannot be read ({reason}); expected one line, a URL") from exc
    if not url or "\n" in url:
        raise ConfigError(f"--database @{path}: the file holds no database URL; expected one line, a URL")
    return url


DataDir = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        envvar="FEDPLAT_DATA_DIR",
        callback=_note_data_dir,
        help="Folder for models, updates and the SQLite database.",
    ),
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
HttpListen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="FEDPLAT_HTTP_LISTEN",
        help="Address that serves clients over HTTP/1.1 as well, for networks that let no gRPC through. "
        "Default: disabled.",
    ),
]
HttpAddress = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="FEDPLAT_HTTP_ADDRESS",
        help="Address of HTTP/1.1 in tickets, if clients do not reach it at the address of gRPC. Clients before 0.2 "
        "refuse such tickets.",
    ),
]
HttpOrigins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Origin of web pages that may call --http-listen, such as https://app.example.org; repeatable.",
    ),
]
HttpOperators = Annotated[
    bool, typer.Option("--http-operators", help="Serve the methods of operators over HTTP/1.1, too.")
]
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
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


def database_url(data_dir: Path, database: str | None, *, is_new: bool = False) -> str:
    """Return the URL or the path of the database; create the data folder if a database that may be new is in it.

    Raises `ConfigError` if there is no folder for one that must be there, or if it would be a new one, for or in a data
    folder that has models or updates of another one.
    """
    if database is None:
        _check_text(str(data_dir.resolve()), "--data-dir")
        if is_new:
            folder.make(data_dir)
        check_data_dir(data_dir)
        database = str(data_dir.resolve() / "fedplat.sqlite")
    path = engine.sqlite_path(engine.async_url(_check_text(database, "--database")))
    if path is not None and not path.exists():
        for each in {data_dir.resolve(), path.resolve().parent}:
            ownership.check_new_database(each, engine.describe(str(path.resolve())))
    return database


def check_data_dir(data_dir: Path) -> None:
    """Raise `ConfigError` if there is no data folder."""
    if not data_dir.is_dir():
        raise ConfigError(
            f"there is no data folder {data_dir}; set --data-dir to that of the daemon, or make it: fedplat-server init"
        )


def check_database(data_dir: Path, url: str) -> None:
    """Raise `ConfigError` if a database that is to be upgraded cannot be that of a data folder.

    A database of an older release has no id yet: whether the folder is its own is decided at the start of the daemon.
    """
    state = schema.read_state(url)
    if state.revision is None and is_postgres(url):
        ownership.check_new_database(data_dir.resolve(), engine.describe(url))
    elif state.database_id is not None:
        ownership.check_folder(data_dir.resolve(), ownership.Owner(state.database_id, engine.describe(url)))


def _check_text(path: str, option: str) -> str:
    """Return a path. Raises `ConfigError` if its bytes are no text, which SQLite and the log could not have."""
    try:
        path.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{option} {path!a}: the name is not UTF-8; rename the folder, or choose another") from exc
    return path


def _check_folder(path: str, option: str) -> str:
    """Return an absolute path. Raises `ConfigError` if it is a file, or no text."""
    if Path(path).exists() and not Path(path).is_dir():
        raise ConfigError(f"{option} {path} is a file; expected a folder")
    return _check_text(str(Path(path).resolve()), option)


def blob_place(data_dir: Path, blobs: str, cache_mib: int = DEFAULT_CACHE_BYTES >> 20) -> blob_stores.BlobPlace:
    """Return where models are. Raises `ConfigError` if the URL cannot be used."""
    url = blobs if not blobs or "://" in blobs else _check_folder(blobs, "--blobs")
    place = blob_stores.BlobPlace(data_dir.resolve(), url, cache_mib << 20)
    place.check()
    return place


def protect(data_dir: Path, url: str) -> None:
    """Deny other users of the host access to the data folder and a SQLite database; print what stays accessible."""
    for warning in folder.protect(data_dir.resolve(), engine.sqlite_path(engine.async_url(url))):
        print(f"fedplat-server: warning: {warning}", file=sys.stderr)


def parse_spool(spool: str) -> str:
    """Return the folder or the URL of `--spool`, or "". Raises `ConfigError` if no daemon could use it."""
    if "://" in spool or re.match(f"({'|'.join(SCHEMES)}):", spool):  # s3:/bucket is a mistake, 2024:spool a folder
        try:
            return ObjectStore(spool).url  # checks the URL and the installed packages; the leader connects
        except ConfigError as exc:
            raise ConfigError(f"--spool: {exc}") from exc
    return _check_folder(spool, "--spool") if spool else ""


def parse_host(address: str, option: str) -> str:
    """Return the host of the address HOST:PORT given with `option`. Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} {address}: expected HOST:PORT, for instance {DEFAULT_LISTEN}")
    return host


def parse_period(text: str | None, option: str) -> float | None:
    """Return the seconds of a duration given with `option`; None without it. Raises `ConfigError`."""
    try:
        return None if text is None else texts.parse_period(text)
    except ValueError as exc:
        raise ConfigError(f"{option} {exc}") from exc


class HttpFields(TypedDict):
    """The fields of `ServerConfig` for HTTP/1.1."""

    http_listen: str
    http_address: str
    http_origins: tuple[str, ...]
    http_operators: bool


def check_http(listen: str, address: str, origins: Sequence[str], *, operators: bool) -> HttpFields:
    """Return the options of HTTP/1.1. Raises `ConfigError`."""
    if listen:
        parse_host(listen, "--http-listen")
    if not listen and (address or origins or operators):
        raise ConfigError("--http-address, --http-origin and --http-operators need --http-listen HOST:PORT")
    if address and not auth.is_address(address):
        raise ConfigError(f"--http-address {address}: expected HOST:PORT, the address that clients connect to")
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--http-origin {origin}: expected the origin of one web page in small letters, such as "
                "https://app.example.org, without a path and without *"
            )
    return HttpFields(http_listen=listen, http_address=address, http_origins=tuple(origins), http_operators=operators)


def with_store(url: str, use: Callable[[Store], Awaitable[_T]]) -> _T:
    """Open the database, return the result of `use` and close it. A daemon may be running."""

    async def run() -> _T:
        store = await open_store(url)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())
