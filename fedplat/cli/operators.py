"""`fedplat operator ...` and `fedplat audit`: the operators of a server, and the log of their actions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedplat.admin import profile
from fedplat.cli import formats, lists, times
from fedplat.cli.lists import LimitOption, Order, WatchOption
from fedplat.cli.output import OutputFormat
from fedplat.cli.session import FormatOption, JsonOption, ServerOption, session
from fedplat.cli.tables import ListColumn, ListLayout
from fedplat.cli.times import SinceOption
from fedplat.errors import ProfileError
from fedplat.wire.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="Manage the operators of the server.", rich_markup_mode=None)


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the operator.")],
    role: Annotated[str, typer.Option(help="Role: viewer, operator or admin.")],
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="Validity, such as 90d or 12h. Default: never expires.")
    ] = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File for the profile. Default: stdout.")] = None,
    server: ServerOption = None,
) -> None:
    """Add an operator and write its profile.

    The token is in the profile; the server does not show it again.
    """
    expires_s = times.seconds(expires, "--expires") if expires else 0.0
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
    context: typer.Context, form: FormatOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List the operators."""
    with session(context, server, as_json, form=form) as command:
        command.output.rows(command.client.list_operators(), LAYOUT, "there are no operators")


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
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the audit log of operator actions, the latest rows last.

    --json prints each row as one line, as --output jsonl does.
    """
    request = admin_pb2.ListAuditRequest(
        after_sequence=after, actor=actor, action=action, since_unix_s=times.since(since)
    )
    with session(context, server, as_json, form=form, json_form=OutputFormat.JSONL) as command:
        query = lists.Query[admin_pb2.AuditEvent](
            command.client.page,
            request,
            lambda page: page.events,
            "no rows match",
            Order.SERVER if after else Order.NEWEST_LAST,
        )
        lists.show(command, query, AUDIT_LAYOUT, limit, watch)
