"""Client certificates: signs them for authenticated clients, and reads them from TLS connections."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedplat.wire import auth
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.auth.tls import utc_now
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError

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


class PeerCertificates:
    """Reads the client from the certificate of a connection.

    TLS has verified the signature. The expiry is checked again for each call: connections outlive certificates.
    """

    def __init__(self, now: Callable[[], datetime.datetime] = utc_now) -> None:
        self._now = now
        self._cache: OrderedDict[bytes, tuple[str, datetime.datetime]] = OrderedDict()

    def client_of(self, context: Any) -> str:
        """Return the client of the connection's certificate, as `<id>/<number>`.

        Empty on a port that requires no certificate. Raises `RefusedError` if the certificate names no client or has
        expired.
        """
        chain: Sequence[bytes] = context.auth_context().get("x509_pem_cert", ())
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
