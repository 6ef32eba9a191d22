"""The server's certificates while it runs, reloaded without a restart, and the certificates of clients.

Open streams and rounds continue. If the files are broken, expired or do not match each other, the server keeps the
certificates that it has and logs an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedplat.wire import auth
from fedplat_server import config, logs
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.database.records import ClientRecord
from fedplat_server.errors import Code, ConfigError, RefusedError

WARN_DAYS = 14
CHECK_S = 3600.0
"""How often the expiry is checked, and warnings are repeated."""
_Stamp = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class LoadedCertificate:
    """The checked content of the certificate files."""

    certificate: bytes
    key: bytes = dataclasses.field(repr=False)
    ca: bytes | None
    expires: datetime.datetime

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificates as gRPC accepts them."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], root_certificates=self.ca)


def _read_chain(path: Path, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as exc:
        raise ConfigError(f"{path} holds no certificates in PEM; expected -----BEGIN CERTIFICATE-----") from exc


def load(files: config.TlsFiles, now: datetime.datetime) -> LoadedCertificate:
    """Read and check the files. Raises `ConfigError` if they are unreadable, expired or do not match each other."""
    try:
        certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
        ca = files.ca.read_bytes() if files.ca is not None else None
    except OSError as exc:
        raise ConfigError(f"the server's certificates cannot be read: {exc.filename}: {exc.strerror}") from exc
    chain = _read_chain(files.certificate, certificate)
    if files.ca is not None and ca is not None:
        _read_chain(files.ca, ca)
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as exc:  # its text may quote the key
        raise ConfigError(f"{files.key} holds no private key in PEM without a password") from exc
    if private.public_key() != chain[0].public_key():
        raise ConfigError(f"the key {files.key} does not belong to the certificate {files.certificate}")
    expires = chain[0].not_valid_after_utc
    if expires <= now:
        raise ConfigError(f"the certificate {files.certificate} expired {expires:%Y-%m-%d %H:%M} UTC; {files.advice}")
    return LoadedCertificate(certificate, key, ca, expires)


def utc_now() -> datetime.datetime:
    """Return the wall-clock time: certificates are valid by no other clock."""
    return datetime.datetime.now(datetime.UTC)


class Certificates:
    """The certificates for handshakes. The constructor loads them, and raises `ConfigError` as `load` does."""

    def __init__(self, files: config.TlsFiles, clock: Callable[[], datetime.datetime] = utc_now) -> None:
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()  # gRPC calls `refresh` in its own threads
        self._stamp = _stamp(files)
        self._reported = self._stamp
        self._suspect: _Stamp | None = None
        self.loaded = load(files, clock())

    @property
    def renewal(self) -> str:
        """The command that renews the certificate; "" if its files are the owner's own."""
        return self._files.renewal

    @property
    def days_left(self) -> float:
        """Days until the certificate expires; negative when it has."""
        return (self.loaded.expires - self._clock()).total_seconds() / 86_400

    def credentials(self, *, mutual: bool = False) -> grpc.ServerCredentials:
        """Return credentials for one port, which call `refresh` at every handshake.

        `mutual`: clients must present a certificate signed by `ca`.
        """
        current = self.loaded  # the certificates of this port: another port or `check_files` may load new ones first

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal current
            self.refresh()
            if self.loaded is current:
                return None
            current = self.loaded
            return current.configuration()

        # None means "keep the current configuration"; gRPC's type annotations lack it.
        return grpc.dynamic_ssl_server_credentials(current.configuration(), cast(Any, fetch), mutual)

    def make_context(self) -> ssl.SSLContext:
        """Return a context for a port of HTTP/1.1, with the files as they are now. Raises `OSError` or `SSLError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._files.certificate, self._files.key)
        return context

    def refresh(self) -> bool:
        """Load the files if they have changed; return whether new certificates were loaded."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return False
            try:
                loaded = load(self._files, self._clock())
            except ConfigError as exc:
                # Files that are replaced one after the other briefly do not match: it is an error if that persists.
                if stamp == self._suspect and stamp != self._reported:
                    self._reported = stamp
                    logs.get().error("cannot load the changed certificates; keeping the old ones", error=str(exc))
                self._suspect = stamp
                return False
            self.loaded, self._stamp = loaded, stamp
        logs.get().info("loaded new certificates", expires=loaded.expires.isoformat())
        return True

    def check_files(self) -> None:
        """Load changed files, and warn if the certificate expires soon."""
        self.refresh()
        days = round(self.days_left, 1)
        if days < WARN_DAYS:
            logs.get().warning(
                "the server's certificate has expired" if days < 0 else "the server's certificate expires soon",
                days=days,
                file=str(self._files.certificate),
                mend=self._files.advice,
            )


async def watch(certificates: Certificates | None, listen: str) -> None:
    """Warn now and once an hour about an expiring certificate or missing TLS, until cancelled."""
    while True:
        if certificates is None:
            logs.get().warning(
                "this server runs WITHOUT TLS: anyone on the network path can read and change all traffic",
                listen=listen,
                mend="fedplat-server init, and run it without --insecure",
            )
        else:
            await asyncio.to_thread(certificates.check_files)
        await asyncio.sleep(CHECK_S)


def _stamp(files: config.TlsFiles) -> _Stamp:
    """Return the inode, size and modification time of each file: a value that changes when a file does."""
    parts: list[tuple[int, int, int]] = []
    for path in (files.certificate, files.key, files.ca):
        if path is None:
            continue
        try:
            status = path.stat()
            parts.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            parts.append((0, 0, 0))
    return tuple(parts)


VALID = datetime.timedelta(hours=24)
MAX_REQUEST_BYTES = 8192
_CACHE_SIZE = 10_000


class IssuedCertificate(NamedTuple):
    """A client's certificate, and the authorities that sign clients' certificates; both PEM.

    While an authority is being replaced, the certificate is followed by that of the new authority, signed by the old
    one: peers that do not know the new authority yet trust it, too.
    """

    certificate: str
    authorities: str


class CertificateIssuer:
    """Signs client certificates with the current authority of a folder; refuses all if `folder` is None."""

    def __init__(
        self,
        folder: PkiFolder | None,
        valid: datetime.timedelta = VALID,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        self._folder = folder
        self.valid = valid
        self._now = now

    def issue(self, client: ClientRecord, signing_request: bytes, *, listener: bool = False) -> IssuedCertificate:
        """Return a certificate for a client's current session, for the key of the signing request (DER).

        It is also for the client's own listener if `listener`. Raises `RefusedError` if there is no authority or the
        request is invalid.
        """
        if self._folder is None:
            raise RefusedError(Code.NO_CERTIFICATES)
        key = _requested_key(signing_request)
        name = f"{client.client_id}/{client.session_number}"
        authority = self._folder.authority_in_use()
        certificate = authority.for_client(name, key, self._now(), self.valid, listener=listener)
        trusted = pki_folder.read(self._folder.ca)
        chain = [certificate, *self._folder.cross_signed()] if len(trusted) > 1 else [certificate]
        return IssuedCertificate(_pem(chain), _pem(trusted))


def _pem(certificates: Sequence[x509.Certificate]) -> str:
    return b"".join(map(pki_folder.certificate_pem, certificates)).decode()


def _requested_key(signing_request: bytes) -> ec.EllipticCurvePublicKey:
    if len(signing_request) > MAX_REQUEST_BYTES:
        raise RefusedError(Code.INVALID_REQUEST, f"the signing request has more than {MAX_REQUEST_BYTES} bytes")
    try:
        request = x509.load_der_x509_csr(signing_request)
        key = request.public_key()
        is_proven = request.is_signature_valid
    except ValueError as exc:
        raise RefusedError(Code.INVALID_REQUEST, "the signing request is not PKCS #10 in DER") from exc
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError(Code.INVALID_REQUEST, "the key must be ECDSA on the curve P-256")
    if not is_proven:
        raise RefusedError(Code.INVALID_REQUEST, "the signing request is not signed with its own key")
    return key


class Verified(Protocol):
    """What shows what TLS has proven of a caller."""

    def auth_context(self) -> Mapping[str, Any]:
        """Return the properties that TLS has verified."""
        ...


class PeerCertificates:
    """Reads the client from the certificate of a connection.

    TLS has verified the signature. The expiry is checked again for each call: connections outlive certificates. Unless
    a port is `required` to have certificates, no caller is asked for one, and no call pays for looking.
    """

    def __init__(self, now: Callable[[], datetime.datetime] = utc_now, *, required: bool = True) -> None:
        self._now = now
        self._required = required
        self._cache: OrderedDict[bytes, tuple[str, datetime.datetime]] = OrderedDict()

    def client_of(self, context: Verified) -> str:
        """Return the client of the connection's certificate, as `<id>/<number>`.

        Empty on a port that requires no certificate. Raises `RefusedError` if the certificate names no client or has
        expired.
        """
        chain: Sequence[bytes] = context.auth_context().get("x509_pem_cert", ()) if self._required else ()
        return self._client(chain[0]) if chain else ""

    def _client(self, certificate: bytes) -> str:
        if certificate not in self._cache:
            self._cache[certificate] = _read(certificate)
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        name, expires = self._cache[certificate]
        if self._now() >= expires:
            raise RefusedError(Code.CERTIFICATE_EXPIRED, f"it was valid until {expires:%Y-%m-%d %H:%M:%S} UTC")
        return name


def _read(certificate: bytes) -> tuple[str, datetime.datetime]:
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as exc:
        raise RefusedError(Code.CERTIFICATE_UNKNOWN) from exc
    found = [auth.parse_client_uri(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
    if len(found) != 1 or found[0] is None:
        raise RefusedError(Code.CERTIFICATE_UNKNOWN)
    return found[0], loaded.not_valid_after_utc
