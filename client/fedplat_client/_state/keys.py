"""The client's keys: Ed25519, to identify it to the server, and ECDSA (P-256) for gRPC's TLS, which lacks Ed25519."""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes


def new_signing_key() -> bytes:
    """Return a new Ed25519 key, PEM (PKCS #8)."""
    return _pem(ed25519.Ed25519PrivateKey.generate())


def new_tls_key() -> bytes:
    """Return a new ECDSA P-256 key for TLS, PEM (PKCS #8)."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


def make_signing_request(tls_key: bytes) -> bytes:
    """Return a certificate signing request (PKCS #10, DER); the server chooses its name. Raises `ValueError`."""
    from cryptography import x509  # most clients have no certificate

    key = _load_key(tls_key)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an ECDSA key")
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


class SigningKey:
    """The Ed25519 key that the client signs with. Raises `ValueError` if the PEM contains another key."""

    def __init__(self, pem: bytes) -> None:
        key = _load_key(pem)
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ValueError("not an Ed25519 key")
        self._key = key

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, payload: bytes) -> bytes:
        """Return the signature of a payload, 64 bytes."""
        return self._key.sign(payload)


def _load_key(pem: bytes) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (TypeError, UnsupportedAlgorithm) as exc:  # encrypted, or of an unknown kind
        raise ValueError("not an unencrypted private key") from exc


def _pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
