"""Durable files: complete or absent, even if the process is killed or the power fails.

A file is written under a temporary name, synced and renamed, and its folder is synced, so readers see either the old
file or the new one. A crash may leave a temporary file, `.fedplat-*.tmp`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from fedplat import system

Bytes: TypeAlias = bytes | bytearray | memoryview


@contextlib.contextmanager
def atomic_write(path: Path, mode: int = 0o600, *, overwrite: bool = True) -> Generator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends; after an error `path` is unchanged.

    `mode` is subject to the umask. Raises `OSError`, or `FileExistsError` if `path` exists and `overwrite` is False.
    """
    temporary = path.with_name(f".fedplat-{secrets.token_hex(8)}.tmp")
    try:
        with open(create(temporary, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # unlike a rename, a link never replaces a file
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_bytes(path: Path, content: Bytes, mode: int = 0o600, *, overwrite: bool = True) -> None:
    """Write a whole file; see `atomic_write`."""
    with atomic_write(path, mode, overwrite=overwrite) as file:
        file.write(content)


def rename_folder(source: Path, target: Path) -> None:
    """Sync the files of a folder without subfolders, and rename it. Raises `OSError`."""
    for path in (*source.iterdir(), source):
        sync(path)
    source.rename(target)
    sync(target.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist, so that their entries survive a power failure.

    An existing folder is synced, too: an earlier process may have been killed before it did that. Raises `OSError`.
    """
    missing = [each for each in path.parents if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)
    with contextlib.suppress(PermissionError):  # its parent may be entered but not read: then others have made it
        sync(path.parent)


def create(path: Path, mode: int = 0o600) -> int:
    """Create a file, open it for writing and return its descriptor. Raises `FileExistsError` if the path exists."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.O_BINARY, mode)


def write_all(descriptor: int, data: Bytes) -> None:
    """Write all of the data; a single system call may write less."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_at(descriptor: int, data: Bytes, position: int) -> None:
    """Write all of the data at a position of a file, which was not opened to append."""
    rest = memoryview(data).cast("B")
    while rest:
        count = system.pwrite(descriptor, rest, position)
        rest, position = rest[count:], position + count


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk so that they survive a power failure.

    Do not retry after an error: the kernel may have dropped the data that it could not write, and a second call would
    succeed.
    """
    system.sync(path)
