"""`fedplat-server certificates ...`: look at the server's certificates, renew them, replace the authority."""

from __future__ import annotations

from typing import Annotated

import typer

from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.auth.tls import utc_now
from fedplat_server.cli.options import DEFAULT_DATA_DIR, Database, DataDir, database_url, with_store
from fedplat_server.records.audit import HOST, AuditAction, AuditEntry

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show whom the certificates are for and how long they are good."""
    folder = PkiFolder.of(data_dir)
    found = [
        ("server", folder.files.certificate, certificate) for certificate in pki_folder.read(folder.files.certificate)
    ]
    found += [("trusted", folder.ca, certificate) for certificate in pki_folder.read(folder.ca)]
    for what, path, certificate in found:
        days = (certificate.not_valid_after_utc - utc_now()).days
        hosts = pki_folder.hosts_of(certificate)
        print(
            f"{what}: {certificate.subject.rfc4514_string()}"
            + (f", for {', '.join(hosts)}" if hosts else "")
            + f", expires {certificate.not_valid_after_utc:%Y-%m-%d} (in {days} days)  {path}"
        )


@app.command()
def renew(
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address; repeatable. Default: those that it has now.")
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Make a new key and certificate for the server; a running one takes them up by itself."""
    folder = PkiFolder.of(data_dir)
    folder.renew(pki_folder.all_hosts(host) if host else folder.hosts(), utc_now())
    _note(database_url(data_dir, database), "renew", folder)
    print(f"renewed {folder.files.certificate}; a running server uses it from the next connection on")


@app.command("rotate-ca")
def rotate_ca(
    finish: Annotated[bool, typer.Option("--finish", help="Forget the old authority.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
) -> None:
    """Replace the certificate authority in two steps; between them both are trusted."""
    folder = PkiFolder.of(data_dir)
    if finish:
        folder.finish_rotation(utc_now())
        _note(database_url(data_dir, database), "rotate-ca --finish", folder)
        print(f"the old authority is forgotten; who does not have the new {folder.ca} cannot connect any more")
        return
    folder.rotate(utc_now())
    _note(database_url(data_dir, database), "rotate-ca", folder)
    print(
        f"made a new authority; the old one is trusted, too. Give the new {folder.ca} to operators and clients, "
        "and then: fedplat-server certificates rotate-ca --finish"
    )


def _note(url: str, what: str, folder: PkiFolder) -> None:
    entry = AuditEntry(HOST, AuditAction.CERTIFICATES_CHANGED, what, {"hosts": ", ".join(folder.hosts())})
    with_store(url, lambda store: store.audit.append([entry]))
