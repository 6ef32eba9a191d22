"""Least-recently-used eviction in a folder of limited size, on a disk that may be smaller than the limit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias, TypeVar

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_RESERVE_BYTES = 64 * 2**20
_RESERVE_SHARE = 0.05
"""What evicted files leave free for others: 64 MiB, but at most this share of a small disk."""
GiveWay: TypeAlias = Callable[[], bool]
"""Deletes a file that is not needed, so that a full disk has room; returns False if there is no such file."""
Result = TypeVar("Result")


def make_room(
    folder: Path, size_bytes: int, limit_bytes: int, spared: Collection[str], evicted: Callable[[Path, int], None]
) -> bool:
    """Delete the least recently used files until `size_bytes` fit into the limit, and on the disk.

    Return False if they cannot fit into the limit. `size_bytes` counts all files with a stem in `spared`; these are not
    deleted. `evicted` is called with each deleted file and its size. Raises `OSError`.
    """
    files = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.iterdir()]
    used = sorted(each for each in files if each[2].stem not in spared)
    num_there = sum(size for _, size, path in files if path.stem in spared)
    excess = sum(size for _, size, _ in used) + size_bytes - limit_bytes
    lacking = size_bytes - num_there - free_bytes(folder)
    for _, size, path in used:
        if max(excess, lacking) <= 0:
            break
        path.unlink()
        excess -= size
        lacking -= size
        evicted(path, size)
    return excess <= 0


def free_bytes(folder: Path) -> int:
    """Return how many bytes a folder's disk has for files that can be evicted."""
    disk = os.statvfs(folder)
    reserve = min(_RESERVE_BYTES, int(_RESERVE_SHARE * disk.f_blocks * disk.f_frsize))
    return disk.f_bavail * disk.f_frsize - reserve


def evict_one(folder: Path, spared: Collection[str], evicted: Callable[[Path, int], None]) -> bool:
    """Delete the least recently used file; return False if there are only `spared` ones. Raises `OSError`."""
    used = sorted((path.stat().st_mtime_ns, path) for path in folder.iterdir() if path.stem not in spared)
    for _, path in used[:1]:
        size = path.stat().st_size
        path.unlink()
        evicted(path, size)
    return bool(used)


def write(action: Callable[[], Result], give_way: GiveWay) -> Result:
    """Return the result of an action that writes; repeat it while the disk is full and something gives way to it.

    `make_room` cannot foresee everything: other programs write, too, and users have quotas. Raises `OSError`.
    """
    while True:
        try:
            return action()
        except OSError as exc:
            if exc.errno not in _FULL or not give_way():
                raise
