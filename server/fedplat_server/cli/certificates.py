"""`fedplat-server certificates ...`: show and renew the server's certificates, replace the authority."""

from __future__ import annotations

from typing import Annotated

import typer

from fedplat_server.auth import pki_folder, tls
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.cli.options import DEFAULT_DATA_DIR, Database, DataDir, database_url, repeat_options, with_store
from fedplat_server.records.audit import HOST, AuditAction, AuditEntry

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
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


@app.command()
def renew(
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
    folder.renew(pki_folder.all_hosts(host) if host else folder.hosts(), tls.utc_now())
    _note(database_url(data_dir, database), "renew", folder)
    print(f"renewed {folder.files.certificate}; a running server uses it for new connections")


@app.command("rotate-ca")
def rotate_ca(
    finish: Annotated[bool, typer.Option("--finish", help="Stop trusting the old authority.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Replace the certificate authority, in two steps.

    Without --finish: create a new authority and trust both. With --finish: stop trusting the old one.
    """
    folder = PkiFolder.of(data_dir)
    if finish:
        folder.finish_rotation(tls.utc_now())
        _note(database_url(data_dir, database), "rotate-ca --finish", folder)
        print(f"removed the old authority; only clients and operators with the new {folder.ca} can connect")
        return
    folder.rotate(tls.utc_now())
    _note(database_url(data_dir, database), "rotate-ca", folder)
    print(
        f"made a new authority; the old one is still trusted. Give the new {folder.ca} to operators and clients, "
        f"then run: fedplat-server certificates rotate-ca --finish{repeat_options()}"
    )


def _note(url: str, command: str, folder: PkiFolder) -> None:
    entry = AuditEntry(HOST, AuditAction.CERTIFICATES_CHANGED, command, {"hosts": ", ".join(folder.hosts())})
    with_store(url, lambda store: store.audit.append([entry]))
