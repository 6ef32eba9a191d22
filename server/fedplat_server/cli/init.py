"""`fedplat-server init`: everything that a first start needs. It may be repeated: what is there stays."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from fedplat.admin import profile
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.auth.tls import utc_now
from fedplat_server.cli.operators import add_to, new_operator
from fedplat_server.cli.options import DEFAULT_DATA_DIR, Database, DataDir, database_url, protect, with_store
from fedplat_server.database import schema
from fedplat_server.errors import ConfigError
from fedplat_server.records.audit import HOST, AuditAction, AuditEntry
from fedplat_server.records.operators import Role, hash_token, looks_like_token, new_operator_token

ADMIN = "admin"


def init(
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address that the server is reached by; repeatable. Default: this machine's name."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port, for the operator's profile.")] = 7443,
    profile_path: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            envvar="FEDPLAT_INIT_PROFILE",
            metavar="FILE",
            help="Where the first operator's profile goes. Default: DATA_DIR/admin.toml.",
        ),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Make certificates, the database and the first operator, as far as they are not there. Safe to repeat."""
    url = database_url(data_dir, database)
    protect(data_dir, url)
    folder = PkiFolder.of(data_dir.resolve())
    _make_certificates(folder, host, url, data_dir)
    reached_by = host[0] if host else "localhost"
    address = f"[{reached_by}]:{port}" if ":" in reached_by else f"{reached_by}:{port}"
    operator_profile = profile_path or data_dir / "admin.toml"
    _make_operator(operator_profile, url, address, folder)
    shown, listen = _format_option(data_dir), "0.0.0.0" if host else "127.0.0.1"
    print(
        f"\nnext:\n  fedplat-server run{shown} --listen {listen}:{port}\n  fedplat --profile {operator_profile} status"
    )


def _make_certificates(folder: PkiFolder, host: list[str] | None, url: str, data_dir: Path) -> None:
    hosts = pki_folder.all_hosts(host if host else [_this_machine()])
    made_authority = folder.make_authority(utc_now())
    _say(made_authority, "certificate authority", folder.ca)
    made_server = folder.make_server(hosts, utc_now())
    _say(made_server, "server certificate", folder.files.certificate)
    known = folder.hosts()
    print(f"  for {', '.join(known)}")
    if missing := [one for one in host or [] if one not in known]:
        names = " ".join(f"--host {one}" for one in [*known[:1], *missing])
        raise ConfigError(
            f"the certificate is not for {', '.join(missing)}; make a new one with: "
            f"fedplat-server certificates renew{_format_option(data_dir)} {names}"
        )
    before = schema.current(url)
    schema.upgrade(url)
    _say(before is None, "database", None)
    if made_authority or made_server:
        entry = AuditEntry(HOST, AuditAction.CERTIFICATES_CHANGED, "init", {"hosts": ", ".join(known)})
        with_store(url, lambda store: store.audit.append([entry]))


def _make_operator(path: Path, url: str, address: str, folder: PkiFolder) -> None:
    """Makes the operator `admin`: first its profile, then the row, so that what a crash leaves can be completed."""
    names = {one.name for one in with_store(url, lambda store: store.operators.list_operators())}
    if path.exists():
        token = profile.load(path).token
        known = with_store(url, lambda store: store.operators.find_operator(hash_token(token)))
        if known is None and (ADMIN in names or not looks_like_token(token)):
            raise ConfigError(
                f"the profile {path} has a token that this database does not know; move it away, run fedplat-server "
                f"operator remove {ADMIN} if there is one, and init again"
            )
        _say(known is None, "operator's profile", path)
    elif ADMIN in names:
        print(
            f"kept the operator {ADMIN}, whose profile is not here; if it is lost: fedplat-server operator remove "
            f"{ADMIN}, and init again"
        )
        return
    else:
        token, _ = new_operator_token()
        profile.save(profile.Profile(server=address, token=token, ca=folder.ca.read_text()), path)
        known = None
        _say(True, f"operator {ADMIN} with its profile", path)
    if known is None:
        add_to(url, new_operator(ADMIN, Role.ADMIN), token)


def _say(made: bool, what: str, path: Path | None) -> None:
    print(f"{'made' if made else 'kept'} the {what}" + (f" {path}" if path is not None else ""))


def _this_machine() -> str:
    name = socket.gethostname()
    try:
        pki_folder.all_hosts([name])
    except ConfigError:
        return "localhost"
    return name


def _format_option(data_dir: Path) -> str:
    return f" --data-dir {data_dir}" if data_dir != DEFAULT_DATA_DIR else ""
