"""The server's own certificate authority, for deployments without a PKI.

`Authority` signs certificates for servers and short-lived ones for clients. Its key stays in the data folder, readable
by its owner only. All TLS keys are ECDSA on P-256: gRPC's TLS library refuses Ed25519 there. Certificates follow RFC
5280; a client certificate has the client's id and the number of the session that requested it, as the common name
(`<id>/<number>`) and as a URI (`fedplat:client:<id>/<number>`). One for a client's own listener is for servers too, and
has the client's DNS name, in a domain that no server is in (`fedplat.wire.auth.peer_host`).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedplat.wire import auth
from fedplat_server.errors import ConfigError

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
