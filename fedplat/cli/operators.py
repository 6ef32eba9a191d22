"""The server and who may call it: `fedplat status`, `operator`, `enrollment`, and `audit`, the log of their actions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedplat.admin import profile
from fedplat.cli import formats, lists, options
from fedplat.cli.formats import SinceOption
from fedplat.cli.lists import LimitOption, Order, WatchableCommand, WatchOption
from fedplat.cli.options import JsonOption, ServerOption
from fedplat.cli.output import ListColumn, ListLayout, OutputFormat, to_record
from fedplat.cli.session import FormatOption, own_timeout_s, session
from fedplat.command_line.with_typer import make_group
from fedplat.errors import ProfileError
from fedplat.wire.auth import Ticket, is_address
from fedplat.wire.v1 import admin_pb2

app = make_group("Manage the operators of the server.")


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the operator.")],
    role: Annotated[str, typer.Option(help="Role: viewer, operator or admin.")],
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="Validity, such as 90d or 12h. Default: never expires.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="File for the profile. Default: stdout.")
    ] = None,
    server: ServerOption = None,
) -> None:
    """Add an operator and write its profile.

    The token is in the profile; the server does not show it again.
    """
    expires_s = formats.parse_seconds(expires, "--expires") if expires else 0.0
    with session(context, server, as_json=False) as command:
        if out is not None and out.exists():
            raise ProfileError(f"{out} exists already, and is not replaced")
        added = command.client.add_operator(name, role, expires_s)
        operator_profile = msgspec.structs.replace(command.client.profile, token=added.token)
        if out is None:
            sys.stdout.write(profile.dump(operator_profile))
            return
        profile.save(operator_profile, out)
        command.output.note(f"operator {name} can now use: fedplat --profile {out} status")


LAYOUT = ListLayout[admin_pb2.Operator](
    lambda one: one.name,
    (
        ListColumn("NAME", lambda one: one.name),
        ListColumn("ROLE", lambda one: one.role),
        ListColumn("CREATED", lambda one: formats.moment(one.created_unix_s)),
        ListColumn("EXPIRES", lambda one: formats.moment(one.expires_unix_s)),
    ),
)


@app.command("list")
def list_operators(
    context: typer.Context,
    limit: LimitOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the operators."""
    with session(context, server, as_json, form=form) as command:
        lists.show_rows(command.output, command.client.list_operators(), LAYOUT, "there are no operators", limit)


@app.command("remove")
def remove(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the operator.")],
    server: ServerOption = None,
) -> None:
    """Remove an operator; its token becomes invalid at once."""
    with session(context, server, as_json=False) as command:
        command.client.remove_operator(name)
        command.output.note(f"removed operator {name}")


AUDIT_LAYOUT = ListLayout[admin_pb2.AuditEvent](
    lambda event: str(event.sequence),
    (
        ListColumn("#ROW", lambda event: str(event.sequence)),
        ListColumn("TIME", lambda event: formats.moment(event.unix_s)),
        ListColumn("ACTOR", lambda event: event.actor),
        ListColumn("ACTION", lambda event: event.action),
        ListColumn("HASH", lambda event: event.hash[:12], is_wide=True),
        ListColumn("SUBJECT", lambda event: event.subject),
        ListColumn("DETAILS", lambda event: event.details if event.details != "{}" else ""),
    ),
)


def audit(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    after: Annotated[
        int, typer.Option(metavar="N", min=0, help="Only rows after this number, the oldest first.", show_default=False)
    ] = 0,
    actor: Annotated[str, typer.Option(metavar="NAME", help="Only actions of this operator or client.")] = "",
    action: Annotated[str, typer.Option(metavar="NAME", help="Only actions of this name, such as 'job paused'.")] = "",
    since: SinceOption = "",
    limit: LimitOption = None,
    follow: lists.FollowOption = False,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the audit log of operator actions, the latest rows last.

    --json prints each row as one line, as --output jsonl does. Ctrl-C ends --follow.
    """
    if follow and watch is not None:
        raise typer.BadParameter("--follow prints new rows and --watch draws all again; expected one of them")
    request = admin_pb2.ListAuditRequest(
        after_sequence=after, actor=actor, action=action, since_unix_s=formats.parse_since(since)
    )
    timeout_s = own_timeout_s(context, None) if follow else None
    with session(context, server, as_json, timeout_s, form=form, json_form=OutputFormat.JSONL) as command:
        query = lists.Query[admin_pb2.AuditEvent](
            command.client.page,
            request,
            lambda page: page.events,
            "no rows match",
            Order.SERVER if after else Order.NEWEST_LAST,
        )
        if follow:
            lists.follow(command, query, AUDIT_LAYOUT, continue_after, limit)
        else:
            lists.show(command, query, AUDIT_LAYOUT, limit, watch)


def continue_after(last: admin_pb2.AuditEvent) -> dict[str, int]:
    """Return the fields of a request for the rows after this one. Their numbers have the order of their commits."""
    return {"after_sequence": last.sequence}


enrollment_app = make_group("Manage the tokens with which clients enroll.")


@enrollment_app.command("create")
def create_token(  # noqa: PLR0913 -- one parameter for each option of the command line
    context: typer.Context,
    population: Annotated[str, typer.Option(metavar="NAME", help="Population that the clients join.")],
    uses: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of clients that may enroll with it.")] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="Validity, such as 30m, 24h or 7d.")] = "24h",
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address at which clients reach the server. Default: the address that this command uses.",
        ),
    ] = "",
    ticket_version: Annotated[
        int,
        typer.Option(
            min=1, max=2, help="Version of the ticket. 1, for clients before 0.2, has no address for HTTP/1.1."
        ),
    ] = 2,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a ticket for new clients.

    Prints the ticket as one line. Keep it secret until it is used up.
    """
    expires_s = formats.parse_seconds(expires, "--expires")
    if address and not is_address(address):
        raise typer.BadParameter(f"--address {address!r}: expected HOST:PORT, the address that clients connect to")
    with session(context, server, as_json) as command:
        made = command.client.create_enrollment(population, uses, expires_s, address or command.client.server)
        if ticket_version == 1:
            made.ticket = msgspec.structs.replace(Ticket.from_text(made.ticket), http="").to_text()
        if command.output.as_json:
            command.output.json(to_record(made))
            return
        command.output.line(made.ticket)
        clients = "one client" if uses == 1 else f"{uses} clients"
        command.output.note(
            f"for {clients}, valid for {expires}: give it to fedplat-client as FEDPLAT_TICKET or --ticket-file; "
            f"revoke it with: fedplat enrollment revoke {made.enrollment.enrollment_id}"
        )


ENROLLMENT_LAYOUT = ListLayout[admin_pb2.Enrollment](
    lambda one: one.enrollment_id,
    (
        ListColumn("ENROLLMENT", lambda one: one.enrollment_id),
        ListColumn("POPULATION", lambda one: one.population),
        ListColumn("STATE", lambda one: one.state),
        ListColumn("#LEFT", lambda one: str(one.num_left)),
        ListColumn("#USES", lambda one: str(one.num_uses)),
        ListColumn("CREATED", lambda one: formats.moment(one.created_unix_s), is_wide=True),
        ListColumn("EXPIRES", lambda one: formats.moment(one.expires_unix_s)),
    ),
)


@enrollment_app.command("list", cls=WatchableCommand)
def list_enrollments(
    context: typer.Context,
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the enrollment tokens, valid or not."""
    with session(context, server, as_json, form=form) as command:
        query = lists.Query[admin_pb2.Enrollment](
            command.client.page,
            admin_pb2.ListEnrollmentsRequest(),
            lambda page: page.enrollments,
            "there are no enrollment tokens",
        )
        lists.show(command, query, ENROLLMENT_LAYOUT, limit, watch)


@enrollment_app.command("revoke")
def revoke_token(
    context: typer.Context,
    enrollment: Annotated[str, typer.Argument(metavar="ENROLLMENT", help="Id of the enrollment token.")],
    with_clients: Annotated[
        bool, typer.Option("--with-clients", help="Also revoke all clients that enrolled with it.")
    ] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke an enrollment token.

    Clients that enrolled with it stay enrolled, unless --with-clients is given.
    """
    with session(context, server, as_json) as command:
        revoked = command.client.revoke_enrollment(enrollment, with_clients=with_clients)
        if command.output.as_json:
            command.output.json(to_record(revoked))
            return
        command.output.line(f"{revoked.enrollment_id} is {revoked.state}")
        if with_clients:
            command.output.note(f"clients that enrolled with it, all revoked now: {revoked.num_revoked_clients}")


def status(
    context: typer.Context,
    form: FormatOption = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
    timeout: options.StatusTimeoutOption = None,
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
