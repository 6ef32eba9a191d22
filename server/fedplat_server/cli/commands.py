"""The commands of `fedplat-server`: run the daemon, and manage its database."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated

import typer

from fedplat import user_code
from fedplat.errors import FedplatError, PluginError, UserCodeError
from fedplat.flower.app import check_version, describe_app, read_app
from fedplat.loaded_plugins import LoadedPlugins, PluginVersion, load_plugins, parse_plugins
from fedplat.texts import NAME_PATTERN
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
# No panels: usage errors are plain lines, like all other errors.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
database_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(database_app, name="db", help="Manage the database.")
app.add_typer(operators.app, name="operator", help="Manage operators.")
app.add_typer(certificates.app, name="certificates", help="Manage the server's TLS certificates.")
app.add_typer(pool_commands.app, name="pool", help="Run and inspect the worker pool.")
app.command("init")(init.init)
app.command("prune")(prune.prune_)


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Run and manage a fedplat server."""
    if version:
        print(f"fedplat-server {__version__}")
        raise typer.Exit


@app.command()
def run(  # noqa: PLR0913 -- one parameter for each option of the command line
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="FEDPLAT_LISTEN", help="Address to listen on.")
    ] = DEFAULT_LISTEN,
    mtls_listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="FEDPLAT_MTLS_LISTEN",
            help="Address for clients that authenticate with a certificate signed by DATA_DIR/pki. Default: disabled.",
        ),
    ] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Server certificate chain (PEM). Default: that in DATA_DIR/pki.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of --tls-certificate (PEM).")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CA of --tls-certificate, if it is a private one (PEM).")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve without TLS, on loopback only.")] = False,
    insecure_anywhere: Annotated[
        bool, typer.Option("--insecure-anywhere", help="With --insecure, allow any address.")
    ] = False,
    evaluator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REF",
            help="Evaluator for models on this server's data, as module:function or file.py:function; repeatable.",
        ),
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REF",
            help="ServerTrainer for [warm_start] and [server_step], as module:object or file.py:object; repeatable.",
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND.NAME=REF",
            help="Plugin that jobs may name, as module:class or file.py:class; KIND.NAME alone for one of an installed "
            "package. KIND is rules, robust-rules, pre-aggregators, policies, codecs or algorithms; repeatable.",
        ),
    ] = None,
    flower_app: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="Flower app whose ServerApp jobs may run, the folder of its pyproject.toml; repeatable.",
        ),
    ] = None,
    evaluation_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time limit for the evaluation of one model.")
    ] = 600.0,
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="FEDPLAT_ADVERTISE",
            help="Address where other daemons of the same PostgreSQL reach this one. Default: --listen.",
        ),
    ] = "",
    share_port: Annotated[
        bool,
        typer.Option(
            "--share-port",
            help="Share --listen with other daemons on this host; this one also listens at the port of --advertise.",
        ),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Network of proxies whose x-forwarded-for header is trusted, such as 10.0.0.0/8; repeatable.",
        ),
    ] = None,
    lease_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time after which another daemon takes over from a leader that does not respond."
        ),
    ] = 6.0,
    upload_memory_mib: Annotated[
        int, typer.Option(min=8, metavar="MIB", help="Memory for all updates that are being received, in MiB.")
    ] = Limits().upload_memory_bytes // 2**20,
    grace_s: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time limit for draining after SIGTERM.")
    ] = 10.0,
    reflection: Annotated[bool, typer.Option("--reflection", help="Enable gRPC server reflection.")] = False,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    json_log: Annotated[
        bool | None, typer.Option("--json-log/--text-log", help="Log format. Default: text on a terminal, else JSON.")
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
    flower_apps, app_versions = _read_flower_apps(flower_app or [])
    plugins = _load_plugins(plugin or [])
    plugins = dataclasses.replace(plugins, versions=(*plugins.versions, *app_versions))
    config = ServerConfig(
        listen=listen,
        data_dir=data_dir.resolve(),
        database=database_url(data_dir, database),
        evaluators=scorers,
        trainers=trainers,
        plugins=plugins,
        flower_apps=flower_apps,
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
            f"--listen {listen} is not an address that other daemons of this database can connect to; "
            "add --advertise HOST:PORT"
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
            "--share-port is for daemons of one PostgreSQL; set its URL with FEDPLAT_DATABASE or --database"
        )
    shared, own = (int(address.rpartition(":")[2] or 0) for address in (listen, advertise))
    if own in (0, shared):
        raise ConfigError(
            "--share-port needs --advertise HOST:PORT with another port, where the other daemons reach this one"
        )
    if shared == 0:
        raise ConfigError(f"--listen {listen}: --share-port needs a port number that is the same for all daemons")


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
            "init makes certificates), or add --insecure-anywhere on a network that you trust"
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
            f"{data_dir}, use your own with --tls-certificate FILE --tls-key FILE, or serve without TLS with --insecure"
        )
    return files


def _parse_references(items: list[str], option: str) -> dict[str, str]:
    """Parse options `NAME=REF`. Raises `ConfigError` for errors that would appear only at the first use."""
    references: dict[str, str] = {}
    for item in items:
        name, sign, reference = item.partition("=")
        if not sign or not validation.is_name(name):
            raise ConfigError(f"{option} {item}: expected NAME=module:name or NAME=/path/to/file.py:name")
        if name in references:
            raise ConfigError(f"{option} {item}: {name} is {references[name]} already")
        try:
            user_code.check(reference)
        except UserCodeError as exc:
            raise ConfigError(f"{option} {item}: {exc}") from exc
        references[name] = user_code.make_absolute(reference)
    return references


def _load_plugins(items: list[str]) -> LoadedPlugins:
    try:
        return load_plugins(parse_plugins(items))
    except PluginError as exc:
        raise ConfigError(f"--plugin {exc}") from exc


def _read_flower_apps(items: list[str]) -> tuple[dict[str, str], list[PluginVersion]]:
    """Return the folders of Flower apps by name, and their versions."""
    apps: dict[str, str] = {}
    versions: list[PluginVersion] = []
    for item in items:
        name, sign, folder = item.partition("=")
        if not sign or not folder or not re.fullmatch(NAME_PATTERN, name):
            raise ConfigError(f"--flower-app {item}: expected NAME=FOLDER, such as digits=/opt/digits")
        if name in apps:
            raise ConfigError(f"--flower-app {item}: {name} is {apps[name]} already")
        try:
            check_version()
            app = read_app(Path(folder))
        except FedplatError as exc:
            raise ConfigError(f"--flower-app {item}: {exc}") from exc
        apps[name] = str(app.folder)
        versions.append(describe_app(name, app))
    return apps, versions


async def _serve(config: ServerConfig) -> None:
    open_files.raise_limit()
    daemon = Daemon(config)
    process_tuning.keep_what_is_loaded()
    with stop_on_signals(daemon.stop):
        await daemon.run()
    logs.get().info("the server has stopped")


@database_app.command()
def upgrade(data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Create or upgrade the tables of the database.

    Safe to repeat.
    """
    url = database_url(data_dir, database)
    protect(data_dir, url)
    before = schema.current(url)
    schema.upgrade(url)
    after = schema.current(url)
    print(f"the database is at revision {after}" + (" already" if before == after else ""))


@database_app.command()
def current(data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Show the schema revision of the database and of this code."""
    url = database_url(data_dir, database)
    print(f"database {schema.current(url) or 'empty'}, code {schema.head()}")


@app.command("verify")
def verify_(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Also report what is open after its deadline. Use it while a daemon is running."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the database and the models for broken invariants.

    Changes nothing; a daemon may be running. Exit status: 0 no findings, 1 findings or no answer from the database,
    2 usage error.
    """
    from fedplat_server.cli import verify

    if not data_dir.is_dir():
        raise ConfigError(f"there is no data folder {data_dir}; set --data-dir to that of the daemon")
    if not verify.run(database_url(data_dir, database), data_dir, live=live, as_json=as_json):
        raise typer.Exit(1)
