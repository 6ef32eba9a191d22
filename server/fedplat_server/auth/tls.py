"""The server's certificates while it runs: changed files are taken up at the next handshake, without a restart.

Streams and rounds that are under way go on. Files that are broken, expired, or not of one kind are not taken: the
server keeps what it had, and says so in the log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import threading
from collections.abc import Callable
from typing import Any, cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedplat_server import logs
from fedplat_server.config import TlsFiles
from fedplat_server.errors import ConfigError

WARN_DAYS = 14
CHECK_S = 3600.0
"""How often the days that are left are looked at, and what is insecure is said again."""
_Stamp = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class LoadedCertificate:
    """The content of the files, checked."""

    certificate: bytes
    key: bytes = dataclasses.field(repr=False)
    ca: bytes | None
    expires: datetime.datetime

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What gRPC takes."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], root_certificates=self.ca)


def load(files: TlsFiles, now: datetime.datetime) -> LoadedCertificate:
    """Reads and checks the files. Raises `ConfigError`."""
    try:
        certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
        ca = files.ca.read_bytes() if files.ca is not None else None
    except OSError as exc:
        raise ConfigError(f"the server's certificates cannot be read: {exc.filename}: {exc.strerror}") from exc
    try:
        chain = x509.load_pem_x509_certificates(certificate)
        if ca is not None:
            x509.load_pem_x509_certificates(ca)
    except ValueError as exc:
        raise ConfigError(f"{files.certificate} or {files.ca} holds no certificates in PEM: {exc}") from exc
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as exc:  # not with its text, which may quote the key
        raise ConfigError(f"{files.key} holds no private key in PEM without a password") from exc
    if private.public_key() != chain[0].public_key():
        raise ConfigError(f"the key {files.key} does not belong to the certificate {files.certificate}")
    expires = chain[0].not_valid_after_utc
    if expires <= now:
        raise ConfigError(
            f"the certificate {files.certificate} expired {expires:%Y-%m-%d %H:%M} UTC; make a new one with: "
            "fedplat-server certificates renew"
        )
    return LoadedCertificate(certificate, key, ca, expires)


def utc_now() -> datetime.datetime:
    """The moment on the wall clock, by which certificates are judged."""
    return datetime.datetime.now(datetime.UTC)


class Certificates:
    """The certificates that handshakes use. Raises `ConfigError` when there are none to begin with."""

    def __init__(self, files: TlsFiles, clock: Callable[[], datetime.datetime] = utc_now) -> None:
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()  # gRPC asks in threads of its own
        self._stamp = _stamp(files)
        self._complained = self._stamp
        self._suspect: _Stamp | None = None
        self.loaded = load(files, clock())

    @property
    def days_left(self) -> float:
        """Days until the certificate expires; negative when it has."""
        return (self.loaded.expires - self._clock()).total_seconds() / 86_400

    def credentials(self, *, of_both: bool = False) -> grpc.ServerCredentials:
        """Credentials for one port, which asks `refresh` at every handshake.

        `of_both`: who connects must show one of `ca`, too.
        """
        given = self.loaded  # by these credentials: others, or `look`, may have taken up a change before

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            self.refresh()
            if self.loaded is given:
                return None
            given = self.loaded
            return given.configuration()

        # None, for "go on with what you have", is missing in the types of gRPC.
        return grpc.dynamic_ssl_server_credentials(given.configuration(), cast(Any, fetch), of_both)

    def refresh(self) -> bool:
        """Takes up files that have changed; whether there was something to take up."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return False
            try:
                loaded = load(self._files, self._clock())
            except ConfigError as exc:
                self._complain(stamp, exc)
                return False
            self.loaded, self._stamp = loaded, stamp
        logs.get().info("the server has new certificates", expires=loaded.expires.isoformat())
        return True

    def _complain(self, stamp: _Stamp, exc: ConfigError) -> None:
        # Files that are being replaced one after the other do not fit for a moment: only what stays so is an error.
        if stamp == self._suspect and stamp != self._complained:
            self._complained = stamp
            logs.get().error("changed certificates are not taken; the old ones stay", error=str(exc))
        self._suspect = stamp

    def check_files(self) -> None:
        """Takes up what has changed, and warns of a certificate that expires soon."""
        self.refresh()
        days = round(self.days_left, 1)
        if days < WARN_DAYS:
            logs.get().warning(
                "the server's certificate has expired" if days < 0 else "the server's certificate expires soon",
                days=days,
                file=str(self._files.certificate),
                mend="fedplat-server certificates renew",
            )


async def watch(certificates: Certificates | None, listen: str) -> None:
    """Warns now and once an hour of what an operator should mend; ends when it is cancelled."""
    while True:
        if certificates is None:
            logs.get().warning(
                "this server runs WITHOUT TLS: whoever is on the way can read and change everything",
                listen=listen,
                mend="fedplat-server init, and run it without --insecure",
            )
        else:
            await asyncio.to_thread(certificates.check_files)
        await asyncio.sleep(CHECK_S)


def _stamp(files: TlsFiles) -> _Stamp:
    """What changes when one of the files does."""
    found: list[tuple[int, int, int]] = []
    for path in (files.certificate, files.key, files.ca):
        if path is None:
            continue
        try:
            status = path.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)
