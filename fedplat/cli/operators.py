"""`fedplat operator ...` and `fedplat audit`: who may use this server, and what they did."""

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

app = typer.Typer(no_args_is_help=True, help="Say who may use the server.", rich_markup_mode=None)
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
    name: Annotated[str, typer.Argument(metavar="NAME", help="The operator's name.")],
    role: Annotated[str, typer.Option(help="viewer, operator or admin.")],
    expires: Annotated[
        _Seconds | None, typer.Option(parser=_duration, metavar="TIME", help="Such as 90d or 12h; else for ever.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the profile goes; else to stdout.")] = None,
    server: ServerOption = None,
) -> None:
    """Make an operator and the profile that it works with; the token is told only once."""
    with session(context, server, as_json=False) as here:
        if out is not None and out.exists():
            raise ProfileError(f"{out} is there already; it is not replaced")
        made = here.client.add_operator(name, role, expires.value if expires is not None else 0.0)
        theirs = msgspec.structs.replace(here.client.profile, token=made.token)
        if out is None:
            sys.stdout.write(profile.dump(theirs))
            return
        profile.save(theirs, out)
        here.output.note(f"operator {name} works with: fedplat --profile {out} status")


@app.command("list")
def list_operators(context: typer.Context, server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List the operators."""
    with session(context, server, as_json) as here:
        found = here.client.list_operators()
        if here.output.as_json:
            here.output.json([to_record(one) for one in found])
            return
        rows = [
            (one.name, one.role, formats.moment(one.created_unix_s), formats.moment(one.expires_unix_s))
            for one in found
        ]
        here.output.table(("NAME", "ROLE", "CREATED", "EXPIRES"), rows, "there are no operators")


@app.command("remove")
def remove(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The operator's name.")],
    server: ServerOption = None,
) -> None:
    """Remove an operator; its token is refused from now on."""
    with session(context, server, as_json=False) as here:
        here.client.remove_operator(name)
        here.output.note(f"operator {name} was removed")


def audit(
    context: typer.Context,
    after: Annotated[int, typer.Option(metavar="N", min=0, help="Only rows after this number.")] = 0,
    limit: LimitOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the audit log: who did what. With --json a line for each row."""
    with session(context, server, as_json) as here:
        for event in here.client.iter_audit(after, limit):
            if here.output.as_json:
                here.output.json(to_record(event))
                continue
            said = f"{event.sequence}  {formats.moment(event.unix_s)}  {event.actor}: {event.action} {event.subject}"
            here.output.line(said.rstrip() + (f"  {event.details}" if event.details != "{}" else ""))
