"""The client's keys: Ed25519, by which the server knows it, and ECDSA on P-256 for TLS, which takes no Ed25519."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes


def new_signing_key() -> bytes:
    """A fresh Ed25519 key, PEM (PKCS #8)."""
    return _pem(ed25519.Ed25519PrivateKey.generate())


def new_tls_key() -> bytes:
    """A fresh key for TLS, PEM (PKCS #8)."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


def signing_request(tls_key: bytes) -> bytes:
    """A request for a certificate (PKCS #10, DER); the server chooses the name in it. Raises `ValueError`."""
    key = _load_key(tls_key)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("it is no ECDSA key")
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


class SigningKey:
    """What the client signs with. Raises `ValueError` if the PEM holds no Ed25519 key."""

    def __init__(self, pem: bytes) -> None:
        key = _load_key(pem)
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ValueError("it is no Ed25519 key")
        self._key = key

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, payload: bytes) -> bytes:
        """A signature, 64 bytes."""
        return self._key.sign(payload)


def _load_key(pem: bytes) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (TypeError, UnsupportedAlgorithm) as exc:  # encrypted, or of an unknown kind
        raise ValueError("it is no plain private key") from exc


def _pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
