"""The data directory of one client: its lock, and the identity that outlives restarts.

```
<data_dir>/<server>/<population>/lock            held while a process runs as this client
                                 identity.json   who the client is, and how it knows its server
                                 identity.key    its private key, which never leaves this folder
                                 tls.key         its key for TLS, if it shows certificates (fedplat_client._auth.mtls)
                                 models/         the model cache (fedplat_client._state.model_cache)
                                 residuals/      what codecs have left out (fedplat_client._state.residuals)
                                 memories/       what trainers remember (fedplat_client._state.client_state)
           privacy.json          what was told of single examples, of all servers (fedplat_client._state.privacy_ledger)
```
Files are readable by their owner only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import urllib.parse
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec
import platformdirs

from fedplat import durable
from fedplat.auth import Ticket
from fedplat_client._state.keys import SigningKey, new_signing_key, new_tls_key
from fedplat_client.errors import DataDirectoryError


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a client is: `client_id` is empty before the enrollment. `tls` and `ca` are those of the ticket."""

    idempotency_key: str
    server: str
    population: str
    client_id: str = ""
    tls: bool = False
    ca: str = ""


def default_data_dir() -> Path:
    """Where data goes unless the caller says otherwise, by the customs of the platform."""
    return platformdirs.user_data_path("fedplat")


def find_identity(data_dir: Path) -> Identity:
    """The only identity of a data directory. Raises `DataDirectoryError` if there are none or several."""
    found = sorted(data_dir.glob("*/*/identity.json"))
    if len(found) != 1:
        have = f"{len(found)} identities" if found else "no identity"
        raise DataDirectoryError(
            f"the data directory {data_dir} has {have}; expected one. "
            "Give a ticket (--ticket-file or FEDPLAT_TICKET), or name server and population"
        )
    return _read(found[0])


class DataDirectory:
    """The folder of one client. Raises `DataDirectoryError`, and says what to do."""

    def __init__(self, data_dir: Path, server: str, population: str) -> None:
        self.path = data_dir / _folder_name(server) / _folder_name(population)
        self.models = self.path / "models"
        self.residuals = self.path / "residuals"
        self.memories = self.path / "memories"
        self.privacy = data_dir / "privacy.json"
        self._server = server
        self._population = population
        self._identity = self.path / "identity.json"
        self._key = self.path / "identity.key"
        self._tls_key = self.path / "tls.key"

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Makes the folder and keeps every other process out of it."""
        try:
            for folder in (*reversed(self.path.parents[:2]), self.path):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise DataDirectoryError(
                f"the data directory {self.path} cannot be used: {exc}; give one that this user may write to"
            ) from exc
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise DataDirectoryError(
                    f"the data directory {self.path} is in use by another client; "
                    "stop that one, or give this one a data directory of its own"
                ) from exc
            yield
        finally:
            os.close(lock)  # also frees the lock

    def identity(self, ticket: Ticket | None = None, new_key: Callable[[], str] = lambda: uuid.uuid4().hex) -> Identity:
        """The stored identity; when there is none, a new one that is stored before it is returned.

        So a crash between the first Enroll call and its reply does not enroll twice. A ticket says how the server is
        known from now on, except that it cannot take TLS away: raises `DataDirectoryError` for such a ticket.
        """
        try:
            identity = _read(self._identity)
        except FileNotFoundError:
            self._key.unlink(missing_ok=True)  # of an identity that is gone: nobody knows it
            identity = Identity(new_key(), self._server, self._population)
            self._save_with(identity, ticket)
            return self.identity()
        if ticket is not None and identity.tls and not ticket.tls:
            raise DataDirectoryError(
                f"the ticket names {self._server} without TLS, and this client knows it with TLS; expected a ticket "
                "with TLS, so that no other host can stand for the server. If its operator has switched TLS off, "
                f"delete {self._identity} to enroll as a new client"
            )
        if ticket is not None and (identity.tls, identity.ca) != (ticket.tls, ticket.ca):
            self._save_with(identity, ticket)
            return self.identity()
        return identity

    def signing_key(self, identity: Identity) -> SigningKey:
        """The private key; before the enrollment a new one, if there is none, which is stored before it is returned."""
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

    def tls_key(self) -> bytes:
        """The private key for TLS, PEM; a new one, if there is none, which is stored before it is returned.

        Nobody knows the client by it: it may be deleted at any time.
        """
        try:
            if not self._tls_key.exists():
                self._write(self._tls_key, new_tls_key())
            return self._tls_key.read_bytes()
        except OSError as exc:
            raise DataDirectoryError(f"{self._tls_key} cannot be read: {exc}; delete it to get another one") from exc

    def save(self, identity: Identity) -> None:
        """Stores the identity; after a crash the file is the old one or the new one, whole."""
        self._write(self._identity, msgspec.json.format(msgspec.json.encode(identity)) + b"\n")

    def _save_with(self, identity: Identity, ticket: Ticket | None) -> None:
        if ticket is not None:
            identity = msgspec.structs.replace(identity, tls=ticket.tls, ca=ticket.ca)
        self.save(identity)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            durable.write_bytes(path, content)
        except OSError as exc:
            raise DataDirectoryError(
                f"{path} cannot be written: {exc}; free space or make the folder writable"
            ) from exc


def _read(path: Path) -> Identity:
    """Raises `FileNotFoundError` when there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise DataDirectoryError(f"{path} cannot be read: {exc}; make it readable") from exc
    try:
        identity = msgspec.json.decode(content, type=Identity)
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
    """A name that no two names share and that leads nowhere else; readable in the usual case."""
    quoted = urllib.parse.quote(name, safe="")
    if not quoted or len(quoted) > 255:
        raise ValueError(f"{name!r} cannot name a server or a population; expected 1 to 255 characters")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted
