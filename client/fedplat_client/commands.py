"""The commands of `fedplat-client`: run a client without writing a script."""

from __future__ import annotations

import dataclasses
import logging
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import click
import msgspec

from fedplat.command_line import about, groups, settings
from fedplat.command_line.with_click import ClickCommands
from fedplat.config import loaded_plugins
from fedplat.errors import FedplatError, MissingExtraError, PluginError, TicketError, refer_to_docs
from fedplat.wire import process_tuning
from fedplat_client import (
    approval_commands,
    client_opening,
    errors,
    log,
    owner_commands,
    releases,
    table_checks,
    trainer_options,
)
from fedplat_client._version import __version__
from fedplat_client.client import Client
from fedplat_client.command_options import (
    IDENTITY_OPTIONS,
    RUN_OPTIONS,
    ClientCommandOptions,
    IdentityOptions,
    add_options,
)
from fedplat_client.options import ClientOptions
from fedplat_client.table_checks import TableCheckOptions
from fedplat_client.task import TaskOutcome
from fedplat_client.trainer_options import TrainerOptions, UsageError

_PARTITION_LABELS = ("partition_id", "num_partitions")
_logger = logging.getLogger("fedplat_client")


class _InUseError(click.ClickException):
    """A data directory in which another client works: an exit status of its own, since a later call may work."""

    exit_code = 6


class _NamedOptions(ClientCommandOptions, TrainerOptions):
    pass


class _RunOptions(_NamedOptions):
    max_tasks: int | None


class _OnceOptions(_NamedOptions):
    wait_s: float
    leaves_tasks: bool


class _FlowerOptions(ClientCommandOptions):
    app_dir: Path
    name: str | None
    node_config: tuple[str, ...]
    max_tasks: int | None
    run_config: tuple[str, ...]


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


@main.command(help="Run a client until stopped. A module may be given as a file: /path/to/file.py:function.")
@add_options((*trainer_options.OPTIONS, *RUN_OPTIONS, _MAX_TASKS))
def run(**options: Unpack[_RunOptions]) -> None:
    """Run a client."""
    _run(options, lambda: _create_client(options), lambda client: client.run(options["max_tasks"]))


@main.command(
    help="Run at most one task and end, for cron and batch systems. Exit statuses: 0 a task was done, 3 no work, 4 the "
    "task failed, 5 the server does not answer, 6 another client works in the data directory, 7 the task continues "
    "(--detach), 8 stopped by a signal; 1 and 2 are errors that need a person."
)
@add_options((*trainer_options.OPTIONS, *RUN_OPTIONS))
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
    _tell(options, f"once: {outcomes[0].value}")
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
@add_options((*RUN_OPTIONS, _MAX_TASKS))
def flower(**options: Unpack[_FlowerOptions]) -> None:
    """Run a ClientApp."""
    _run(options, lambda: _create_flower_client(options), lambda client: client.run(options["max_tasks"]))


@main.command(
    "released",
    help="Show what has left the client, from the record in its data directory: a line was written before each update, "
    "model, metrics of an evaluation and text of a failure was sent. Works while the client runs.",
)
@add_options(IDENTITY_OPTIONS)
@click.option("--limit", "-n", type=click.IntRange(min=1), metavar="N", help="Show the last N lines; default: all.")
@click.option("--json", "form", flag_value="json", help="Print the lines as JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print the lines as CSV.")
@click.option(
    "--verify", is_flag=True, help="Only check that no line was changed, removed or inserted, and print the last hash."
)
def list_released(limit: int | None, form: str | None, verify: bool, **options: Unpack[IdentityOptions]) -> None:
    """Show the record of what has left the client."""
    path = client_opening.find_client(options).released
    try:
        if verify:
            releases.verify(path)
        else:
            releases.show(path, form or "table", limit)
    except BrokenPipeError:
        raise  # of the reader of what is printed, such as `head`; click ends
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise click.ClickException(log.make_printable(f"the record {path} cannot be read: {exc}")) from exc


for each in (*approval_commands.COMMANDS, *owner_commands.COMMANDS):
    main.add_command(each)


@main.command(
    help="Show the public key that identifies the client, for the file of --trusted-clients of other clients. Before "
    "the first start, create the key."
)
@add_options(IDENTITY_OPTIONS)
def identity(**options: Unpack[IdentityOptions]) -> None:
    """Show a public key, as a line of the file of trusted clients."""
    client = client_opening.find_client(options)
    try:
        key = client.load_public_key()
    except errors.DataDirectoryError as exc:
        raise click.ClickException(log.make_printable(str(exc))) from exc
    click.echo(key)


@main.group("table", help="Look at a table on this machine: nothing is sent.")
def inspect_tables() -> None:
    """Commands on tables."""


@inspect_tables.command(
    "check",
    help="Compare the rows of FILE (.csv, .parquet, .duckdb) with what is declared about its columns, and print how "
    "many rows are missing a value, have one of another type or one outside the range. Exit status 1 if there are any "
    "that do not fit.",
)
@add_options(table_checks.OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_table(as_json: bool, **options: Unpack[TableCheckOptions]) -> None:
    """Print the counts of a table."""
    sys.exit(0 if table_checks.check(options, as_json=as_json) else 1)


def _run(options: ClientCommandOptions, create: Callable[[], Client], work: Callable[[Client], None]) -> None:
    log.set_up(options["log_level"], as_json=options["json_log"])
    if settings.rank(click.get_current_context(), "ticket") == 0:
        _tell(
            options,
            "Warning: --ticket shows the ticket to all users of this host, in the list of processes; "
            "use --ticket-file FILE or FEDPLAT_TICKET instead.",
            logging.WARNING,
        )
    process_tuning.reuse_message_memory()
    try:
        client, before = create(), threading.enumerate()
        process_tuning.keep_what_is_loaded()
        work(client)
    except FedplatError as exc:
        is_in_use = isinstance(exc, errors.DataDirectoryInUseError)
        codes = [each.error_code for each in (exc, exc.__cause__) if isinstance(each, errors.CallError)]
        docs = refer_to_docs(next(filter(None, codes), ""))
        failure = (_InUseError if is_in_use else click.ClickException)(log.make_printable(str(exc)) + docs)
        if not options["json_log"]:
            raise failure from exc
        _logger.error(failure.message)
        sys.exit(failure.exit_code)
    except KeyboardInterrupt:
        _tell(options, "interrupted")
        sys.exit(130)
    _tell(options, "stopped")
    if rest := _find_rest(before):
        _tell(options, f"waiting for what a trainer has left: {', '.join(rest)}; a second signal ends it at once")


def _tell(options: ClientCommandOptions, text: str, level: int = logging.INFO) -> None:
    """Write a line about the command itself to stderr, in the format of the log."""
    if options["json_log"]:
        _logger.log(level, text)
    else:
        click.echo(text, err=True)


def _find_rest(before: Iterable[threading.Thread]) -> list[str]:
    """Return the names of the threads since `before` for which Python waits at its end."""
    names = sorted(each.name for each in set(threading.enumerate()).difference(before) if not each.daemon)
    return [name for name in names if not name.startswith("ThreadPoolExecutor")]  # idle ones end by themselves


def _create_client(options: _NamedOptions) -> Client:
    try:
        client = client_opening.open_client(options, _read_arguments(options))
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
        client = client_opening.open_client(options, _read_arguments(options))
        client.add_trainer(options["name"] or app.name, trainer)
        client.add_evaluator(options["name"] or app.name, trainer.evaluate)
    except PluginError as exc:
        raise UsageError(f"--plugin {exc}") from exc
    except (ValueError, FedplatError) as exc:
        raise UsageError(str(exc)) from exc
    return client


def _read_arguments(options: ClientCommandOptions) -> client_opening.ClientArguments:
    names = {each.name for each in dataclasses.fields(ClientOptions)}
    named: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    return {
        "labels": _parse_labels(options["labels"]),
        "data_dir": options["data_dir"],
        "options": ClientOptions(cache_limit_bytes=options["cache_limit"], **named),
        "plugins": loaded_plugins.parse_plugins(options["plugins"]),
    }


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
