"""The command `fedplat`: its global options, `fedplat status`, and the groups of the other modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import typer.core

from fedplat._version import __version__
from fedplat.cli import (
    clients,
    dashboard,
    data,
    events,
    flower,
    formats,
    jobs,
    models,
    new,
    operators,
    privacy,
    round_description,
    simulate,
    sweep,
)
from fedplat.cli.lists import WatchableCommand
from fedplat.cli.session import (
    AnyTimeoutOption,
    FormatOption,
    JsonOption,
    ServerOption,
    Settings,
    StatusTimeoutOption,
    own_timeout_s,
    session,
)
from fedplat.wire.v1 import admin_pb2

typer.core.HAS_RICH = False  # else typer 0.20 escapes the brackets of plain help for Rich: "\\[default: 1]"
# No panels: usage errors are plain lines, like all other errors.
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(jobs.app, name="job")
app.add_typer(round_description.app, name="round")
app.add_typer(flower.app, name="flower")
app.add_typer(clients.app, name="client")
app.add_typer(operators.enrollment_app, name="enrollment")
app.add_typer(models.app, name="model")
app.add_typer(data.app, name="data")
app.add_typer(operators.app, name="operator")
app.add_typer(privacy.app, name="privacy")
app.add_typer(events.webhook_app, name="webhook")
app.command("audit", cls=WatchableCommand)(operators.audit)
app.command("events")(events.events)
app.command("simulate")(simulate.simulate)
app.command("sweep")(sweep.sweep)
app.command("new")(new.new)
app.command("dashboard")(dashboard.dashboard)


def _print_version(is_set: bool) -> None:
    if is_set:
        sys.stdout.write(f"fedplat {__version__}\n")
        raise typer.Exit


@app.callback()
def options(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    profile: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDPLAT_PROFILE",
            metavar="FILE",
            help="Profile with the server, its certificates and your token. Default: profile.toml in the fedplat "
            "folder of the user's configuration.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", envvar="FEDPLAT_SERVER", metavar="HOST:PORT", help="Server to use instead of the profile's."
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDPLAT_CA", metavar="FILE", help="Trusted certificates (PEM) to use instead of the profile's."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", envvar="FEDPLAT_INSECURE", help="Connect without TLS."),
    ] = False,
    as_json: JsonOption = False,
    timeout: AnyTimeoutOption = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Operate a fedplat server: submit jobs, follow them, export models.

    --server and --json may be given before or after the command; --timeout before any command. The token is read from
    the profile or from FEDPLAT_TOKEN.
    """
    del version  # handled by its callback
    context.obj = Settings(server, as_json, profile, ca, insecure, timeout)


@app.command()
def status(
    context: typer.Context,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
    timeout: StatusTimeoutOption = None,
) -> None:
    """Show server status."""
    with session(context, server, as_json, own_timeout_s(context, timeout, 0.0), form=form) as command:
        state = command.patience.run(command.client, command.client.status)
        address = command.client.server
        command.output.show(state, address, lambda: {"server": address, **_fields(state)})
        if command.output.is_for_people:
            for alert in state.alerts:
                command.output.sentence(formats.alert(alert))


def _fields(state: admin_pb2.GetStatusResponse) -> dict[str, str]:
    jobs_by_state = ", ".join(f"{count} {name}" for name, count in sorted(state.num_jobs.items()))
    return {
        "connection": _connection(state),
        "version": f"{state.software_version} (protocol {state.protocol_version})",
        "role": _role(state),
        "process": str(state.process_id),
        "running for": formats.duration(state.uptime_s),
        "peak memory": formats.size(state.peak_rss_bytes),
        "clients": f"{state.num_clients} enrolled, {state.num_waiting} waiting, {state.num_busy} busy",
        "jobs": jobs_by_state or "none",
        "evaluators": ", ".join(state.evaluators) or "none",
        "trainers": ", ".join(state.trainers) or "none",
        "plugins": formats.plugins(state.plugins) or "none",
        "database": state.database,
        "disk": f"{formats.size(state.disk_free_bytes)} of {formats.size(state.disk_total_bytes)} free",
        "alerts": str(state.num_alerts or "none"),
    }


def _role(state: admin_pb2.GetStatusResponse) -> str:
    if not state.term:
        return "leader, the only daemon of its database"
    leader = f"{state.leader} at {state.leader_address}, term {state.term}"
    return f"gateway {state.gateway}; the leader is {leader}" if state.gateway else f"leader, {leader}"


def _connection(state: admin_pb2.GetStatusResponse) -> str:
    if state.insecure:
        return "WITHOUT TLS: anyone on the network can read everything, including models and tokens"
    until = formats.moment(state.certificate_expires_unix_s)
    return f"TLS, the server's certificate expires in {state.certificate_days_left:.0f} days ({until})"
