"""Checks the files that the database names: the blobs of versions, deltas and optimizer states.

Blocks; run it in a thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fedplat.rounds import AssignmentId
from fedplat.rounds.invariants.records import Location
from fedplat_server.storage import files, spool
from fedplat_server.verify.records import Finding

LOST_BLOB = "Copy the file back from a backup of the blobs; without it this version is lost."
LOST_UPDATE = "Restart the daemon: it abandons the attempt and tries the round again. Then look at the disk."
Progress = Callable[[int, int], None]
"""Called with the number of bytes read so far, and in all."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReferencedFiles:
    """A blob with a reference in the database; `size_bytes` is None if its size is unknown."""

    place: Location
    what: str
    size_bytes: int | None


@dataclasses.dataclass(frozen=True)
class DataFolder:
    """The folder of blobs: sizes by digest, and files that are not blobs."""

    sizes: Mapping[str, int]
    unknown: tuple[Path, ...]


def list_blobs(folder: Path) -> DataFolder:
    """Return the blobs, without files that are removed meanwhile."""
    sizes: dict[str, int] = {}
    unknown: list[Path] = []
    with files.translate_os_errors(f"listing {folder}"):
        for path in sorted(folder.rglob("*")):
            try:
                if not path.is_file():
                    continue
                size_bytes = path.stat().st_size
            except FileNotFoundError:
                continue
            if path == path_of(folder, path.name) and files.is_digest(path.name):
                sizes[path.name] = size_bytes
            else:
                unknown.append(path.relative_to(folder))
    return DataFolder(sizes, tuple(unknown))


def path_of(folder: Path, digest: str) -> Path:
    """Return the path of a blob."""
    return folder / digest[:2] / digest[2:4] / digest


def blobs(folder: Path, needed: Mapping[str, ReferencedFiles], progress: Progress) -> Iterator[tuple[str, Finding]]:
    """I2: every referenced blob exists, whole, with the digest of its name. Yields findings by digest."""
    total = sum(one.size_bytes or 0 for one in needed.values())
    done = 0
    for digest, one in needed.items():
        wrong = _wrong(path_of(folder, digest), digest, one)
        if wrong is not None:
            yield digest, Finding("I2", "blobs", one.place, f"{one.what} {wrong[0]}", wrong[1], LOST_BLOB)
        done += one.size_bytes or 0
        progress(done, total)


def check_spool(folder: Path, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
    """I3: every update that was acknowledged and is not merged yet lies in the spool, as it was reported."""
    for key, digest in needed.items():
        place = Location(*key.attempt, key.client_id)
        wrong = _wrong(spool.path_of(folder, key, digest), digest, ReferencedFiles(place, "its update", None))
        if wrong is not None:
            yield key, Finding("I3", "spooled", place, f"its update {wrong[0]}", wrong[1], LOST_UPDATE)


def _wrong(path: Path, digest: str, needed: ReferencedFiles) -> tuple[str, str] | None:
    """Return what was found and what was expected, if they differ."""
    if not files.is_digest(digest):
        return f"is named {digest[:100]!r}", "a SHA-256 in hexadecimal digits"
    try:
        if not path.is_file():
            return "is not there", f"the file {path}"
        size_bytes = path.stat().st_size
        if needed.size_bytes is not None and size_bytes != needed.size_bytes:
            return f"has {size_bytes} bytes in {path}", f"{needed.size_bytes} bytes"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        return f"cannot be read ({exc.strerror})", f"a readable file {path}"
    return (f"has the digest {found}", f"{digest}, as its name says") if found != digest else None
