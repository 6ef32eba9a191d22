"""The data directory of one client: its lock, and the identity that outlives restarts.

```
<data_dir>/<server>/<population>/lock            held while a process runs as this client
                                 identity.json   who the client is; readable by its owner only
                                 models/         the model cache (fedplat_client.cache)
```
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

from fedplat_client.errors import DataDirectoryError


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a client is. `credential` is secret, and empty before the enrolment."""

    idempotency_key: str
    client_id: str = ""
    credential: str = ""


def default_data_dir() -> Path:
    """Where data goes unless the caller says otherwise, by the customs of the platform."""
    return platformdirs.user_data_path("fedplat")


class DataDirectory:
    """The folder of one client. Raises `DataDirectoryError`, and says what to do."""

    def __init__(self, data_dir: Path, server: str, population: str) -> None:
        self.path = data_dir / _folder_name(server) / _folder_name(population)
        self.models = self.path / "models"
        self._identity = self.path / "identity.json"

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
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

    def identity(self, new_key: Callable[[], str] = lambda: uuid.uuid4().hex) -> Identity:
        """The stored identity; when there is none, a new one that is stored before it is returned.

        So a crash between the first Enroll call and its reply does not enrol twice.
        """
        try:
            content = self._identity.read_bytes()
        except FileNotFoundError:
            identity = Identity(new_key())
            self.save(identity)
            return identity
        except OSError as exc:
            raise DataDirectoryError(f"{self._identity} cannot be read: {exc}; make it readable") from exc
        try:
            identity = msgspec.json.decode(content, type=Identity)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise DataDirectoryError(
                f"{self._identity} is damaged ({exc}); expected the JSON that fedplat-client writes. "
                "Restore it from a backup, or delete it to enrol as a new client"
            ) from exc
        if not identity.idempotency_key:
            raise DataDirectoryError(
                f"{self._identity} is damaged (its idempotency_key is empty); delete it to enrol as a new client"
            )
        return identity

    def save(self, identity: Identity) -> None:
        """Stores the identity; after a crash the file is the old one or the new one, whole."""
        temporary = self._identity.with_suffix(".tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                os.fchmod(file.fileno(), 0o600)  # a leftover may be more open
                file.write(msgspec.json.format(msgspec.json.encode(identity)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._identity)
            sync_folder(self.path)
        except OSError as exc:
            raise DataDirectoryError(
                f"{self._identity} cannot be written: {exc}; free space or make the folder writable"
            ) from exc


def sync_folder(folder: Path) -> None:
    """Makes the renames in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_name(name: str) -> str:
    """A name that no two names share and that leads nowhere else; readable in the usual case."""
    quoted = urllib.parse.quote(name, safe="")
    if not quoted or len(quoted) > 255:
        raise ValueError(f"{name!r} cannot name a server or a population; expected 1 to 255 characters")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted
