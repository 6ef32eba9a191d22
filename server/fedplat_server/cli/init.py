"""`fedplat-server init`, `operator` and `certificates`: what a first start needs, operators, and renewals."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedplat.admin import profile
from fedplat.command_line.with_typer import JsonOption, make_group
from fedplat.errors import ProfileError
from fedplat_server import config, errors
from fedplat_server.auth import pki_folder, tls
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.cli.options import (
    DEFAULT_DATA_DIR,
    Database,
    DataDir,
    check_database,
    database_url,
    parse_period,
    protect,
    repeat_options,
    with_store,
)
from fedplat_server.coordination import owner
from fedplat_server.database import schema
from fedplat_server.records import audit

ADMIN = "admin"


def init(
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            envvar="FEDPLAT_HOSTS",
            help="Host name or address of the server; repeatable. Default: this host's name.",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            envvar="FEDPLAT_INIT_PORT",  # Kubernetes sets FEDPLAT_PORT for a service with the name fedplat
            help="Port of the server in the operator's profile.",
        ),
    ] = 7443,
    profile_path: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            envvar="FEDPLAT_INIT_PROFILE",
            metavar="FILE",
            help="File for the first operator's profile. Default: DATA_DIR/admin.toml.",
        ),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Create certificates, the database and the first operator.

    Safe to repeat: what exists is kept.
    """
    pki_folder.all_hosts(host or [])  # raises before anything is made
    url = database_url(data_dir, database, is_new=True)
    check_database(data_dir, url)
    protect(data_dir, url)
    folder = PkiFolder.of(data_dir.resolve())
    make_certificates(folder, host, url)
    with_store(url, lambda store: owner.claim_data_dir(store, data_dir.resolve(), url))
    address = _address(host, port)
    operator_profile = profile_path or data_dir / "admin.toml"
    make_operator(operator_profile, url, address, folder)
    print(f"\nnext:\n  {start_command(host, port, url)}")
    if operator_profile.exists():
        print(f"  fedplat --profile {shlex.quote(str(operator_profile))} status")


def start_command(host: list[str] | None, port: int, url: str) -> str:
    """Return the command line that starts a daemon with these names: on all addresses, or on loopback without any."""
    if not host:
        return f"fedplat-server run{repeat_options()} --listen 127.0.0.1:{port}"
    # Other daemons of a PostgreSQL need an address of this one.
    advertise = f" --advertise {_address(host, port)}" if config.is_postgres(url) else ""
    return f"fedplat-server run{repeat_options()} --listen 0.0.0.0:{port}{advertise}"


def _address(host: list[str] | None, port: int) -> str:
    first_host = host[0] if host else "localhost"
    return f"[{first_host}]:{port}" if ":" in first_host else f"{first_host}:{port}"


def make_certificates(folder: PkiFolder, host: list[str] | None, url: str) -> None:
    """Create the certificates and the database unless they exist; print what was created and what was kept."""
    hosts = pki_folder.all_hosts(host if host else [_hostname()])
    made_authority = folder.make_authority(tls.utc_now())
    print_made(made_authority, "certificate authority", folder.ca)
    made_server = folder.make_server(hosts, tls.utc_now())
    print_made(made_server, "server certificate", folder.files.certificate)
    known = folder.hosts()
    print(f"  for {', '.join(known)}")
    if missing := [name for name in host or [] if name not in known]:
        names = " ".join(f"--host {name}" for name in [*known[:1], *missing])
        raise errors.ConfigError(
            f"the certificate is not for {', '.join(missing)}; make a new one with: "
            f"fedplat-server certificates renew{repeat_options()} {names}"
        )
    before = schema.current(url)
    schema.upgrade(url)
    print_made(before is None, "database", None)
    if made_authority or made_server:
        entry = audit.AuditEntry(
            audit.HOST, audit.AuditAction.CERTIFICATES_CHANGED, "init", {"hosts": ", ".join(known)}
        )
        with_store(url, lambda store: store.audit.append([entry]))


def make_operator(path: Path, url: str, address: str, folder: PkiFolder) -> None:
    """Create the operator `admin`: first its profile, then its row, so that a repetition completes it after a crash."""
    names = {record.name for record in with_store(url, lambda store: store.operators.list_operators())}
    if path.exists():
        token = profile.load(path).token
        known = with_store(url, lambda store: store.operators.find_operator(audit.hash_token(token)))
        if known is None and (ADMIN in names or not audit.looks_like_token(token)):
            raise errors.ConfigError(
                f"the token in the profile {path} belongs to no operator in this database; move the file away, run "
                f"fedplat-server operator remove {ADMIN}{repeat_options()} if that operator exists, and repeat init"
            )
        print_made(known is None, "operator's profile", path)
    elif ADMIN in names:
        print(
            f"kept the operator {ADMIN}; its profile is in another file. If it is lost, run fedplat-server operator "
            f"remove {ADMIN}{repeat_options()} and repeat init"
        )
        return
    else:
        token, _ = audit.new_operator_token()
        profile.save(profile.Profile(server=address, token=token, ca=folder.ca.read_text()), path)
        known = None
        print_made(True, f"operator {ADMIN} with its profile", path)
    if known is None:
        add_operator_to(url, new_operator(ADMIN, audit.Role.ADMIN), token)


def print_made(made: bool, name: str, path: Path | None) -> None:
    """Print whether something was created or kept."""
    print(f"{'made' if made else 'kept'} the {name}" + (f" {path}" if path is not None else ""))


def _hostname() -> str:
    name = socket.gethostname()
    try:
        pki_folder.all_hosts([name])
    except errors.ConfigError:
        return "localhost"
    return name


app = make_group("Manage operators.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The operator's name.")]


@app.command("add")
def add_operator(  # noqa: PLR0913 -- one parameter for each option of the command line
    name: NameArgument,
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, operator or admin.")],
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Lifetime of the token, such as 90d or 12h. Default: unlimited.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="File for the profile. Default: stdout.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the server in the profile. Default: that in DATA_DIR/admin.toml, or else "
            f"{profile.DEFAULT_SERVER}.",
        ),
    ] = None,
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
        raise errors.ConfigError(f"{out} exists already and is not replaced; choose another --to")
    record = new_operator(name, role, parse_period(expires, "--expires"))
    ca = data_dir / "pki" / "ca.pem"
    trusted = profile.load_ca(ca) if ca.exists() and not insecure else ""
    token, _ = audit.new_operator_token()
    url = database_url(data_dir, database)
    address = server or _find_address(data_dir / "admin.toml")
    operator_profile = profile.Profile(server=address, token=token, ca=trusted, insecure=insecure)
    if out is None:
        add_operator_to(url, record, token)
        sys.stdout.write(profile.dump(operator_profile))
        return
    profile.save(operator_profile, out)  # first: without its token the operator would only occupy the name
    try:
        add_operator_to(url, record, token)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    print(f"operator {name} ({record.role}) works with: fedplat --profile {out} status")


def _find_address(path: Path) -> str:
    """Return the address in the profile of the first operator; else the default one."""
    try:
        return profile.load(path).server
    except ProfileError:
        return profile.DEFAULT_SERVER


@app.command("list")
def list_operators(
    data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None, as_json: JsonOption = False
) -> None:
    """List operators."""
    records = with_store(database_url(data_dir, database), lambda store: store.operators.list_operators())
    if as_json:
        print(json.dumps([dataclasses.asdict(record) for record in records]))
        return
    for record in records:
        end = "" if record.expires_unix_s is None else f", expires {_day(record.expires_unix_s)}"
        print(f"{record.name}: {record.role}, made {_day(record.created_unix_s)}{end}")


@app.command("remove")
def remove_operator(name: NameArgument, data_dir: DataDir = DEFAULT_DATA_DIR, database: Database = None) -> None:
    """Remove an operator and revoke its token."""
    entry = audit.AuditEntry(audit.HOST, audit.AuditAction.OPERATOR_REMOVED, name)
    url = database_url(data_dir, database)
    with_store(url, lambda store: store.operators.remove_operator(name, [entry]))
    print(f"operator {name} was removed")
    if all(
        record.role != audit.Role.ADMIN for record in with_store(url, lambda store: store.operators.list_operators())
    ):
        print(f"no admin is left; add one with: fedplat-server operator add NAME --role admin{repeat_options()}")


def new_operator(name: str, role: str, expires_in_s: float | None = None) -> audit.OperatorRecord:
    """Return the record of an operator created now. Raises `ConfigError` for an invalid name or role."""
    now = time.time()
    expires_unix_s = None if expires_in_s is None else now + expires_in_s
    return audit.OperatorRecord(audit.checked_name(name), audit.parse_role(role), now, expires_unix_s)


def add_operator_to(url: str, record: audit.OperatorRecord, token: str) -> None:
    """Add an operator to a database. Raises `OperatorError` if the name is taken."""
    token_hash = audit.hash_token(token)
    entry = audit.AuditEntry(audit.HOST, audit.AuditAction.OPERATOR_ADDED, record.name, {"role": record.role})
    with_store(url, lambda store: store.operators.add_operator(record, token_hash, [entry]))


def _day(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


certificates_app = make_group("Manage the server's TLS certificates.")


@certificates_app.command("show")
def show_certificates(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show the subjects, hosts and expiry dates of certificates."""
    folder = PkiFolder.of(data_dir)
    certificates = [
        ("server", folder.files.certificate, certificate) for certificate in pki_folder.read(folder.files.certificate)
    ]
    certificates += [("trusted", folder.ca, certificate) for certificate in pki_folder.read(folder.ca)]
    for kind, path, certificate in certificates:
        days = (certificate.not_valid_after_utc - tls.utc_now()).days
        hosts = pki_folder.hosts_of(certificate)
        print(
            f"{kind}: {certificate.subject.rfc4514_string()}"
            + (f", for {', '.join(hosts)}" if hosts else "")
            + f", expires {certificate.not_valid_after_utc:%Y-%m-%d} (in {days} days)  {path}"
        )


@certificates_app.command("renew")
def renew_certificates(
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Host name or address; repeatable. Default: those of the old certificate."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Create a new key and certificate for the server.

    A running server loads them without a restart.
    """
    folder = PkiFolder.of(data_dir)
    hosts = pki_folder.all_hosts(host) if host else folder.hosts()
    _change(data_dir, database, "renew", lambda: folder.renew(hosts, tls.utc_now()))
    print(f"renewed {folder.files.certificate}; a running server uses it for new connections")


@certificates_app.command("rotate-ca")
def rotate_ca(
    finish: Annotated[bool, typer.Option("--finish", help="Stop trusting the old authority.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Replace the certificate authority, in two steps.

    Without --finish: create a new authority and trust both. With --finish: stop trusting the old one. The profile
    DATA_DIR/admin.toml follows.
    """
    folder = PkiFolder.of(data_dir)
    if finish:
        with _same_trust(data_dir):
            _change(data_dir, database, "rotate-ca --finish", lambda: folder.finish_rotation(tls.utc_now()))
        print(f"removed the old authority; only clients and operators with the new {folder.ca} can connect")
        return
    with _same_trust(data_dir):
        _change(data_dir, database, "rotate-ca", lambda: folder.rotate(tls.utc_now()))
    print(
        f"made a new authority; the old one is still trusted. Give the new {folder.ca} to operators and clients, "
        f"then run: fedplat-server certificates rotate-ca --finish{repeat_options()}"
    )


@contextlib.contextmanager
def _same_trust(data_dir: Path) -> Generator[None]:
    """Let the first operator's profile trust the server's authorities after the block, if it did before."""
    path, authorities = data_dir / "admin.toml", PkiFolder.of(data_dir).ca
    try:
        known = profile.load(path)
        is_same = known.ca.strip() == authorities.read_text().strip()
    except (ProfileError, OSError):  # it was moved, or there is no authority
        is_same, known = False, None
    yield
    if known is not None and is_same:
        profile.save(msgspec.structs.replace(known, ca=authorities.read_text()), path, overwrite=True)


def _change(data_dir: Path, database: str | None, command: str, change: Callable[[], object]) -> None:
    """Change certificates and note it in the audit log; neither, if the database is another one or does not answer."""
    folder = PkiFolder.of(data_dir)
    folder.hosts()  # raises before the folder of a new database would be made
    url = database_url(data_dir, database)
    check_database(data_dir, url)
    with_store(url, lambda store: store.audit.read_head())
    change()
    hosts = ", ".join(folder.hosts())
    entry = audit.AuditEntry(audit.HOST, audit.AuditAction.CERTIFICATES_CHANGED, command, {"hosts": hosts})
    with_store(url, lambda store: store.audit.append([entry]))
