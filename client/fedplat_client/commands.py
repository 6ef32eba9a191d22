"""The commands of `fedplat-client`: run a client without writing a script."""

from __future__ import annotations

import dataclasses
import functools
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import click
import msgspec

from fedplat import texts
from fedplat.command_line import about, groups, settings
from fedplat.command_line.with_click import ClickCommands, config_option
from fedplat.config import loaded_plugins
from fedplat.errors import FedplatError, MissingExtraError, PluginError, TicketError
from fedplat.secure_aggregation.messages import MAX_GROUP, MIN_GROUP
from fedplat.wire import process_tuning
from fedplat_client import errors, log, releases, trainer_options, transport
from fedplat_client._auth import enrollment
from fedplat_client._version import __version__
from fedplat_client.client import Client
from fedplat_client.options import ClientOptions
from fedplat_client.task import TaskOutcome
from fedplat_client.trainer_options import TrainerOptions, UsageError

_Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
_PARTITION_LABELS = ("partition_id", "num_partitions")
_LEVELS = ("debug", "info", "warning", "error")
_DEFAULTS = ClientOptions()


class _InUseError(click.ClickException):
    """A data directory in which another client works: an exit status of its own, since a later call may work."""

    exit_code = 6


def _parse_size(text: str) -> int:
    try:
        return texts.parse_size(text)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


class _IdentityOptions(TypedDict):
    ticket: str | None
    ticket_file: Path | None
    server: str | None
    population: str | None
    data_dir: Path | None


class _ClientCommandOptions(_IdentityOptions):
    plugins: tuple[str, ...]
    labels: tuple[str, ...]
    transport: str
    proxy: str
    ca: Path | None
    mtls: bool
    require_secure_aggregation: bool
    require_local_noise: bool
    min_local_noise_multiplier: float
    require_confirmation: bool
    min_secure_clients: int
    min_secure_threshold: float
    trusted_clients: Path | None
    exchange_models: bool
    max_share: float
    peer_listen: str
    peer_address: str
    cache_limit: int
    log_level: str


class _NamedOptions(_ClientCommandOptions, TrainerOptions):
    pass


class _RunOptions(_NamedOptions):
    max_tasks: int | None


class _OnceOptions(_NamedOptions):
    wait_s: float
    leaves_tasks: bool


class _FlowerOptions(_ClientCommandOptions):
    app_dir: Path
    name: str | None
    node_config: tuple[str, ...]
    max_tasks: int | None
    run_config: tuple[str, ...]


class _ClientArguments(TypedDict):
    labels: dict[str, str]
    data_dir: Path | None
    options: ClientOptions
    plugins: Mapping[str, type | str]


@click.group(
    cls=ClickCommands,
    context_settings={**groups.HELP_SETTINGS},
    help="The client of fedplat: training stays where the data is.",
)
@click.version_option(__version__, "-V", "--version", message=about.format_version("fedplat-client", __version__))
def main() -> None:
    """Entry point of the command."""


@main.command("version", help="Show the versions of the client, Python and the protocol.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_versions(as_json: bool) -> None:
    """Show the versions."""
    click.echo(about.format_about("fedplat-client", __version__, as_json=as_json))


_option = functools.partial(click.option, show_envvar=True)
_flag = functools.partial(_option, is_flag=True)
_IDENTITY_OPTIONS = (
    config_option,
    click.option(
        "--ticket",
        metavar="TICKET",
        help="Enrollment ticket from the operator. Prefer --ticket-file: all users of the host can see arguments.",
    ),
    click.option(
        "--ticket-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the ticket. An enrolled client needs no ticket.",
    ),
    _option(
        "--server",
        envvar="FEDPLAT_SERVER",
        metavar="HOST:PORT",
        help="Server to use, if the data directory has identities for several.",
    ),
    _option(
        "--population",
        envvar="FEDPLAT_POPULATION",
        help="Population to use, if the data directory has identities for several.",
    ),
    _option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="FEDPLAT_CLIENT_DATA_DIR",
        help="Directory for identity and models.",
    ),
)
"""The options of each command: which client it is."""

_RUN_OPTIONS = (
    *_IDENTITY_OPTIONS,
    click.option(
        "--plugin",
        "plugins",
        multiple=True,
        metavar="KIND.NAME=REF",
        help="Add a plugin that jobs may name, as module:class or file.py:class; KIND.NAME alone for one of an "
        "installed package. KIND is codecs or algorithms; repeatable.",
    ),
    click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Add a label; repeatable."),
    _option(
        "--transport",
        type=click.Choice(transport.TRANSPORTS),
        default=transport.AUTO,
        envvar="FEDPLAT_TRANSPORT",
        show_default=True,
        help="How to reach the server: gRPC, HTTP/1.1 (the server's --http-listen), or auto: gRPC, and HTTP/1.1 in "
        "networks that let no gRPC through.",
    ),
    _option(
        "--proxy",
        default="",
        envvar="FEDPLAT_PROXY",
        metavar="URL|none",
        help="Proxy for the connection to the server, such as http://proxy.example:3128; default: that of the "
        "environment (https_proxy, no_proxy). Keep a password in the variable: all users of the host see arguments.",
    ),
    _option(
        "--ca",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="FEDPLAT_CA",
        help="File with certificates (PEM) of further authorities to trust, such as that of a proxy that inspects TLS.",
    ),
    _flag(
        "--mtls",
        envvar="FEDPLAT_MTLS",
        help="Authenticate with a client certificate, on the server's mTLS port, instead of signing each call.",
    ),
    _flag(
        "--require-secure-aggregation",
        envvar="FEDPLAT_REQUIRE_SECURE_AGGREGATION",
        help="Refuse to train without secure aggregation, so that the server never sees an update of this client.",
    ),
    _flag(
        "--require-local-noise",
        envvar="FEDPLAT_REQUIRE_LOCAL_NOISE",
        help='Refuse to train unless the client adds noise to its update itself: [privacy] trust = "none".',
    ),
    click.option(
        "--min-local-noise-multiplier",
        type=click.FloatRange(min=0.0),
        default=0.0,
        help="Smallest noise multiplier of a sum, from the noise that clients add to their updates; above 0 it implies "
        "--require-local-noise.",
    ),
    _flag(
        "--require-confirmation",
        envvar="FEDPLAT_REQUIRE_CONFIRMATION",
        help="Refuse secure aggregations in which clients do not confirm the survivors to each other: "
        "[secure_aggregation] confirm = true.",
    ),
    click.option(
        "--min-secure-clients",
        type=click.IntRange(MIN_GROUP, MAX_GROUP),
        default=MIN_GROUP,
        show_default=True,
        help="Smallest number of clients in a sum of secure aggregation.",
    ),
    click.option(
        "--min-secure-threshold",
        type=click.FloatRange(0.5, 1.0),
        default=0.5,
        show_default=True,
        help="Smallest threshold of secure aggregation: the part of the clients that have to collude with the server "
        "to read an update.",
    ),
    click.option(
        "--trusted-clients",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the public keys of the clients that may take part in a secure aggregation with this one, or "
        "exchange models with it, one in each line as the command identity shows it; default: any client.",
    ),
    _flag(
        "--exchange-models",
        envvar="FEDPLAT_EXCHANGE_MODELS",
        help="Take part in decentralised jobs, in which other clients see the model that this client has trained. By "
        "default a client refuses such jobs.",
    ),
    _option(
        "--max-share",
        type=click.FloatRange(0.0, 1.0, min_open=True),
        default=ClientOptions.max_share,
        envvar="FEDPLAT_MAX_SHARE",
        show_default=True,
        metavar="PART",
        help='Refuse rings of decentralised jobs (exchange = "ring") in which one model is more than this part of the '
        "mean, which would show it to all others.",
    ),
    _option(
        "--peer-listen",
        default="",
        envvar="FEDPLAT_PEER_LISTEN",
        metavar="HOST:PORT",
        help="Open a port, on which the neighbours of this client in decentralised jobs fetch its models; implies "
        "--exchange-models. By default a client opens no port, and its models pass through the server, encrypted.",
    ),
    _option(
        "--peer-address",
        default="",
        envvar="FEDPLAT_PEER_ADDRESS",
        metavar="HOST:PORT",
        help="Address at which neighbours reach the port of --peer-listen; default: the same.",
    ),
    _option(
        "--cache-limit",
        type=_parse_size,
        metavar="SIZE",
        default=f"{_DEFAULTS.cache_limit_bytes // 2**30}GiB",
        envvar="FEDPLAT_CACHE_LIMIT",
        show_default=True,
        help="Largest size of the cache of models, such as 500MB. On a disk with less space the cache gives way by "
        "itself. The codecs' residuals, the client states and the models of decentralised jobs may each take the same "
        "size again.",
    ),
    click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True),
)
"""The options of each command that runs a client."""
_MAX_TASKS = click.option("--max-tasks", type=click.IntRange(min=0), help="Stop after this many tasks.")
_STATUSES = {
    TaskOutcome.DONE: 0,
    TaskOutcome.NO_WORK: 3,
    TaskOutcome.FAILED: 4,
    TaskOutcome.UNREACHABLE: 5,
    TaskOutcome.LEFT: 7,
    TaskOutcome.STOPPED: 8,
}
"""The exit statuses of `once`, besides that of a data directory in use; 1 is any other error, 2 a wrong option."""


def _add_options(options: Sequence[_Decorator]) -> _Decorator:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@main.command(help="Run a client until stopped. A module may be given as a file: /path/to/file.py:function.")
@_add_options((*trainer_options.OPTIONS, *_RUN_OPTIONS, _MAX_TASKS))
def run(**options: Unpack[_RunOptions]) -> None:
    """Run a client."""
    _run(options, lambda: _create_client(options), lambda client: client.run(options["max_tasks"]))


@main.command(
    help="Run at most one task and end, for cron and batch systems. Exit statuses: 0 a task was done, 3 no work, 4 the "
    "task failed, 5 the server does not answer, 6 another client works in the data directory, 7 the task continues "
    "(--detach), 8 stopped by a signal; 1 and 2 are errors that need a person."
)
@_add_options((*trainer_options.OPTIONS, *_RUN_OPTIONS))
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0.0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a task.",
)
@click.option(
    "--detach",
    "leaves_tasks",
    is_flag=True,
    help="Do not wait for trainers of the kinds slurm and folder: end with status 7, and let the next call report what "
    "they have done.",
)
def once(**options: Unpack[_OnceOptions]) -> None:
    """Run a client for one task."""
    outcomes: list[TaskOutcome] = []
    _run(options, lambda: _create_client(options), lambda client: outcomes.append(client.run_once(options["wait_s"])))
    click.echo(f"once: {outcomes[0].value}", err=True)
    sys.exit(_STATUSES[outcomes[0]])


@main.command(
    help="Run the ClientApp of a Flower app, in the folder APP_DIR, as trainer and evaluator of jobs, until stopped."
)
@click.argument("app_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", metavar="NAME", help="Name of the trainer and the evaluator; default: the name of the app.")
@click.option(
    "--node-config",
    multiple=True,
    metavar="KEY=VALUE",
    help="Add a value to the app's node config, such as partition-id=0; repeatable. The labels partition_id and "
    "num_partitions are values of it, too.",
)
@click.option(
    "--run-config", multiple=True, metavar="KEY=VALUE", help="Change a value of [tool.flwr.app.config]; repeatable."
)
@_add_options((*_RUN_OPTIONS, _MAX_TASKS))
def flower(**options: Unpack[_FlowerOptions]) -> None:
    """Run a ClientApp."""
    _run(options, lambda: _create_flower_client(options), lambda client: client.run(options["max_tasks"]))


@main.command(
    help="Show what has left the client, from the record in its data directory: a line was written before each update, "
    "model, metrics of an evaluation and text of a failure was sent. Works while the client runs."
)
@_add_options(_IDENTITY_OPTIONS)
@click.option("--limit", "-n", type=click.IntRange(min=1), metavar="N", help="Show the last N lines; default: all.")
@click.option("--json", "form", flag_value="json", help="Print the lines as JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print the lines as CSV.")
@click.option(
    "--verify", is_flag=True, help="Only check that no line was changed, removed or inserted, and print the last hash."
)
def released(limit: int | None, form: str | None, verify: bool, **options: Unpack[_IdentityOptions]) -> None:
    """Show the record of what has left the client."""
    path = _find_client(options).released
    try:
        if verify:
            releases.verify(path)
        else:
            releases.show(path, form or "table", limit)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise click.ClickException(log.make_printable(f"the record {path} cannot be read: {exc}")) from exc


@main.command(
    help="Show the public key that identifies the client, for the file of --trusted-clients of other clients. Before "
    "the first start, create the key."
)
@_add_options(_IDENTITY_OPTIONS)
def identity(**options: Unpack[_IdentityOptions]) -> None:
    """Show a public key, as a line of the file of trusted clients."""
    client = _find_client(options)
    try:
        key = client.load_public_key()
    except errors.DataDirectoryError as exc:
        raise click.ClickException(log.make_printable(str(exc))) from exc
    click.echo(key)


def _find_client(options: _IdentityOptions) -> Client:
    """Open a client that does not run, and whose options do not matter."""
    arguments: _ClientArguments = {
        "labels": {},
        "data_dir": options["data_dir"],
        "options": ClientOptions(),
        "plugins": {},
    }
    try:
        return _open_client(options, arguments)
    except (ValueError, TicketError, errors.DataDirectoryError) as exc:
        raise UsageError(log.make_printable(str(exc))) from exc


def _run(options: _ClientCommandOptions, create: Callable[[], Client], work: Callable[[Client], None]) -> None:
    log.set_up(options["log_level"])
    if settings.rank(click.get_current_context(), "ticket") == 0:
        click.echo(
            "Warning: --ticket shows the ticket to all users of this host, in the list of processes; "
            "use --ticket-file FILE or FEDPLAT_TICKET instead.",
            err=True,
        )
    process_tuning.reuse_message_memory()
    try:
        client, before = create(), threading.enumerate()
        process_tuning.keep_what_is_loaded()
        work(client)
    except FedplatError as exc:
        is_in_use = isinstance(exc, errors.DataDirectoryInUseError)
        raise (_InUseError if is_in_use else click.ClickException)(log.make_printable(str(exc))) from exc
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    click.echo("stopped", err=True)
    if rest := _find_rest(before):
        click.echo(f"waiting for what a trainer has left: {', '.join(rest)}; a second signal ends it at once", err=True)


def _find_rest(before: Iterable[threading.Thread]) -> list[str]:
    """Return the names of the threads since `before` for which Python waits at its end."""
    names = sorted(each.name for each in set(threading.enumerate()).difference(before) if not each.daemon)
    return [name for name in names if not name.startswith("ThreadPoolExecutor")]  # idle ones end by themselves


def _create_client(options: _NamedOptions) -> Client:
    try:
        client = _open_client(options, _read_arguments(options))
        trainer_options.add_trainers(client, options)
    except PluginError as exc:
        raise UsageError(f"--plugin {exc}") from exc
    except (ValueError, TicketError, errors.DataDirectoryError, MissingExtraError) as exc:
        raise UsageError(str(exc)) from exc
    return client


def _create_flower_client(options: _FlowerOptions) -> Client:
    from fedplat.flower.app import read_app, read_settings
    from fedplat.flower.identity import node_id

    labels = _parse_labels(options["labels"])
    try:
        app = read_app(options["app_dir"]).with_run_config(options["run_config"])
        given = (f"{name.replace('_', '-')}={labels[name]}" for name in _PARTITION_LABELS if name in labels)
        node_config = {**read_settings([*given]), **read_settings(options["node_config"])}
        from fedplat_client.trainers.flower import FlowerTrainer

        data_dir = options["data_dir"]
        place = f"{platform.node()}:{data_dir.resolve() if data_dir is not None else ''}"
        trainer = FlowerTrainer(app=app, node_config=node_config, node_id=node_id(place))  # the same after a restart
        client = _open_client(options, _read_arguments(options))
        client.add_trainer(options["name"] or app.name, trainer)
        client.add_evaluator(options["name"] or app.name, trainer.evaluate)
    except PluginError as exc:
        raise UsageError(f"--plugin {exc}") from exc
    except (ValueError, FedplatError) as exc:
        raise UsageError(str(exc)) from exc
    return client


def _read_arguments(options: _ClientCommandOptions) -> _ClientArguments:
    names = {each.name for each in dataclasses.fields(ClientOptions)}
    named: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    return {
        "labels": _parse_labels(options["labels"]),
        "data_dir": options["data_dir"],
        "options": ClientOptions(cache_limit_bytes=options["cache_limit"], **named),
        "plugins": loaded_plugins.parse_plugins(options["plugins"]),
    }


def _open_client(options: _IdentityOptions, given: _ClientArguments) -> Client:
    """Open the client named by the ticket or the options; without either, the one enrolled in the data directory."""
    server, population = options["server"], options["population"]
    text, file, context = options["ticket"], options["ticket_file"], click.get_current_context()
    ranks = settings.rank(context, "ticket"), settings.rank(context, "ticket_file")
    if text is not None and file is not None and ranks not in ((0, 0), (2, 2)):  # of two variables the ticket counts
        text, file = (text, None) if ranks[0] <= ranks[1] else (None, file)
    ticket = enrollment.find_ticket(text, file)
    if ticket is not None:
        if (server or ticket.server, population or ticket.population) != (ticket.server, ticket.population):
            raise UsageError(
                f"the ticket is for {ticket.population!r} at {ticket.server}, but --server or --population differs; "
                "use either the ticket or the options"
            )
        return Client.from_ticket(ticket.to_text(), **given)
    if server and population:
        return Client(server, population=population, **given)
    if server or population:
        raise UsageError("--server and --population must be used together; a ticket contains both")
    return Client.from_ticket(**given)


def _parse_labels(items: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for key, value in map(_parse_label, items):
        if labels.setdefault(key, value) != value:
            raise UsageError(f"--label {key} has the values {labels[key]!r} and {value!r}; expected one of them")
    return labels


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"--label {text!r} cannot be read; expected KEY=VALUE, such as region=eu")
    return key, value
