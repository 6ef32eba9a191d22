"""`fedplat-server operator ...`: manage operators directly in the database, from the server's host."""

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
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, operator or admin.")],
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Lifetime of the token, such as 90d or 12h. Default: unlimited.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File for the profile. Default: stdout.")] = None,
    server: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the server in the profile.")
    ] = profile.DEFAULT_SERVER,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Write a profile for a server that runs with --insecure.")
    ] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Add an operator and write its profile.

    The profile holds the operator's token, which cannot be shown again.
    """
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already and is not replaced; choose another --out")
    expires_in_s = operators.parse_duration_s(expires) if expires is not None else None
    record = new_operator(name, role, expires_in_s)
    ca = data_dir / "pki" / "ca.pem"
    trusted = profile.load_ca(ca) if ca.exists() and not insecure else ""
    token, _ = operators.new_operator_token()
    url = database_url(data_dir, database)
    operator_profile = profile.Profile(server=server, token=token, ca=trusted, insecure=insecure)
    if out is None:
        add_to(url, record, token)
        sys.stdout.write(profile.dump(operator_profile))
        return
    profile.save(operator_profile, out)  # first: without its token the operator would only occupy the name
    try:
        add_to(url, record, token)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    print(f"operator {name} ({record.role}) works with: fedplat --profile {out} status")


@app.command("list")
def list_operators(data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """List operators."""
    for record in with_store(database_url(data_dir, database), lambda store: store.operators.list_operators()):
        end = "" if record.expires_unix_s is None else f", expires {_day(record.expires_unix_s)}"
        print(f"{record.name}: {record.role}, made {_day(record.created_unix_s)}{end}")


@app.command()
def remove(name: NameArgument, data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Remove an operator and revoke its token."""
    entry = AuditEntry(HOST, AuditAction.OPERATOR_REMOVED, name)
    with_store(database_url(data_dir, database), lambda store: store.operators.remove_operator(name, [entry]))
    print(f"operator {name} was removed")


def new_operator(name: str, role: str, expires_in_s: float | None = None) -> OperatorRecord:
    """Return the record of an operator created now. Raises `ConfigError` for an invalid name or role."""
    now = time.time()
    expires_unix_s = None if expires_in_s is None else now + expires_in_s
    return OperatorRecord(operators.checked_name(name), operators.parse_role(role), now, expires_unix_s)


def add_to(url: str, record: OperatorRecord, token: str) -> None:
    """Add an operator to a database. Raises `OperatorError` if the name is taken."""
    token_hash = operators.hash_token(token)
    entry = AuditEntry(HOST, AuditAction.OPERATOR_ADDED, record.name, {"role": record.role})
    with_store(url, lambda store: store.operators.add_operator(record, token_hash, [entry]))


def _day(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
