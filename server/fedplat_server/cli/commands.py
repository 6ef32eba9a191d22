"""The commands of `fedplat-server`: run the daemon, and look after its database."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Annotated

import typer

from fedplat import user_code
from fedplat.errors import UserCodeError
from fedplat.wire import process_tuning
from fedplat_server import __version__, logs
from fedplat_server.auth import addresses
from fedplat_server.auth.pki_folder import LOOPBACK, PkiFolder
from fedplat_server.cli import certificates, init, open_files, operators, prune
from fedplat_server.cli import workers as pool_commands
from fedplat_server.cli.options import DEFAULT_DATA_DIR, Database, DataDir, database_url, protect
from fedplat_server.config import LeaseTimes, Limits, ServerConfig, TlsFiles
from fedplat_server.daemon import Daemon, stop_on_signals
from fedplat_server.database import schema
from fedplat_server.errors import ConfigError
from fedplat_server.rpc import validation

DEFAULT_LISTEN = "127.0.0.1:7443"
ANY_HOST = frozenset({"0.0.0.0", "[::]", "::", "*"})
"""Hosts that mean every address of this machine."""
# No panels: usage errors are plain lines, as all other errors are.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
database_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(database_app, name="db", help="Look after the database.")
app.add_typer(operators.app, name="operator", help="Say who may use the server.")
app.add_typer(certificates.app, name="certificates", help="Look after the server's certificates.")
app.add_typer(pool_commands.app, name="pool", help="Run ranks that work for the daemon, and look after them.")
app.command("init")(init.init)
app.command("prune")(prune.prune_)


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """The server daemon of fedplat."""
    if version:
        print(f"fedplat-server {__version__}")
        raise typer.Exit


@app.command()
def run(  # noqa: PLR0913 -- one parameter for each option of the command line
    listen: Annotated[str, typer.Option(envvar="FEDPLAT_LISTEN", help="HOST:PORT to serve.")] = DEFAULT_LISTEN,
    mtls_listen: Annotated[
        str,
        typer.Option(
            envvar="FEDPLAT_MTLS_LISTEN",
            help="HOST:PORT to serve to clients that show a certificate, which DATA_DIR/pki signs. Default: nowhere.",
        ),
    ] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's certificate chain (PEM) instead of DATA_DIR/pki.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key (PEM).")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The authorities to know it by, if they are private (PEM).")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS, on loopback only.")] = False,
    insecure_anywhere: Annotated[
        bool, typer.Option("--insecure-anywhere", help="With --insecure: on any address.")
    ] = False,
    evaluator: Annotated[
        list[str] | None,
        typer.Option(help="NAME=module:function that scores models on this server's data; may be repeated."),
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=module:object, a ServerTrainer for [warm_start] and [server_step] of jobs; may be repeated."
        ),
    ] = None,
    evaluation_s: Annotated[float, typer.Option(help="Longest time that an evaluator may take for a model.")] = 600.0,
    advertise: Annotated[
        str,
        typer.Option(
            envvar="FEDPLAT_ADVERTISE",
            help="HOST:PORT at which other daemons of the same PostgreSQL reach this one. Default: --listen.",
        ),
    ] = "",
    share_port: Annotated[
        bool,
        typer.Option(
            "--share-port",
            help="Share --listen with other daemons of this host; --advertise says at which port this one listens too.",
        ),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Network of proxies whose x-forwarded-for names the caller, such as 10.0.0.0/8; may be repeated.",
        ),
    ] = None,
    lease_s: Annotated[
        float,
        typer.Option(help="After this time without a sign of life of the leading daemon another one leads."),
    ] = 6.0,
    upload_memory_mib: Annotated[
        int, typer.Option(min=8, help="Memory that updates may take together while they are received, in MiB.")
    ] = Limits().upload_memory_bytes // 2**20,
    grace_s: Annotated[float, typer.Option(min=0.0, help="Longest time to finish in after SIGTERM.")] = 10.0,
    reflection: Annotated[bool, typer.Option("--reflection", help="Describe the services to whoever asks.")] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    json_log: Annotated[
        bool | None, typer.Option("--json-log/--text-log", help="Default: text on a terminal, else JSON.")
    ] = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C."""
    if log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level {log_level}: expected DEBUG, INFO, WARNING or ERROR")
    host = _host(listen, "--listen")
    for address, option in ((mtls_listen, "--mtls-listen"), (advertise, "--advertise")):
        if address:
            _host(address, option)
    if not 0.3 <= lease_s <= 3600.0:
        raise ConfigError(f"--lease-s {lease_s}: expected a number of seconds, at least 0.3 and at most an hour")
    if not math.isfinite(grace_s):
        raise ConfigError(f"--grace-s {grace_s}: expected a number of seconds")
    if not evaluation_s > 0.0:
        raise ConfigError(f"--evaluation-s {evaluation_s}: expected a number of seconds above 0")
    if share_port:
        _check_shared_port(listen, advertise, database or "")
    proxies = tuple(str(addresses.parse_network(text)) for text in trusted_proxy or ())
    scorers, trainers = _parse_references(evaluator or [], "--evaluator"), _parse_references(trainer or [], "--trainer")
    if insecure:
        _check_insecure(host, tls_certificate, insecure_anywhere)
        files = None
    else:
        files = _tls_files(data_dir, tls_certificate, tls_key, tls_ca)
    config = ServerConfig(
        listen=listen,
        data_dir=data_dir.resolve(),
        database=database_url(data_dir, database),
        evaluators=scorers,
        trainers=trainers,
        evaluation_s=evaluation_s,
        grace_s=grace_s,
        limits=Limits(upload_memory_bytes=upload_memory_mib * 2**20),
        advertise=advertise,
        share_port=share_port,
        lease=LeaseTimes.of(lease_s),
        reflection=reflection,
        tls=files,
        mtls_listen=mtls_listen,
        trusted_proxies=proxies,
    )
    if config.is_shared and not advertise and host in ANY_HOST:
        raise ConfigError(
            f"--listen {listen} is no address that other daemons of this database could use; "
            "say which is: --advertise HOST:PORT"
        )
    log = logs.configure(log_level, json=json_log)
    process_tuning.reuse_message_memory()
    try:
        asyncio.run(_serve(config))
    finally:
        log.finish(timeout_s=1.0)


def _check_shared_port(listen: str, advertise: str, database: str) -> None:
    if not database.startswith("postgres"):
        raise ConfigError(
            "--share-port is for daemons of one PostgreSQL; say which with FEDPLAT_DATABASE or --database"
        )
    shared, own = (int(address.rpartition(":")[2] or 0) for address in (listen, advertise))
    if own in (0, shared):
        raise ConfigError(
            "--share-port needs --advertise HOST:PORT with a port that is this daemon's own: there the others reach it"
        )
    if shared == 0:
        raise ConfigError(f"--listen {listen}: a port that is shared has a number that all of them know")


def _host(address: str, option: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} {address}: expected HOST:PORT, for instance {DEFAULT_LISTEN}")
    return host


def _check_insecure(host: str, certificate: Path | None, anywhere: bool) -> None:
    if certificate is not None:
        raise ConfigError("--insecure and --tls-certificate exclude each other; leave one out")
    if not anywhere and host.strip("[]") not in LOOPBACK:
        raise ConfigError(
            f"--insecure on {host}: without TLS a server listens on loopback only (127.0.0.1). Use TLS (fedplat-server "
            "init makes certificates), or say --insecure-anywhere too on a network that you trust"
        )


def _tls_files(data_dir: Path, certificate: Path | None, key: Path | None, ca: Path | None) -> TlsFiles:
    if (certificate is None) != (key is None) or (ca is not None and certificate is None):
        raise ConfigError("--tls-certificate and --tls-key (and, if need be, --tls-ca) must be given together")
    if certificate is not None and key is not None:
        return TlsFiles(certificate, key, ca)
    files = PkiFolder.of(data_dir.resolve()).files
    if not files.certificate.exists():
        raise ConfigError(
            f"there are no certificates in {files.certificate.parent}: make some with fedplat-server init --data-dir "
            f"{data_dir}, bring your own with --tls-certificate FILE --tls-key FILE, or go without with --insecure"
        )
    return files


def _parse_references(items: list[str], option: str) -> dict[str, str]:
    """Parse the options `NAME=reference`; mistakes are reported now, not when the code is first needed."""
    found: dict[str, str] = {}
    for item in items:
        name, sign, reference = item.partition("=")
        if not sign or not validation.is_name(name):
            raise ConfigError(f"{option} {item}: expected NAME=module:name or NAME=/path/to/file.py:name")
        if name in found:
            raise ConfigError(f"{option} {item}: {name} is {found[name]} already")
        try:
            user_code.check(reference)
        except UserCodeError as exc:
            raise ConfigError(f"{option} {item}: {exc}") from exc
        found[name] = user_code.make_absolute(reference)
    return found


async def _serve(config: ServerConfig) -> None:
    open_files.raise_limit()
    daemon = Daemon(config)
    process_tuning.keep_what_is_loaded()
    with stop_on_signals(daemon.stop):
        await daemon.run()
    logs.get().info("the server has stopped")


@database_app.command()
def upgrade(data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Create the database's tables, or bring them to this version. Safe to repeat."""
    url = database_url(data_dir, database)
    protect(data_dir, url)
    before = schema.current(url)
    schema.upgrade(url)
    after = schema.current(url)
    print(f"the database is at revision {after}" + (" already" if before == after else ""))


@database_app.command()
def current(data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Show the revision of the database and that of this code."""
    url = database_url(data_dir, database)
    print(f"database {schema.current(url) or 'empty'}, code {schema.head()}")


@app.command("verify")
def verify_(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
    live: Annotated[
        bool, typer.Option("--live", help="A daemon is running: what is open after its deadline is broken, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Check database and models against the invariants; changes nothing, and a daemon may run meanwhile.

    Exit status: 0 nothing is broken, 1 something is (or the database does not answer), 2 wrong usage.
    """
    from fedplat_server.cli import verify

    if not data_dir.is_dir():
        raise ConfigError(f"there is no data folder {data_dir}: name the daemon's with --data-dir")
    if not verify.run(database_url(data_dir, database), data_dir, live=live, as_json=as_json):
        raise typer.Exit(1)
