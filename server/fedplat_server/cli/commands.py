"""The commands of `fedplat-server`: run the daemon, and manage its database."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated

import click
import typer
import typer.core
from typing_extensions import override

from fedplat import claims, errors, texts
from fedplat.config import loaded_plugins, user_code
from fedplat.flower.app import check_version, describe_app, read_app
from fedplat_server import __version__, dashboard_process
from fedplat_server.auth import addresses, pki_folder
from fedplat_server.cli import init, prune, serving
from fedplat_server.cli import metrics as metrics_commands
from fedplat_server.cli import workers as pool_commands
from fedplat_server.cli.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_LISTEN,
    BlobCacheMib,
    Blobs,
    Database,
    DataDir,
    HttpAddress,
    HttpListen,
    HttpOperators,
    HttpOrigins,
    JsonLog,
    LogLevel,
    Spool,
    blob_place,
    check_data_dir,
    check_database,
    check_http,
    database_url,
    format_options,
    locate_data,
    parse_host,
    parse_spool,
    protect,
    repeat_options,
    with_store,
)
from fedplat_server.cli.serving import serve
from fedplat_server.config import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_JOB_METRICS,
    LeaseTimes,
    Limits,
    ServerConfig,
    TlsFiles,
    is_postgres,
)
from fedplat_server.coordination import owner
from fedplat_server.database import schema
from fedplat_server.errors import ConfigError
from fedplat_server.messages import validation
from fedplat_server.metrics.job_series import MAX_METRICS
from fedplat_server.storage import ownership
from fedplat_server.webhooks import addresses as webhook_addresses

ANY_HOST = frozenset({"0.0.0.0", "[::]", "::", "*"})
"""Hosts that mean every address of this machine."""
typer.core.HAS_RICH = False  # else typer 0.20 escapes the brackets of plain help for Rich: "\\[default: 1]"
# No panels: usage errors are plain lines, like all other errors.


_HINT = re.compile(r"fedplat-server (init|run|pool run|certificates (renew|rotate-ca( --finish)?))(?=[ ;,)]|$)(?! --)")
"""A command line in a message that has no options yet."""


class _Commands(typer.core.TyperGroup):
    """The commands; a message that names another one repeats the options of the command line."""

    @override
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except errors.FedplatError as exc:
            if options := format_options(ctx):
                exc.args = (_repeat(str(exc), options),)
            raise


def _repeat(message: str, options: str) -> str:
    """Return a message whose command lines have these options."""
    said, upgrade, _ = message.partition(schema.UPGRADE)
    return f"{said}{upgrade}{options}" if upgrade else _HINT.sub(lambda found: found[0] + options, message)


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
database_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(database_app, name="db", help="Manage the database.")
app.add_typer(init.app, name="operator", help="Manage operators.")
app.add_typer(init.certificates_app, name="certificates", help="Manage the server's TLS certificates.")
app.add_typer(metrics_commands.app, name="metrics", help="Print the Grafana dashboard and the alert rules.")
app.add_typer(pool_commands.app, name="pool", help="Run and inspect the worker pool.")
app.command("init")(init.init)
app.command("dev")(serving.dev)
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
    http_listen: HttpListen = "",
    http_address: HttpAddress = "",
    http_origin: HttpOrigins = None,
    http_operators: HttpOperators = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
    blobs: Blobs = "",
    blob_cache_mib: BlobCacheMib = DEFAULT_CACHE_BYTES >> 20,
    spool: Spool = "",
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
    dashboard: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="FEDPLAT_DASHBOARD",
            help="Address that serves pages for browsers, with the server's certificate, such as 0.0.0.0:7480. "
            "Operators sign in with their tokens. Default: disabled.",
        ),
    ] = "",
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
    webhook_network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Private network that webhooks may reach, such as 10.0.0.0/8, also without TLS; repeatable. Default: "
            "public addresses only, with TLS.",
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
    metrics: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="FEDPLAT_METRICS",
            help="Address that serves metrics for Prometheus, such as 127.0.0.1:9464. Default: disabled.",
        ),
    ] = "",
    job_metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Metric of rounds, such as f1, that --metrics includes; repeatable, at most 10. "
            "Default: loss and accuracy.",
        ),
    ] = None,
    health: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="FEDPLAT_HEALTH",
            help="Address that serves only gRPC's health service, without TLS, for the probes of Kubernetes. "
            "Default: disabled.",
        ),
    ] = "",
    grace_s: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time limit for draining after SIGTERM.")
    ] = 10.0,
    reflection: Annotated[bool, typer.Option("--reflection", help="Enable gRPC server reflection.")] = False,
    traces: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar=list(serving.VARIABLES),
            help="OTLP/gRPC receiver of OpenTelemetry traces, such as http://127.0.0.1:4317. Default: no traces.",
        ),
    ] = "",
    log_level: LogLevel = "INFO",
    json_log: JsonLog = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C."""
    host = parse_host(listen, "--listen")
    for address, option in (
        (mtls_listen, "--mtls-listen"),
        (advertise, "--advertise"),
        (metrics, "--metrics"),
        (health, "--health"),
    ):
        if address:
            parse_host(address, option)
    if not 0.3 <= lease_s <= 3600.0:
        raise ConfigError(f"--lease-s {lease_s}: expected a number of seconds, at least 0.3 and at most an hour")
    if not math.isfinite(grace_s):
        raise ConfigError(f"--grace-s {grace_s}: expected a number of seconds")
    if not evaluation_s > 0.0:
        raise ConfigError(f"--evaluation-s {evaluation_s}: expected a number of seconds above 0")
    if share_port:
        _check_shared_port(listen, advertise, database or "")
    job_metrics = _job_metrics(job_metric or [], metrics)
    proxies = tuple(str(addresses.parse_network(text)) for text in trusted_proxy or ())
    http = check_http(http_listen, http_address, http_origin or [], operators=http_operators)
    networks = tuple(str(webhook_addresses.parse_network(text)) for text in webhook_network or ())
    scorers, trainers = _parse_references(evaluator or [], "--evaluator"), _parse_references(trainer or [], "--trainer")
    _check_dashboard(dashboard, insecure)
    if insecure:
        for each in (host, *([http_listen.rpartition(":")[0]] if http_listen else [])):
            _check_insecure(each, tls_certificate, insecure_anywhere)
        files = None
    else:
        files = _tls_files(data_dir, tls_certificate, tls_key, tls_ca)
    place = blob_place(data_dir, blobs, blob_cache_mib)
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
        **http,
        webhook_networks=networks,
        metrics_listen=metrics,
        job_metrics=job_metrics,
        dashboard_listen=dashboard,
        place=locate_data(data_dir),
        blobs=place.url,
        blob_cache_bytes=place.cache_bytes,
        spool=parse_spool(spool),
        health_listen=health,
    )
    if config.is_shared and not advertise and host in ANY_HOST:
        raise ConfigError(
            f"--listen {listen} is not an address that other daemons of this database can connect to; "
            "add --advertise HOST:PORT"
        )
    serve(config, log_level, json_log, traces=traces)


def _job_metrics(names: list[str], metrics: str) -> tuple[str, ...]:
    """Return the names of `--job-metric`, or the default ones. Raises `ConfigError` if they are invalid."""
    if names and not metrics:
        raise ConfigError("--job-metric needs --metrics HOST:PORT, which serves the metrics")
    if len(set(names)) > MAX_METRICS:
        raise ConfigError(f"--job-metric: {len(set(names))} names; expected at most {MAX_METRICS}")
    for name in names:
        if error := claims.check_metrics({name: 0.0}):
            raise ConfigError(f"--job-metric: {error}")
    return tuple(dict.fromkeys(names)) or DEFAULT_JOB_METRICS


def _check_dashboard(address: str, insecure: bool) -> None:
    if not address:
        return
    host = parse_host(address, "--dashboard")
    dashboard_process.check_installed()
    if insecure and host.strip("[]") not in pki_folder.LOOPBACK:
        raise ConfigError(
            f"--dashboard {address}: without TLS the dashboard listens on loopback only (127.0.0.1), because operators "
            "enter their tokens there"
        )


def _check_shared_port(listen: str, advertise: str, database: str) -> None:
    if not is_postgres(database):
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


def _check_insecure(host: str, certificate: Path | None, anywhere: bool) -> None:
    if certificate is not None:
        raise ConfigError("--insecure and --tls-certificate exclude each other; leave one out")
    if not anywhere and host.strip("[]") not in pki_folder.LOOPBACK:
        raise ConfigError(
            f"--insecure on {host}: without TLS a server listens on loopback only (127.0.0.1). Use TLS (fedplat-server "
            "init makes certificates), or add --insecure-anywhere on a network that you trust"
        )


def _tls_files(data_dir: Path, certificate: Path | None, key: Path | None, ca: Path | None) -> TlsFiles:
    if (certificate is None) != (key is None) or (ca is not None and certificate is None):
        raise ConfigError("--tls-certificate and --tls-key (and, if need be, --tls-ca) must be given together")
    if certificate is not None and key is not None:
        return TlsFiles(certificate, key, ca, renewal="")
    files = pki_folder.PkiFolder.of(data_dir.resolve()).files
    if not files.certificate.exists():
        raise ConfigError(
            f"there are no certificates in {files.certificate.parent}: make some with fedplat-server init"
            f"{repeat_options()}, use your own with --tls-certificate FILE --tls-key FILE, or serve without TLS with "
            "--insecure"
        )
    return dataclasses.replace(files, renewal=f"{files.renewal}{locate_data(data_dir)}")


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
        except errors.UserCodeError as exc:
            raise ConfigError(f"{option} {item}: {exc}") from exc
        references[name] = user_code.make_absolute(reference)
    return references


def _load_plugins(items: list[str]) -> loaded_plugins.LoadedPlugins:
    try:
        return loaded_plugins.load_plugins(loaded_plugins.parse_plugins(items))
    except errors.PluginError as exc:
        raise ConfigError(f"--plugin {exc}") from exc


def _read_flower_apps(items: list[str]) -> tuple[dict[str, str], list[loaded_plugins.PluginVersion]]:
    """Return the folders of Flower apps by name, and their versions."""
    apps: dict[str, str] = {}
    versions: list[loaded_plugins.PluginVersion] = []
    for item in items:
        name, sign, folder = item.partition("=")
        if not sign or not folder or not re.fullmatch(texts.NAME_PATTERN, name):
            raise ConfigError(f"--flower-app {item}: expected NAME=FOLDER, such as digits=/opt/digits")
        if name in apps:
            raise ConfigError(f"--flower-app {item}: {name} is {apps[name]} already")
        try:
            check_version()
            app = read_app(Path(folder))
        except errors.FedplatError as exc:
            raise ConfigError(f"--flower-app {item}: {exc}") from exc
        apps[name] = str(app.folder)
        versions.append(describe_app(name, app))
    return apps, versions


@database_app.command()
def upgrade(data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Create or upgrade the tables of the database.

    Safe to repeat.
    """
    url = database_url(data_dir, database, is_new=True)
    check_database(data_dir, url)
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
    blobs: Blobs = "",
    spool: Spool = "",
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
    from fedplat_server.cli import prune

    check_data_dir(data_dir)
    place, url = blob_place(data_dir, blobs), database_url(data_dir, database)
    identity = with_store(url, lambda store: owner.identify(store, url))
    for folder in {place.data_dir, place.data_dir if place.is_remote else place.folder}:
        ownership.check_folder(folder, identity)
    if not prune.verify_and_print(url, place, parse_spool(spool), live=live, as_json=as_json):
        raise typer.Exit(1)
