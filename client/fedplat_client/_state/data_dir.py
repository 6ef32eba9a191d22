"""The data directory of one client: its lock, its keys, and the identity that survives restarts.

```
<data_dir>/<server>/<population>/lock            held while a process runs as this client
                                 identity.json   the client's ID, and how to reach and trust its server
                                 identity.key    its private key, which never leaves this folder
                                 tls.key         its TLS key, if it uses certificates (fedplat_client._auth.mtls)
                                 models/         the model cache (fedplat_client._state.model_cache)
                                 residuals/      the codecs' residuals (fedplat_client._state.two_phase)
                                 memories/       the client states (fedplat_client._state.two_phase)
                                 released.jsonl  what has left the client (fedplat_client._state.released)
                                 approvals.json  what its owner has decided of jobs (fedplat_client._state.approvals)
                                 policy.toml     what its owner has decided beforehand (fedplat.job.policy)
                                 offers/         the files of jobs that the server has offered
                                 silos/          the models of decentralised jobs (fedplat_client._state.silo_store)
                                 tasks/          the task folders of programs (fedplat_client.trainers.external)
           exports/              the models with which decentralised jobs have ended, for the client's owner
                                 served          attempts of secure aggregations (fedplat_client._state.two_phase)
           privacy.json          the privacy ledger, for all servers (fedplat_client._state.privacy_ledger)
```
Files are readable by their owner only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.parse
import uuid
from collections.abc import Generator
from pathlib import Path

import msgspec
import platformdirs
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from fedplat import durable, forks, system
from fedplat.config.decoding import prepare_type
from fedplat.wire.auth import Ticket
from fedplat_client.errors import DataDirectoryError, DataDirectoryInUseError

_logger = logging.getLogger("fedplat_client")


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A client's identity: `client_id` is empty before the enrollment. `tls`, `ca` and `http` come from the ticket."""

    idempotency_key: str
    server: str
    population: str
    client_id: str = ""
    tls: bool = False
    ca: str = ""
    http: str = ""


def default_data_dir() -> Path:
    """Return the platform's folder for user data. Raises `DataDirectoryError` for a user without a home directory."""
    try:
        return platformdirs.user_data_path("fedplat")
    except RuntimeError as exc:  # neither HOME nor an entry in /etc/passwd, as in some containers
        raise DataDirectoryError(
            "there is no place for this client's data, since this user has no home directory: name a folder with "
            "--data-dir (in a program: data_dir=...), or set HOME"
        ) from exc


def resolve_data_dir(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return the data directory as an absolute path; None: the default. Raises `DataDirectoryError`."""
    if data_dir is None:
        return default_data_dir()
    try:
        return Path(data_dir).expanduser().absolute()  # a trainer may change the current folder
    except RuntimeError as exc:
        raise DataDirectoryError(
            f"the data directory {os.fspath(data_dir)} begins with ~, and that home directory is not known: write the "
            "whole path"
        ) from exc


def find_identity(data_dir: Path) -> Identity:
    """Return the only identity in a data directory. Raises `DataDirectoryError` unless there is exactly one."""
    paths = sorted(data_dir.glob("*/*/identity.json"))
    if len(paths) != 1:
        count = f"{len(paths)} identities" if paths else "no identity"
        raise DataDirectoryError(
            f"the data directory {data_dir} has {count}; expected one. "
            "Pass a ticket (--ticket-file or FEDPLAT_TICKET), or server and population"
        )
    return _read(paths[0])


class DataDirectory:
    """The folder of one client. Raises `DataDirectoryError`; its message describes the remedy."""

    def __init__(self, data_dir: Path, server: str, population: str) -> None:
        self.path = data_dir / _folder_name(server) / _folder_name(population)
        self.models = self.path / "models"
        self.residuals = self.path / "residuals"
        self.client_states = self.path / "memories"
        self.silos = self.path / "silos"
        self.tasks = self.path / "tasks"
        self.exports = data_dir / "exports"
        self.served = self.path / "served"
        self.released = self.path / "released.jsonl"
        self.approvals = self.path / "approvals.json"
        self.policy = self.path / "policy.toml"
        self.offers = self.path / "offers"
        self.transport = self.path / "transport.json"
        self.privacy = data_dir / "privacy.json"
        self._server = server
        self._population = population
        self._identity = self.path / "identity.json"
        self._key = self.path / "identity.key"
        self._tls_key = self.path / "tls.key"

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Create the folder and hold its lock, which excludes every other process."""
        try:
            for folder in (*reversed(self.path.parents[:2]), self.path):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | system.O_BINARY, 0o600)
        except OSError as exc:
            raise DataDirectoryError(
                f"the data directory {self.path} cannot be used: {exc}; choose one that this user may write to"
            ) from exc
        with forks.keep_descriptor(lock):  # its end frees the lock
            try:
                system.lock(lock, wait=False)
            except BlockingIOError as exc:
                raise DataDirectoryInUseError(
                    f"the data directory {self.path} is in use by another client; stop that client, or use another "
                    "data directory for this one: Client(..., data_dir=FOLDER) or --data-dir FOLDER"
                ) from exc
            except OSError as exc:
                raise DataDirectoryError(
                    f"the data directory {self.path} cannot be locked: {exc}; choose one on a file system with locks"
                ) from exc
            yield

    def load_identity(self, ticket: Ticket | None = None) -> Identity:
        """Return the stored identity, or store and return a new one.

        The identity is stored first, so a crash between the first Enroll call and its reply does not enroll twice. A
        ticket updates how the client reaches and trusts the server, except that it cannot remove TLS: raises
        `DataDirectoryError` for such a ticket.
        """
        try:
            identity = _read(self._identity)
        except FileNotFoundError:
            self._set_key_aside()
            identity = Identity(uuid.uuid4().hex, self._server, self._population)
            self._save_with(identity, ticket)
            return self.load_identity()
        if ticket is not None and identity.tls and not ticket.tls:
            raise DataDirectoryError(
                f"the ticket is for {self._server} without TLS, and this client has used TLS with it; expected a "
                "ticket with TLS, so that no other host can impersonate the server. If its operator has switched TLS "
                f"off, delete {self._identity} to enroll as a new client"
            )
        if ticket is not None and (identity.tls, identity.ca, identity.http) != (ticket.tls, ticket.ca, ticket.http):
            self._save_with(identity, ticket)
            return self.load_identity()
        return identity

    def load_signing_key(self, identity: Identity) -> SigningKey:
        """Return the private key; before the enrollment, create and store it if necessary."""
        try:
            if not identity.client_id and not self._key.exists():
                self._write(self._key, new_signing_key())
            return SigningKey(self._key.read_bytes())
        except OSError as exc:
            raise DataDirectoryError(
                f"{self._key} cannot be read: {exc}. Restore it from a backup, "
                f"or delete {self._identity} to enroll as a new client"
            ) from exc
        except ValueError as exc:
            raise DataDirectoryError(
                f"{self._key} is damaged ({exc}). Restore it from a backup, "
                f"or delete {self._identity} to enroll as a new client"
            ) from exc

    def load_own_key(self, ticket: Ticket | None = None) -> SigningKey:
        """Return the client's key, also while the client runs; before its first start, create its identity."""
        if self._identity.exists() and self._key.exists():
            return self.load_signing_key(_read(self._identity))
        with self.lock():
            return self.load_signing_key(self.load_identity(ticket))

    def load_tls_key(self) -> bytes:
        """Return the private key for TLS, PEM; create and store it if necessary.

        It does not identify the client: it may be deleted at any time.
        """
        try:
            if not self._tls_key.exists():
                self._write(self._tls_key, new_tls_key())
            return self._tls_key.read_bytes()
        except OSError as exc:
            raise DataDirectoryError(f"{self._tls_key} cannot be read: {exc}; delete it to get another one") from exc

    def save(self, identity: Identity) -> None:
        """Store the identity atomically: after a crash the file has either the old content or the new one."""
        self._write(self._identity, msgspec.json.format(msgspec.json.encode(identity)) + b"\n")

    def _set_key_aside(self) -> None:
        """Give the key of a lost identity another name: the identity may come back from a backup."""
        aside = self._key.with_name(f"{self._key.name}.{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(FileNotFoundError):
            self._key.replace(aside)
            _logger.warning(
                "%s is missing, so this is a new client. To be the former one again, restore that file and rename %s "
                "to %s.",
                self._identity,
                aside,
                self._key.name,
            )

    def _save_with(self, identity: Identity, ticket: Ticket | None) -> None:
        if ticket is not None:
            identity = msgspec.structs.replace(identity, tls=ticket.tls, ca=ticket.ca, http=ticket.http)
        self.save(identity)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            durable.write_bytes(path, content)
        except OSError as exc:
            raise DataDirectoryError(
                f"{path} cannot be written: {exc}; free space or make the folder writable"
            ) from exc


def _read(path: Path) -> Identity:
    """Read an identity. Raises `FileNotFoundError` if the file does not exist, else `DataDirectoryError`."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise DataDirectoryError(f"{path} cannot be read: {exc}; make it readable") from exc
    try:
        identity = msgspec.json.decode(content, type=prepare_type(Identity))
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise DataDirectoryError(
            f"{path} is damaged ({exc}); expected the JSON that fedplat-client writes. "
            "Restore it from a backup, or delete it to enroll as a new client"
        ) from exc
    if not identity.idempotency_key:
        raise DataDirectoryError(
            f"{path} is damaged (its idempotency_key is empty); delete it to enroll as a new client"
        )
    return identity


def _folder_name(name: str) -> str:
    """Encode a name as one path component: unique, unable to escape the folder, and readable in the usual case."""
    quoted = urllib.parse.quote(name, safe="")
    if not quoted or len(quoted) > 255:
        raise ValueError(f"{name!r} is not a valid server or population name; expected 1 to 255 characters")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted


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
