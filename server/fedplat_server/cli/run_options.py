"""Checks of the options of `fedplat-server run`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from fedplat import claims, errors, texts
from fedplat.config import loaded_plugins, user_code
from fedplat.flower.app import check_version, describe_app, read_app
from fedplat_server import dashboard_process
from fedplat_server.auth import pki_folder
from fedplat_server.cli.options import locate_data, parse_host, repeat_options
from fedplat_server.config import DEFAULT_JOB_METRICS, TlsFiles, is_postgres
from fedplat_server.errors import ConfigError
from fedplat_server.messages import validation
from fedplat_server.metrics.job_series import MAX_METRICS


def read_job_metrics(names: list[str], metrics: str) -> tuple[str, ...]:
    """Return the names of `--job-metric`, or the default ones. Raises `ConfigError` if they are invalid."""
    if names and not metrics:
        raise ConfigError("--job-metric needs --metrics HOST:PORT, which serves the metrics")
    if len(set(names)) > MAX_METRICS:
        raise ConfigError(f"--job-metric: {len(set(names))} names; expected at most {MAX_METRICS}")
    for name in names:
        if error := claims.check_metrics({name: 0.0}):
            raise ConfigError(f"--job-metric: {error}")
    return tuple(dict.fromkeys(names)) or DEFAULT_JOB_METRICS


def check_dashboard(address: str, insecure: bool) -> None:
    """Raise `ConfigError` if the dashboard cannot have its address."""
    if not address:
        return
    host = parse_host(address, "--dashboard")
    dashboard_process.check_installed()
    if insecure and host.strip("[]") not in pki_folder.LOOPBACK:
        raise ConfigError(
            f"--dashboard {address}: without TLS the dashboard listens on loopback only (127.0.0.1), because operators "
            "enter their tokens there"
        )


def check_shared_port(listen: str, advertise: str, database: str) -> None:
    """Raise `ConfigError` unless daemons can share a port."""
    if not is_postgres(database):
        raise ConfigError(
            "--share-port is for daemons of one PostgreSQL; set its URL with FEDPLAT_DATABASE or --database"
        )
    shared, own = (int(address.rpartition(":")[2] or 0) for address in (listen, advertise))
    if own in (0, shared):
        raise ConfigError(
            "--share-port needs --advertise HOST:PORT with another port, where the other daemons reach this one"
        )
    if shared == 0:
        raise ConfigError(f"--listen {listen}: --share-port needs a port number that is the same for all daemons")


def check_insecure(host: str, certificate: Path | None, anywhere: bool) -> None:
    """Raise `ConfigError` if a server must not listen on a host without TLS."""
    if certificate is not None:
        raise ConfigError("--insecure and --tls-certificate exclude each other; leave one out")
    if not anywhere and host.strip("[]") not in pki_folder.LOOPBACK:
        raise ConfigError(
            f"--insecure on {host}: without TLS a server listens on loopback only (127.0.0.1). Use TLS (fedplat-server "
            "init makes certificates), or add --insecure-anywhere on a network that you trust"
        )


def find_tls_files(data_dir: Path, certificate: Path | None, key: Path | None, ca: Path | None) -> TlsFiles:
    """Return the files of TLS, those of the data folder by default. Raises `ConfigError`."""
    if (certificate is None) != (key is None) or (ca is not None and certificate is None):
        raise ConfigError("--tls-certificate and --tls-key (and, if need be, --tls-ca) must be given together")
    if certificate is not None and key is not None:
        return TlsFiles(certificate, key, ca, renewal="")
    files = pki_folder.PkiFolder.of(data_dir.resolve()).files
    if not files.certificate.exists():
        raise ConfigError(
            f"there are no certificates in {files.certificate.parent}: make some with fedplat-server init"
            f"{repeat_options()}, use your own with --tls-certificate FILE --tls-key FILE, or serve without TLS with "
            "--insecure"
        )
    return dataclasses.replace(files, renewal=f"{files.renewal}{locate_data(data_dir)}")


def parse_references(items: list[str], option: str) -> dict[str, str]:
    """Parse options `NAME=REF`. Raises `ConfigError` for errors that would appear only at the first use."""
    references: dict[str, str] = {}
    for item in items:
        name, sign, reference = item.partition("=")
        if not sign or not validation.is_name(name):
            raise ConfigError(f"{option} {item}: expected NAME=module:name or NAME=/path/to/file.py:name")
        if name in references:
            raise ConfigError(f"{option} {item}: {name} is {references[name]} already")
        try:
            user_code.check(reference)
        except errors.UserCodeError as exc:
            raise ConfigError(f"{option} {item}: {exc}") from exc
        references[name] = user_code.make_absolute(reference)
    return references


def load_plugins(items: list[str]) -> loaded_plugins.LoadedPlugins:
    """Load the objects of `--plugin`. Raises `ConfigError`."""
    try:
        return loaded_plugins.load_plugins(loaded_plugins.parse_plugins(items))
    except errors.PluginError as exc:
        raise ConfigError(f"--plugin {exc}") from exc


def read_flower_apps(items: list[str]) -> tuple[dict[str, str], list[loaded_plugins.PluginVersion]]:
    """Return the folders of Flower apps by name, and their versions."""
    apps: dict[str, str] = {}
    versions: list[loaded_plugins.PluginVersion] = []
    for item in items:
        name, sign, folder = item.partition("=")
        if not sign or not folder or not re.fullmatch(texts.NAME_PATTERN, name):
            raise ConfigError(f"--flower-app {item}: expected NAME=FOLDER, such as digits=/opt/digits")
        if name in apps:
            raise ConfigError(f"--flower-app {item}: {name} is {apps[name]} already")
        try:
            check_version()
            app = read_app(Path(folder))
        except errors.FedplatError as exc:
            raise ConfigError(f"--flower-app {item}: {exc}") from exc
        apps[name] = str(app.folder)
        versions.append(describe_app(name, app))
    return apps, versions
