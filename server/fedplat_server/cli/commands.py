"""The commands of `fedplat-server`: run the daemon, and manage its database."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import click
import typer
from typing_extensions import override

from fedplat import errors
from fedplat.command_line.groups import HELP_SETTINGS
from fedplat.command_line.with_typer import (
    ConfigOption,
    JsonOption,
    TyperCommands,
    TyperConfiguredCommand,
    make_group,
    print_about,
    print_version,
    read_duration,
)
from fedplat_server import __version__
from fedplat_server.auth import addresses
from fedplat_server.cli import init, prune, run_options, serving
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
    with_store,
)
from fedplat_server.cli.serving import serve
from fedplat_server.config import (
    DEFAULT_CACHE_BYTES,
    LeaseTimes,
    Limits,
    ServerConfig,
)
from fedplat_server.coordination import owner
from fedplat_server.database import schema
from fedplat_server.errors import ConfigError
from fedplat_server.storage import ownership
from fedplat_server.webhooks import addresses as webhook_addresses

ANY_HOST = frozenset({"0.0.0.0", "[::]", "::", "*"})
"""Hosts that mean every address of this machine."""


_HINT = re.compile(r"fedplat-server (init|run|pool run|certificates (renew|rotate-ca( --finish)?))(?=[ ;,)]|$)(?! --)")
"""A command line in a message that has no options yet."""


class _Commands(TyperCommands):
    """The commands; a message that names another one repeats the options of the command line."""

    renamed = {  # noqa: RUF012 -- a constant
        "run": {"--lease-s": "--lease", "--grace-s": "--grace", "--evaluation-s": "--evaluation-timeout"},
        "operator add": {"--out": "--to"},
        "metrics grafana": {"--output": "--to", "-o": "--to"},
        "metrics rules": {"--output": "--to", "-o": "--to"},
    }

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
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={**HELP_SETTINGS},
)
database_app = make_group("Manage the database.")
app.add_typer(database_app, name="db")
app.add_typer(init.app, name="operator")
app.add_typer(init.certificates_app, name="certificates")
app.add_typer(metrics_commands.app, name="metrics")
app.add_typer(pool_commands.app, name="pool")
app.command("init", cls=TyperConfiguredCommand)(init.init)
app.command("dev", cls=TyperConfiguredCommand)(serving.dev)
app.command("prune", cls=TyperConfiguredCommand)(prune.prune_)


def _print_version(is_set: bool) -> None:
    if is_set:
        print_version("fedplat-server", __version__)


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run and manage a fedplat server."""


@app.command("version")
def show_versions(as_json: JsonOption = False) -> None:
    """Show the versions of the server, Python and the protocol."""
    print_about("fedplat-server", __version__, as_json=as_json)


@app.command(cls=TyperConfiguredCommand)
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
    insecure: Annotated[
        bool,
        # Not FEDPLAT_INSECURE, by which operators call a server without TLS.
        typer.Option("--insecure", envvar="FEDPLAT_SERVE_INSECURE", help="Serve without TLS, on loopback only."),
    ] = False,
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
        float,
        typer.Option(
            "--evaluation-timeout",
            metavar="DURATION",
            parser=read_duration,
            show_default="10m",
            help="Time limit for the evaluation of one model.",
        ),
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
            "--lease",
            metavar="DURATION",
            parser=read_duration,
            show_default="6s",
            help="Time after which another daemon takes over from a leader that does not respond.",
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
        float,
        typer.Option(
            "--grace",
            metavar="DURATION",
            parser=read_duration,
            show_default="10s",
            help="Time limit for draining after SIGTERM.",
        ),
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
    config_file: ConfigOption = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Options may also be given by the variables that are named below, and in the file of --config.
    """
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
        raise ConfigError(f"--lease {lease_s:g}: expected at least 0.3s and at most an hour")
    if not evaluation_s > 0.0:
        raise ConfigError(f"--evaluation-timeout {evaluation_s:g}: expected a time above 0")
    if share_port:
        run_options.check_shared_port(listen, advertise, database or "")
    job_metrics = run_options.read_job_metrics(job_metric or [], metrics)
    proxies = tuple(str(addresses.parse_network(text)) for text in trusted_proxy or ())
    http = check_http(http_listen, http_address, http_origin or [], operators=http_operators)
    networks = tuple(str(webhook_addresses.parse_network(text)) for text in webhook_network or ())
    scorers, trainers = (
        run_options.parse_references(evaluator or [], "--evaluator"),
        run_options.parse_references(trainer or [], "--trainer"),
    )
    run_options.check_dashboard(dashboard, insecure)
    if insecure:
        for each in (host, *([http_listen.rpartition(":")[0]] if http_listen else [])):
            run_options.check_insecure(each, tls_certificate, insecure_anywhere)
        files = None
    else:
        files = run_options.find_tls_files(data_dir, tls_certificate, tls_key, tls_ca)
    place = blob_place(data_dir, blobs, blob_cache_mib)
    flower_apps, app_versions = run_options.read_flower_apps(flower_app or [])
    plugins = run_options.load_plugins(plugin or [])
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
