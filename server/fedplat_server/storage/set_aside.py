"""Files that the database of a folder does not mention: they are moved into `set-aside`, and removed after `KEEP_S`.

They may belong to a newer copy of the database, of which an older backup was restored. If the newer one is put back in
time, the next start finds the files again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from fedplat_server import logs
from fedplat_server.storage import files

FOLDER = "set-aside"
BEGINNING_BYTES = 1 << 16
"""The part of a file by which it is recognized."""
KEEP_S = 3 * 86_400.0
"""The time after which a file that was set aside is removed. A long weekend is shorter."""


def put(path: Path, folder: Path) -> None:
    """Move a file or folder into `folder/set-aside`, where its time begins now."""
    aside = folder / FOLDER
    aside.mkdir(exist_ok=True)
    target, number = aside / path.name, 0
    while target.is_dir():
        number += 1
        target = aside / f"{path.name}.{number}"
    os.utime(path)  # first: a crash in between costs nothing
    os.replace(path, target)


def expire(folder: Path, remove: Callable[[Path], None] = Path.unlink) -> None:
    """Remove what has been in `folder/set-aside` for `KEEP_S`. `remove` removes a file."""
    until = time.time() - KEEP_S
    with files.translate_os_errors(f"removing old files in {folder / FOLDER}"):
        for path in list(folder.glob(f"{FOLDER}/*")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= until:
                    shutil.rmtree(path) if path.is_dir() else remove(path)


def clear(folder: Path, needed: Collection[str], known: Collection[str], is_own: Callable[[str], bool]) -> None:
    """Remove the entries of a folder that are `known` but not `needed`, and set the unknown ones aside.

    Entries whose names are not like those that fedplat makes (`is_own`) are left alone: they are the operator's.
    """
    num_aside = 0
    for path in list(folder.iterdir()):
        if path.name in needed or not is_own(path.name):
            continue
        if path.name in known:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            put(path, folder)
            num_aside += 1
    if num_aside:
        warn(folder / FOLDER, num_aside)


def warn(where: object, num_files: int) -> None:
    """Log that files were set aside, and for how long."""
    logs.get().warning(
        f"files that the database does not know were moved to {where}, and are removed in {KEEP_S / 86_400:.0f} days: "
        "if an older backup of the database was restored, put the newer one back before that",
        files=num_files,
    )
