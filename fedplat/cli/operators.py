"""`fedplat operator ...` and `fedplat audit`: the operators of a server, and the log of their actions."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedplat.admin import profile
from fedplat.cli import formats
from fedplat.cli.output import to_record
from fedplat.cli.session import JsonOption, LimitOption, ServerOption, session
from fedplat.errors import ProfileError

app = typer.Typer(no_args_is_help=True, help="Manage the operators of the server.", rich_markup_mode=None)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclasses.dataclass(frozen=True)
class _Seconds:
    value: float


def _duration(text: str) -> _Seconds:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhdw])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r}: expected a number and s, m, h, d or w, such as 90d")
    return _Seconds(float(match[1]) * _UNITS_S[match[2]])


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the operator.")],
    role: Annotated[str, typer.Option(help="Role: viewer, operator or admin.")],
    expires: Annotated[
        _Seconds | None,
        typer.Option(parser=_duration, metavar="TIME", help="Validity, such as 90d or 12h. Default: never expires."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File for the profile. Default: stdout.")] = None,
    server: ServerOption = None,
) -> None:
    """Add an operator and write its profile.

    The token is in the profile; the server does not show it again.
    """
    with session(context, server, as_json=False) as command:
        if out is not None and out.exists():
            raise ProfileError(f"{out} exists already, and is not replaced")
        added = command.client.add_operator(name, role, expires.value if expires is not None else 0.0)
        operator_profile = msgspec.structs.replace(command.client.profile, token=added.token)
        if out is None:
            sys.stdout.write(profile.dump(operator_profile))
            return
        profile.save(operator_profile, out)
        command.output.note(f"operator {name} can now use: fedplat --profile {out} status")


@app.command("list")
def list_operators(context: typer.Context, server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List the operators."""
    with session(context, server, as_json) as command:
        found = command.client.list_operators()
        if command.output.as_json:
            command.output.json([to_record(one) for one in found])
            return
        rows = [
            (one.name, one.role, formats.moment(one.created_unix_s), formats.moment(one.expires_unix_s))
            for one in found
        ]
        command.output.table(("NAME", "ROLE", "CREATED", "EXPIRES"), rows, "there are no operators")


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


def audit(
    context: typer.Context,
    after: Annotated[int, typer.Option(metavar="N", min=0, help="Show only rows after this sequence number.")] = 0,
    limit: LimitOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the audit log of operator actions.

    With --json, each row is printed as one line.
    """
    with session(context, server, as_json) as command:
        for event in command.client.iter_audit(after, limit):
            if command.output.as_json:
                command.output.json(to_record(event))
                continue
            row = f"{event.sequence}  {formats.moment(event.unix_s)}  {event.actor}: {event.action} {event.subject}"
            command.output.line(row.rstrip() + (f"  {event.details}" if event.details != "{}" else ""))
