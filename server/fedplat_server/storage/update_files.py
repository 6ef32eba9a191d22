"""The folder of the spool, and what it has for each assignment: a file, its writer, and what an earlier life left."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from fedplat import durable
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server import crash_points
from fedplat_server.errors import UploadError
from fedplat_server.storage.spool_file import OpenUpload, SpoolFile, discard, name_attempt, name_update, spool_path_of


class UpdateFiles:
    """The updates that are needed, and their files. All methods but the first four are called with the lock held."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()  # taken before the lock of a file, never after
        self.files: dict[AssignmentId, SpoolFile] = {}
        self.writers: dict[SpoolFile, OpenUpload] = {}
        self._folder = folder
        self._needed: dict[AttemptKey, set[str]] = {}  # client ids; after the start, changed on the event loop only
        self._leftovers: dict[str, list[Path]] = {}  # files of an earlier process, by `name_update`

    @property
    def has_leftovers(self) -> bool:
        """Return whether files of an earlier process may have to be removed."""
        return bool(self._leftovers)

    def expect(self, key: AssignmentId) -> None:
        """Start to accept an update."""
        self._needed.setdefault(key.attempt, set()).add(key.client_id)

    def forget(self, key: AssignmentId) -> bool:
        """Stop expecting an update; return whether it was expected."""
        clients = self._needed.get(key.attempt, set())
        if key.client_id not in clients:
            return False
        clients.remove(key.client_id)
        if not clients:
            del self._needed[key.attempt]
        return True

    def is_needed(self, key: AssignmentId) -> bool:
        """Return whether an update is expected."""
        return key.client_id in self._needed.get(key.attempt, ())

    def has_needed(self, attempt: AttemptKey) -> bool:
        """Return whether any update of an attempt is expected."""
        return attempt in self._needed

    def keep(self, folder: Path, names: set[str]) -> None:
        """Remember the files of needed updates (by `name_update`) in an attempt's folder, and remove the others."""
        for path in folder.iterdir():
            name = path.name.partition("-")[0]
            if name in names:
                self._leftovers.setdefault(name, []).append(path)
            else:
                path.unlink()

    def find_earlier(self, key: AssignmentId, name: str) -> SpoolFile | None:
        """Return what an assignment has, which an update of this name may replace.

        Raises `UploadError` if the assignment has ended, or if an update with another name was sealed for it.
        """
        if not self.is_needed(key):
            raise UploadError("the assignment has ended")
        earlier = self.files.get(key)
        if earlier is not None and earlier.sealed and not earlier.is_named(name):
            raise UploadError(f"the update {earlier.digest} was reported for this assignment already")
        return earlier

    def write(self, key: AssignmentId, digest: str, content: bytes) -> SpoolFile:
        """Write the file of a complete update."""
        self.make_folder(key.attempt)
        path = spool_path_of(self._folder, key, digest)
        path.write_bytes(content)
        path.chmod(0o600)
        return SpoolFile(path, digest)

    def adopt(self, key: AssignmentId, digest: str, path: Path) -> None:
        """Move a file with a durable copy elsewhere into the folder of its attempt."""
        self.make_folder(key.attempt)
        file = self.files[key] = SpoolFile(path.rename(spool_path_of(self._folder, key, digest)), digest)
        file.durable = True

    def remove(self, key: AssignmentId) -> None:
        """Remove all that an assignment has."""
        for path in self._leftovers.pop(name_update(key), []):
            path.unlink(missing_ok=True)
        file = self.files.pop(key, None)
        if file is not None:
            discard(file, self.writers)

    def make_folder(self, attempt: AttemptKey) -> None:
        """Create the folder of an attempt durably, if it does not exist."""
        folder = self._folder / name_attempt(attempt)
        if folder.exists():
            return
        with crash_points.step("spool.new_folder"):
            folder.mkdir()
            try:
                durable.sync(self._folder)
            except BaseException:
                folder.rmdir()
                raise

    def remove_folder(self, attempt: AttemptKey) -> None:
        """Remove the folder of an attempt that has ended, if it exists."""
        folder = self._folder / name_attempt(attempt)
        if folder.exists():
            with crash_points.step("spool.discard"):
                shutil.rmtree(folder)
