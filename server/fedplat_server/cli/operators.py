"""`fedplat-server operator ...`: operators straight in the database, for whoever may use the server's machine."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fedplat.admin import profile
from fedplat_server.cli.options import DEFAULT_DATA_DIR, Database, DataDir, database_url, with_store
from fedplat_server.errors import ConfigError
from fedplat_server.records import operators
from fedplat_server.records.audit import HOST, AuditAction, AuditEntry
from fedplat_server.records.operators import OperatorRecord

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The operator's name.")]


@app.command()
def add(  # noqa: PLR0913 -- one parameter for each option of the command line
    name: NameArgument,
    role: Annotated[str, typer.Option(help="viewer, operator or admin.")],
    expires: Annotated[str | None, typer.Option(metavar="TIME", help="Such as 90d or 12h; else for ever.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the profile goes; else to stdout.")] = None,
    server: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="How the operator reaches the server.")
    ] = profile.DEFAULT_SERVER,
    insecure: Annotated[bool, typer.Option("--insecure", help="For a server that is run with --insecure.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Make an operator and the profile that it works with; the token is told only once."""
    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already; it is not replaced")
    expires_in_s = operators.parse_duration_s(expires) if expires is not None else None
    record = new_operator(name, role, expires_in_s)
    ca = data_dir / "pki" / "ca.pem"
    trusted = profile.load_ca(ca) if ca.exists() and not insecure else ""
    token, _ = operators.new_operator_token()
    url = database_url(data_dir, database)
    made = profile.Profile(server=server, token=token, ca=trusted, insecure=insecure)
    if out is None:
        add_to(url, record, token)
        sys.stdout.write(profile.dump(made))
        return
    profile.save(made, out)  # first: an operator whose token nobody has would only take a name
    try:
        add_to(url, record, token)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    print(f"operator {name} ({record.role}) works with: fedplat --profile {out} status")


@app.command("list")
def list_operators(data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """List the operators."""
    for one in with_store(database_url(data_dir, database), lambda store: store.operators.list_operators()):
        end = "" if one.expires_unix_s is None else f", expires {_day(one.expires_unix_s)}"
        print(f"{one.name}: {one.role}, made {_day(one.created_unix_s)}{end}")


@app.command()
def remove(name: NameArgument, data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Remove an operator; its token is refused from now on."""
    entry = AuditEntry(HOST, AuditAction.OPERATOR_REMOVED, name)
    with_store(database_url(data_dir, database), lambda store: store.operators.remove_operator(name, [entry]))
    print(f"operator {name} was removed")


def new_operator(name: str, role: str, expires_in_s: float | None = None) -> OperatorRecord:
    """An operator that is made now. Raises `ConfigError`."""
    now = time.time()
    expires_unix_s = None if expires_in_s is None else now + expires_in_s
    return OperatorRecord(operators.checked_name(name), operators.parse_role(role), now, expires_unix_s)


def add_to(url: str, record: OperatorRecord, token: str) -> None:
    """Adds an operator to a database. Raises `OperatorError`."""
    token_hash = operators.hash_token(token)
    entry = AuditEntry(HOST, AuditAction.OPERATOR_ADDED, record.name, {"role": record.role})
    with_store(url, lambda store: store.operators.add_operator(record, token_hash, [entry]))


def _day(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
