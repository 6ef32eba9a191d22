"""The folder DATA_DIR/pki: the server's own certificate authority, for deployments without a PKI, and its certificates.

`ca.pem` has the authorities that clients must trust: the current one and, while it is being replaced, the old one.
`server.pem` has the server's certificate and, in that time, a certificate of the new authority signed by the old one:
so clients that trust only the old one, and clients that trust only the new one, both find a chain that they trust.

`Authority` signs certificates for servers and short-lived ones for clients. Its key stays in the data folder, readable
by its owner only. All TLS keys are ECDSA on P-256: gRPC's TLS library refuses Ed25519 there. Certificates follow RFC
5280; a client certificate has the client's id and the number of the session that requested it, as the common name
(`<id>/<number>`) and as a URI (`fedplat:client:<id>/<number>`). One for a client's own listener is for servers too, and
has the client's DNS name, in a domain that no server is in (`fedplat.wire.auth.peer_host`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedplat import durable
from fedplat.wire import auth
from fedplat_server.config import TlsFiles
from fedplat_server.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_HOSTS = 100
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


@dataclasses.dataclass(frozen=True)
class PkiFolder:
    """The files of a private authority."""

    folder: Path

    @classmethod
    def of(cls, data_dir: Path) -> PkiFolder:
        """Return the folder of a data folder."""
        return cls(data_dir / "pki")

    @property
    def files(self) -> TlsFiles:
        """The files that the daemon reads."""
        return TlsFiles(self.folder / "server.pem", self.folder / "server.key", self.ca)

    @property
    def ca(self) -> Path:
        """The file of certificates to trust, the current authority's first."""
        return self.folder / "ca.pem"

    @property
    def ca_key(self) -> Path:
        """The file of the current authority's key."""
        return self.folder / "ca.key"

    @property
    def _next_key(self) -> Path:
        return self.folder / "ca-next.key"

    def authority(self) -> Authority:
        """Load the current authority; finish a `rotate` that crashed. Raises `ConfigError` if it is unreadable."""
        try:
            return Authority.load(self.ca, self.ca_key)
        except ConfigError:
            if not self._next_key.exists():
                raise
            authority = Authority.load(self.ca, self._next_key)  # `rotate` crashed before its last step
            self._next_key.replace(self.ca_key)
            return authority

    def authority_in_use(self) -> Authority:
        """Load the current authority while another process may be replacing it; changes no file.

        Raises `ConfigError` if it is unreadable.
        """
        with contextlib.suppress(ConfigError):
            return Authority.load(self.ca, self.ca_key)
        with contextlib.suppress(ConfigError):
            return Authority.load(self.ca, self._next_key)
        return Authority.load(self.ca, self.ca_key)  # the replacement has finished since, or a file is broken

    def make_authority(self, now: datetime.datetime) -> bool:
        """Create the authority unless it exists; return whether it was created."""
        if self.ca.exists():
            return False
        authority = Authority.new(now)
        # The certificate is written last, so it implies the key; a key without a certificate is left by a crash.
        replace(self.ca_key, authority.key_pem, 0o600)
        replace(self.ca, certificate_pem(authority.certificate), 0o644)
        return True

    def make_server(self, hosts: Sequence[str], now: datetime.datetime) -> bool:
        """Create the server's key and certificate unless both exist; return whether they were created."""
        if self.files.certificate.exists() and self.files.key.exists():
            return False
        self._sign(self.authority(), hosts, now)
        return True

    def hosts(self) -> list[str]:
        """Return the names and addresses of the server's certificate. Raises `ConfigError` if it is unreadable."""
        return hosts_of(read(self.files.certificate)[0])

    def cross_signed(self) -> list[x509.Certificate]:
        """Return the certificate of the new authority that the old one has signed, while it is being replaced."""
        return read(self.files.certificate)[1:]

    def renew(self, hosts: Sequence[str], now: datetime.datetime) -> None:
        """Create a new key and certificate for the server; keep the cross-signed certificate during a rotation."""
        chain = self.cross_signed()
        self._sign(self.authority(), hosts, now, chain)

    def rotate(self, now: datetime.datetime) -> None:
        """Create a new authority that clients of the old one trust as well.

        Raises `ConfigError` if a rotation is already under way.
        """
        hosts, old = self.hosts(), self.authority()
        if len(read(self.ca)) > 1:
            raise ConfigError(
                "the authority is already being replaced; finish that with: "
                "fedplat-server certificates rotate-ca --finish"
            )
        new = Authority.new(now)
        trusted = certificate_pem(new.certificate) + certificate_pem(old.certificate)
        # In this order, after a crash at any point the server's certificate is trusted and an authority can be loaded.
        replace(self._next_key, new.key_pem, 0o600)
        self._sign(new, hosts, now, [old.cross_sign(new, now)])
        replace(self.ca, trusted, 0o644)
        self._next_key.replace(self.ca_key)

    def finish_rotation(self, now: datetime.datetime) -> None:
        """Remove the old authority: clients that trust only that one can no longer connect.

        Raises `ConfigError` if no rotation is under way.
        """
        trusted = read(self.ca)
        if len(trusted) < 2:
            raise ConfigError("there is no old authority to remove; begin with: fedplat-server certificates rotate-ca")
        self._sign(self.authority(), self.hosts(), now)
        replace(self.ca, certificate_pem(trusted[0]), 0o644)

    def _sign(
        self, authority: Authority, hosts: Sequence[str], now: datetime.datetime, chain: Sequence[x509.Certificate] = ()
    ) -> None:
        key = new_key()
        certificate = authority.for_server(hosts, key.public_key(), now)
        replace(self.files.key, key_pem(key), 0o600)
        replace(self.files.certificate, b"".join(map(certificate_pem, [certificate, *chain])), 0o644)


def all_hosts(hosts: Sequence[str]) -> list[str]:
    """Return these hosts and the loopback ones. Raises `ConfigError` for an invalid host, or more than `MAX_HOSTS`."""
    for host in hosts:
        if not (_NAME.fullmatch(host) or _is_address(host)):
            raise ConfigError(f"--host {host[:80]!r}: expected a host name or an address, without a port")
    if len(hosts) > MAX_HOSTS:
        raise ConfigError(f"{len(hosts)} times --host; expected at most {MAX_HOSTS}")
    return list(dict.fromkeys([*hosts, *LOOPBACK]))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def read(path: Path) -> list[x509.Certificate]:
    """Read the certificates of a PEM file. Raises `ConfigError` if it is unreadable."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc.strerror}; check --data-dir, or create it: fedplat-server init"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}; let the user of the server read it") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} holds no certificates in PEM: {exc}") from exc


def replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically. Raises `ConfigError` if that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.write_bytes(path, content, mode)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
CLOCK_SKEW = datetime.timedelta(hours=1)
"""Certificates are valid from this long before they are signed: clocks of edge devices are often wrong."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key for TLS."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM (PKCS #8), not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


class Authority:
    """A certificate authority: its certificate and signing key."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def new(cls, now: datetime.datetime) -> Authority:
        """Return a new authority, valid for ten years."""
        key, name = new_key(), _name("fedplat private CA")
        builder = _builder(name, name, key.public_key(), now, datetime.timedelta(days=AUTHORITY_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return cls(builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: Path, key: Path) -> Authority:
        """Read an authority from PEM files. Raises `ConfigError` if they are unreadable or do not match."""
        try:
            loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
            authority = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (OSError, ValueError) as exc:
            raise ConfigError(f"the certificate authority {certificate} cannot be read: {exc}") from exc
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != authority.public_key():
            raise ConfigError(f"the key {key} does not belong to the certificate {certificate}")
        return cls(authority, loaded)

    @property
    def key_pem(self) -> bytes:
        """The signing key, as PEM."""
        return key_pem(self._key)

    def cross_sign(self, other: Authority, now: datetime.datetime) -> x509.Certificate:
        """Return a certificate for `other`, signed by this authority: peers that trust this one then trust both.

        Both have the same name, so that the path length of RFC 5280, section 4.2.1.9, does not count it.
        """
        validity = self.certificate.not_valid_after_utc - now
        subject, public_key = other.certificate.subject, other._key.public_key()
        builder = _builder(subject, self.certificate.subject, public_key, now, validity)
        for extension in other.certificate.extensions:
            builder = builder.add_extension(extension.value, critical=extension.critical)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())

    def for_server(
        self,
        hosts: Sequence[str],
        public_key: ec.EllipticCurvePublicKey,
        now: datetime.datetime,
        valid: datetime.timedelta = datetime.timedelta(days=SERVER_DAYS),
    ) -> x509.Certificate:
        """Return a certificate for a server with these host names and addresses."""
        builder = _builder(_name(hosts[0]), self.certificate.subject, public_key, now, valid)
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        return self._leaf(builder, ExtendedKeyUsageOID.SERVER_AUTH)

    def for_client(
        self,
        name: str,
        public_key: ec.EllipticCurvePublicKey,
        now: datetime.datetime,
        valid: datetime.timedelta,
        *,
        listener: bool = False,
    ) -> x509.Certificate:
        """Return a certificate for a client, and for its own listener if `listener`; `name` is `<id>/<number>`."""
        builder = _builder(_name(name), self.certificate.subject, public_key, now, valid)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(auth.client_uri(name))]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if listener:
            names.append(x509.DNSName(auth.peer_host(name.partition("/")[0])))
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return self._leaf(builder, *usages)

    def _leaf(self, builder: x509.CertificateBuilder, *usages: x509.ObjectIdentifier) -> x509.Certificate:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    valid: datetime.timedelta,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer_name=issuer, subject_name=subject, public_key=public_key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + valid)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
