"""A disk that forgets what was not synced: the data folder is real, and `fail` sets it back as a power failure may.

What is durable is recorded at each `os.fsync`: the bytes of a file, or the names in a folder. At a failure each change
since then is drawn on its own: a name is there or not, a file has its old bytes, its new ones, or a part of them. The
database is left alone: SQLite syncs by itself, in C.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

DATABASE = "fedplat.sqlite"
SECTOR_BYTES = 512


class Disk:
    """The durable content of a folder: the bytes of files and the entries of folders, by inode."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self._bytes: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self.happened: Counter[str] = Counter()

    def begin(self) -> None:
        """Makes all that is there durable."""
        for folder, _, names in os.walk(self._root):
            self._note_folder(folder)
            for name in names:
                if not name.startswith(DATABASE):
                    self._note_file(os.path.join(folder, name))

    def install(self, before: Callable[[], None]) -> None:
        """Takes the place of `os.fsync`; `before` is called first."""

        def sync(descriptor: int) -> None:
            before()
            self.sync(descriptor)

        os.fsync = os.fdatasync = sync  # pyright: ignore[reportAttributeAccessIssue]

    def sync(self, descriptor: int) -> None:
        """Makes a file or a folder durable as it is."""
        self.happened["syncs"] += 1
        path = f"/proc/self/fd/{descriptor}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self._note_folder(path)
        else:
            self._note_file(path)

    def _note_folder(self, path: str) -> None:
        with os.scandir(path) as found:
            self._entries[os.stat(path).st_ino] = {each.name: each.inode() for each in found}

    def _note_file(self, path: str) -> None:
        with open(path, "rb") as file:
            self._bytes[os.fstat(file.fileno()).st_ino] = file.read()

    # --- power failures ---

    def fail(self) -> None:
        """Sets the folder back to what a disk may have after a power failure; that is durable then."""
        before = self._root.with_name("before")
        self._root.rename(before)
        self._rebuild(before, before.stat().st_ino, self._root)
        shutil.rmtree(before)
        self._bytes.clear()
        self._entries.clear()
        self.begin()

    def _rebuild(self, old: Path | None, inode: int, target: Path) -> None:
        """Makes a folder from the one that was there, if it still was, and from what is durable of it."""
        target.mkdir(mode=0o700)
        now = {each.name: each for each in sorted(os.scandir(old), key=lambda each: each.name)} if old else {}
        durable = self._entries.get(inode, {})
        for name in sorted({*now, *durable}):
            entry, was = now.get(name), durable.get(name)
            if name.startswith(DATABASE):
                if entry is not None and not name.endswith("-shm"):  # that is memory
                    os.replace(entry.path, target / name)
                continue
            if entry is not None and (
                entry.inode() == was or self._chance(f"{'new' if was is None else 'other'} name")
            ):
                self._take(Path(entry.path), entry.inode(), target / name)
            elif was is not None and (entry is not None or self._chance("removed name")):
                self._take(None, was, target / name)

    def _chance(self, what: str) -> bool:
        kept = self._rng.random() < 0.5
        self.happened[f"{what}: {'the change' if kept else 'no change'}"] += 1
        return kept

    def _take(self, path: Path | None, inode: int, target: Path) -> None:
        is_folder = path.is_dir() if path else inode in self._entries
        if is_folder:
            self._rebuild(path, inode, target)
            return
        durable = self._bytes.get(inode)
        content = path.read_bytes() if path else durable or b""
        if content != durable:
            content = self._draw(durable or b"", content)
        target.write_bytes(content)
        target.chmod(0o600)

    def _draw(self, old: bytes, new: bytes) -> bytes:
        """The bytes of a file that was not synced since it was written. Synced sectors change if written again only."""
        kind = self._rng.choice(("old", "new", "torn", "zeros"))
        self.happened[f"bytes not synced: {kind}"] += 1
        if kind in ("old", "new"):
            return old if kind == "old" else new
        cut = self._rng.randrange(len(new) + 1)
        sectors = bytearray(old[: len(new)])
        for at in range(0, len(sectors), SECTOR_BYTES):
            if self._rng.random() < 0.5:
                sectors[at : at + SECTOR_BYTES] = new[at : min(at + SECTOR_BYTES, len(sectors))]
        added = new[len(sectors) :]
        return bytes(sectors) + (added[: max(cut - len(sectors), 0)] if kind == "torn" else bytes(len(added)))
