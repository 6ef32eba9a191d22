"""`fedplat-server init`: create what a first start needs. It may be repeated: existing files are kept."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Annotated

import typer

from fedplat.admin import profile
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.auth.tls import utc_now
from fedplat_server.cli.operators import add_to, new_operator
from fedplat_server.cli.options import (
    DEFAULT_DATA_DIR,
    Database,
    DataDir,
    database_url,
    protect,
    repeat_options,
    with_store,
)
from fedplat_server.config import is_postgres
from fedplat_server.coordination import owner
from fedplat_server.database import schema
from fedplat_server.errors import ConfigError
from fedplat_server.records.audit import HOST, AuditAction, AuditEntry
from fedplat_server.records.operators import Role, hash_token, looks_like_token, new_operator_token

ADMIN = "admin"


def init(
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Host name or address of the server; repeatable. Default: this host's name."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", help="Port of the server in the operator's profile.")
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
    url = database_url(data_dir, database)
    protect(data_dir, url)
    folder = PkiFolder.of(data_dir.resolve())
    make_certificates(folder, host, url)
    with_store(url, lambda store: owner.claim_data_dir(store, data_dir.resolve(), url))
    address = _address(host, port)
    operator_profile = profile_path or data_dir / "admin.toml"
    make_operator(operator_profile, url, address, folder)
    shown = shlex.quote(str(operator_profile))
    print(f"\nnext:\n  {start_command(host, port, url)}\n  fedplat --profile {shown} status")


def start_command(host: list[str] | None, port: int, url: str) -> str:
    """Return the command line that starts a daemon with these names: on all addresses, or on loopback without any."""
    if not host:
        return f"fedplat-server run{repeat_options()} --listen 127.0.0.1:{port}"
    # Other daemons of a PostgreSQL need an address of this one.
    advertise = f" --advertise {_address(host, port)}" if is_postgres(url) else ""
    return f"fedplat-server run{repeat_options()} --listen 0.0.0.0:{port}{advertise}"


def _address(host: list[str] | None, port: int) -> str:
    first_host = host[0] if host else "localhost"
    return f"[{first_host}]:{port}" if ":" in first_host else f"{first_host}:{port}"


def make_certificates(folder: PkiFolder, host: list[str] | None, url: str) -> None:
    """Create the certificates and the database unless they exist; print what was created and what was kept."""
    hosts = pki_folder.all_hosts(host if host else [_hostname()])
    made_authority = folder.make_authority(utc_now())
    print_made(made_authority, "certificate authority", folder.ca)
    made_server = folder.make_server(hosts, utc_now())
    print_made(made_server, "server certificate", folder.files.certificate)
    known = folder.hosts()
    print(f"  for {', '.join(known)}")
    if missing := [name for name in host or [] if name not in known]:
        names = " ".join(f"--host {name}" for name in [*known[:1], *missing])
        raise ConfigError(
            f"the certificate is not for {', '.join(missing)}; make a new one with: "
            f"fedplat-server certificates renew{repeat_options()} {names}"
        )
    before = schema.current(url)
    schema.upgrade(url)
    print_made(before is None, "database", None)
    if made_authority or made_server:
        entry = AuditEntry(HOST, AuditAction.CERTIFICATES_CHANGED, "init", {"hosts": ", ".join(known)})
        with_store(url, lambda store: store.audit.append([entry]))


def make_operator(path: Path, url: str, address: str, folder: PkiFolder) -> None:
    """Create the operator `admin`: first its profile, then its row, so that a repetition completes it after a crash."""
    names = {record.name for record in with_store(url, lambda store: store.operators.list_operators())}
    if path.exists():
        token = profile.load(path).token
        known = with_store(url, lambda store: store.operators.find_operator(hash_token(token)))
        if known is None and (ADMIN in names or not looks_like_token(token)):
            raise ConfigError(
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
        token, _ = new_operator_token()
        profile.save(profile.Profile(server=address, token=token, ca=folder.ca.read_text()), path)
        known = None
        print_made(True, f"operator {ADMIN} with its profile", path)
    if known is None:
        add_to(url, new_operator(ADMIN, Role.ADMIN), token)


def print_made(made: bool, name: str, path: Path | None) -> None:
    """Print whether something was created or kept."""
    print(f"{'made' if made else 'kept'} the {name}" + (f" {path}" if path is not None else ""))


def _hostname() -> str:
    name = socket.gethostname()
    try:
        pki_folder.all_hosts([name])
    except ConfigError:
        return "localhost"
    return name
